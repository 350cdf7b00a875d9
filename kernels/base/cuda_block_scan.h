// Prefix sums of integers over a warp and over a block. CUB's BlockScan does not run on the
// simulator (docs/cuda.md, "CUB and Thrust").
#ifndef MOE_KERNELS_BASE_CUDA_BLOCK_SCAN_H_
#define MOE_KERNELS_BASE_CUDA_BLOCK_SCAN_H_

#include <cstdint>

#include "kernels/base/cuda_kernel.h"

namespace moe::cuda {

// The sum of the values of lanes 0 .. this one.
__device__ inline int32_t WarpPrefixSum(int32_t value) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  for (int distance = 1; distance < kWarpLanes; distance *= 2) {
    const int32_t other = __shfl_up_sync(kAllLanes, value, static_cast<unsigned>(distance));
    if (lane >= distance) value += other;
  }
  return value;
}

// Calls visit(i, sum of value(j) for j < i, value(i)) for i < n, one thread an i. All kThreads
// threads of the block must call it with the same n. It synchronises the block between its rounds,
// but not after the last visit.
template <int kThreads, typename Value, typename Visit>
__device__ void ForPrefixSums(int n, Value value, Visit visit) {
  constexpr int kWarps = kThreads / kWarpLanes;
  MOE_SHARED_ARRAY(int32_t, warp_sum, kWarps);
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  int32_t before = 0;
  for (int first = 0; first < n; first += kThreads) {
    const int i = first + static_cast<int>(threadIdx.x);
    const int32_t mine = i < n ? value(i) : 0;
    const int32_t sum = WarpPrefixSum(mine);
    if (threadIdx.x % kWarpLanes == kWarpLanes - 1) warp_sum[warp] = sum;
    __syncthreads();
    int32_t prefix = before + sum - mine;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) prefix += warp_sum[w];
      before += warp_sum[w];
    }
    __syncthreads();  // the next round writes warp_sum
    if (i < n) visit(i, prefix, mine);
  }
}

}  // namespace moe::cuda

#endif  // MOE_KERNELS_BASE_CUDA_BLOCK_SCAN_H_
