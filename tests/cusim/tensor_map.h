// What a tensor map of the simulated device holds, and how its tiles are swizzled.
#ifndef MOE_TESTS_CUSIM_TENSOR_MAP_H_
#define MOE_TESTS_CUSIM_TENSOR_MAP_H_

#include <cstdint>

namespace cusim {

// Of a tensor of 16-bit elements and three dimensions, the first one contiguous. Lies in the 128
// bytes of a CUtensorMap.
struct TensorMap {
  uint64_t magic;  // kMagic
  const uint16_t* data;
  uint64_t size[3];    // elements
  uint64_t stride[3];  // bytes
  uint32_t box[3];     // elements
  uint32_t swizzle_bytes;

  static constexpr uint64_t kMagic = 0x70616d726f736e65;
};
static_assert(sizeof(TensorMap) <= 128);

// Where the byte at `address` of a tile lies: rows of 32, 64 or 128 bytes have their 16-byte chunks
// exchanged by the bits above the row's place in 128 bytes. PTX ISA, "Swizzling modes".
inline uint32_t Swizzled(uint32_t address, uint32_t swizzle_bytes) {
  const uint32_t mask = swizzle_bytes == 0 ? 0 : swizzle_bytes / 16 - 1;
  return address ^ ((address >> 7 & mask) << 4);
}

}  // namespace cusim

#endif  // MOE_TESTS_CUSIM_TENSOR_MAP_H_
