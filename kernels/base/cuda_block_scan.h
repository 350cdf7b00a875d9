// Prefix sums of integers over a block, by CUB; on the simulator by tests/cusim/cub.h.
#ifndef MOE_KERNELS_BASE_CUDA_BLOCK_SCAN_H_
#define MOE_KERNELS_BASE_CUDA_BLOCK_SCAN_H_

#include <cstdint>

#include "kernels/base/cuda_kernel.h"

#if defined(__CUDACC__)
#include <cub/block/block_scan.cuh>
#else
#include <cusim/cub.h>
#endif

namespace moe::cuda {

// Calls visit(i, sum of value(j) for j < i, value(i)) for i < n, one thread an i. All kThreads
// threads of the block must call it with the same n. It synchronises the block between its rounds,
// but not after the last visit.
template <int kThreads, typename Value, typename Visit>
__device__ void ForPrefixSums(int n, Value value, Visit visit) {
  using Scan = cub::BlockScan<int32_t, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  MOE_SHARED_ARRAY(typename Scan::TempStorage, storage, 1);
  int32_t before = 0;
  for (int first = 0; first < n; first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    const int32_t mine = i < n ? value(i) : 0;
    int32_t prefix = 0, sum = 0;
    Scan(storage[0]).ExclusiveSum(mine, prefix, sum);
    __syncthreads();  // the next round overwrites the storage
    if (i < n) visit(i, before + prefix, mine);
    before += sum;
  }
}

}  // namespace moe::cuda

#endif  // MOE_KERNELS_BASE_CUDA_BLOCK_SCAN_H_
