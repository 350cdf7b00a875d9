// What kernels call of CUB, for the simulator. One simulated thread does all of the work of a
// device-wide operation when the stream comes to it. As in CUB, a call without scratch only returns
// its size, and the scratch is overwritten.
#ifndef MOE_TESTS_CUSIM_CUB_H_
#define MOE_TESTS_CUSIM_CUB_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/cusim/cusim.h"
#include "tests/cusim/device.h"

namespace cusim {

inline cudaError_t DeviceWide(void* scratch, size_t& bytes, size_t needed,
                              std::function<void()> work, cudaStream_t stream) {
  if (scratch == nullptr) {
    bytes = needed;
    return cudaSuccess;
  }
  if (bytes < needed) return cudaErrorInvalidValue;
  return LaunchOne(
      [=, work = std::move(work)] {
        std::memset(scratch, 0xff, needed);
        work();
      },
      stream);
}

}  // namespace cusim

namespace cub {

struct DeviceScan {
  template <typename T>
  static cudaError_t ExclusiveSum(void* scratch, size_t& bytes, const T* in, T* out, int n,
                                  cudaStream_t stream) {
    const size_t tiles = static_cast<size_t>(n) / 512 + 1;
    return cusim::DeviceWide(
        scratch, bytes, (tiles + 32) * 8 + 255, [=] { std::exclusive_scan(in, in + n, out, T(0)); },
        stream);
  }
};

struct DeviceRadixSort {
  // Compares bits [first_bit, end_bit) of keys.
  template <typename Key, typename Value>
  static cudaError_t SortPairs(void* scratch, size_t& bytes, const Key* keys, Key* sorted_keys,
                               const Value* values, Value* sorted_values, int n, int first_bit,
                               int end_bit, cudaStream_t stream) {
    const size_t size = static_cast<size_t>(n), counters = (size / 1024 + 5) * 1024;
    const auto sort = [=] {
      std::vector<std::pair<Key, Value>> pairs(size);
      for (size_t i = 0; i < size; ++i) pairs[i] = {keys[i], values[i]};
      const uint64_t mask = (uint64_t{1} << end_bit) - (uint64_t{1} << first_bit);
      std::stable_sort(pairs.begin(), pairs.end(), [mask](const auto& a, const auto& b) {
        return (a.first & mask) < (b.first & mask);
      });
      for (size_t i = 0; i < size; ++i) std::tie(sorted_keys[i], sorted_values[i]) = pairs[i];
    };
    return cusim::DeviceWide(
        scratch, bytes, size * (sizeof(Key) + sizeof(Value)) + counters + 5 * 255, sort, stream);
  }
};

enum BlockScanAlgorithm { BLOCK_SCAN_WARP_SCANS };

// Called by all kThreads threads of a block. As in CUB, a barrier must precede another use of the
// storage: there is none after the last read.
template <typename T, int kThreads, BlockScanAlgorithm>
class BlockScan {
 public:
  struct TempStorage {
    T value[kThreads];
  };

  explicit BlockScan(TempStorage& storage) : storage_(storage) {}

  void ExclusiveSum(T value, T& sum_before, T& sum) {
    storage_.value[threadIdx.x] = value;
    __syncthreads();
    sum_before = std::accumulate(storage_.value, storage_.value + threadIdx.x, T(0));
    sum = std::accumulate(storage_.value + threadIdx.x, storage_.value + kThreads, sum_before);
  }

 private:
  TempStorage& storage_;
};

}  // namespace cub

#endif  // MOE_TESTS_CUSIM_CUB_H_
