// Conversion of partials to an exact grid, for kernels that add them up.
#ifndef MOE_KERNELS_EXACT_SUM_EXACT_TERM_CUDA_H_
#define MOE_KERNELS_EXACT_SUM_EXACT_TERM_CUDA_H_

#include <cstdint>

#include <math.h>

#include <cuda/atomic>

#include "kernels/base/cuda_kernel.h"
#include "kernels/exact_sum/grid_tally.h"

namespace moe::exact_sum {

// A GridTally of one thread.
struct ThreadTally {
  int32_t non_finite = 0, inexact = 0;
  uint32_t largest = 0;  // the bits of |partial|, a NaN's included
};

// The term of `partial` in an exact sum (exact_sum.h): 0 if the grid cannot represent it.
__device__ inline int64_t ExactTerm(float partial, double inverse_unit, int64_t limit,
                                    ThreadTally& tally) {
  const double q = static_cast<double>(partial) * inverse_unit;
  const bool is_integer = fabs(q) < 0x1p63;  // a NaN is not
  const int64_t term = is_integer ? llrint(q) : 0;
  const bool holds = is_integer && term <= limit && term >= -limit;
  tally.non_finite += holds ? 0 : 1;
  tally.inexact += holds && static_cast<double>(term) != q ? 1 : 0;
  const uint32_t magnitude = __builtin_bit_cast(uint32_t, partial) & 0x7fffffffu;
  tally.largest = magnitude > tally.largest ? magnitude : tally.largest;
  return holds ? term : 0;
}

// Adds the tallies of a warp to `sum`; all of its threads call this. Tallies are integers, so that
// the order does not matter.
__device__ inline void AddTally(const ThreadTally& mine, GridTally* sum) {
  constexpr uint32_t kInfinity = 0x7f800000u;
  const int32_t non_finite = __reduce_add_sync(cuda::kAllLanes, mine.non_finite);
  const int32_t inexact = __reduce_add_sync(cuda::kAllLanes, mine.inexact);
  const uint32_t bits = __reduce_max_sync(cuda::kAllLanes, mine.largest);
  const int64_t largest = bits < kInfinity ? bits : kInfinity;
  if (threadIdx.x % cuda::kWarpLanes != 0) return;
  using Counter = ::cuda::atomic_ref<int64_t, ::cuda::thread_scope_device>;
  constexpr auto kRelaxed = ::cuda::memory_order_relaxed;
  if (non_finite > 0) Counter(sum->non_finite).fetch_add(non_finite, kRelaxed);
  if (inexact > 0) Counter(sum->inexact).fetch_add(inexact, kRelaxed);
  const Counter most(sum->largest);
  if (most.load(kRelaxed) < largest) most.fetch_max(largest, kRelaxed);
}

}  // namespace moe::exact_sum

#endif  // MOE_KERNELS_EXACT_SUM_EXACT_TERM_CUDA_H_
