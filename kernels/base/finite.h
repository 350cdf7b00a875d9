// Counts float32 values that are NaN or infinite, at the speed of memory where none is.
#ifndef MOE_KERNELS_BASE_FINITE_H_
#define MOE_KERNELS_BASE_FINITE_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace moe {

// Number of NaNs and infinities among the `count` floats at `values`, which need no alignment.
inline int64_t CountNonFinite(const void* values, int64_t count) {
  constexpr int64_t kBlock = 256;  // fixed, so that compilers make vectors of it
  constexpr uint32_t kInfinity = 0x7f800000;
  const auto* const bytes = static_cast<const unsigned char*>(values);
  const auto magnitude = [&](int64_t i) {
    uint32_t bits;
    std::memcpy(&bits, bytes + i * int64_t{sizeof bits}, sizeof bits);
    return bits & ~(uint32_t{1} << 31);
  };
  int64_t found = 0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(count, begin + kBlock);
    if (end - begin == kBlock) {
      uint32_t largest = 0;
      for (int64_t i = 0; i < kBlock; ++i) largest = std::max(largest, magnitude(begin + i));
      if (largest < kInfinity) continue;
    }
    for (int64_t i = begin; i < end; ++i) found += magnitude(i) >= kInfinity ? 1 : 0;
  }
  return found;
}

}  // namespace moe

#endif  // MOE_KERNELS_BASE_FINITE_H_
