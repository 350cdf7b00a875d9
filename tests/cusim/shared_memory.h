// The shared memory of one block. Internal to the simulator.
#ifndef MOE_TESTS_CUSIM_SHARED_MEMORY_H_
#define MOE_TESTS_CUSIM_SHARED_MEMORY_H_

#include <cstddef>
#include <vector>

namespace cusim {

// Every array lies between two red zones: poisoned under AddressSanitizer, which then names the
// line of a read or write there; without it a write is found when the block ends. Arrays start out
// as bytes 0xff (floats: NaN, integers: -1), so that using one before it is written shows.
class SharedMemory {
 public:
  SharedMemory() = default;
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // The array of the declaration `site`: taken the first time, the same one afterwards.
  void* Get(const void* site, size_t bytes);
  // The array whose red zones were written, or -1.
  int FindOverrun() const;

  static constexpr size_t kAlignment = 128;

 private:
  static constexpr size_t kRedZoneBytes = 256;
  struct Array {
    const void* site;
    size_t bytes;
    unsigned char* memory;  // red zone, array, red zone
  };
  std::vector<Array> arrays_;
};

}  // namespace cusim

#endif  // MOE_TESTS_CUSIM_SHARED_MEMORY_H_
