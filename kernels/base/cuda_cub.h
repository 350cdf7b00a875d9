// Device-wide operations of CUB, the CUDA toolkit's library, for .cu files. Enqueued on a stream
// like kernels; on the simulator by tests/cusim/cub.h. Of integers and stable: results are fixed.
#ifndef MOE_KERNELS_BASE_CUDA_CUB_H_
#define MOE_KERNELS_BASE_CUDA_CUB_H_

#include <cstddef>
#include <cstdint>

#include "kernels/base/cub_scratch.h"
#include "kernels/base/cuda_kernel.h"

#if defined(__CUDACC__)
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#else
#include <cusim/cub.h>
#endif

namespace moe::cuda {

// Replaces each of n values by the sum of those before it. scratch [ScanScratchBytes(n)].
template <typename T>
cudaError_t ExclusiveSum(T* values, int n, void* scratch, cudaStream_t stream) {
  // CUB returns the last error of this thread, which may come from another call.
  (void)cudaGetLastError();
  auto bytes = static_cast<size_t>(ScanScratchBytes(n));
  return cub::DeviceScan::ExclusiveSum(scratch, bytes, values, values, n, stream);
}

// n pairs in ascending order of their keys, which are below 2^bits; pairs with equal keys keep
// their order. scratch [SortScratchBytes(n)]; no arrays overlap.
template <typename Key, typename Value>
cudaError_t SortPairs(const Key* keys, const Value* values, int n, int bits, Key* sorted_keys,
                      Value* sorted_values, void* scratch, cudaStream_t stream) {
  static_assert(sizeof(Key) == 4 && sizeof(Value) == 4);
  (void)cudaGetLastError();
  auto bytes = static_cast<size_t>(SortScratchBytes(n));
  return cub::DeviceRadixSort::SortPairs(scratch, bytes, keys, sorted_keys, values, sorted_values,
                                         n, 0, bits, stream);
}

}  // namespace moe::cuda

#endif  // MOE_KERNELS_BASE_CUDA_CUB_H_
