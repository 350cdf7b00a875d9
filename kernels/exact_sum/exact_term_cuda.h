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

// ExactTerm without tally.largest.
__device__ inline int64_t GridTerm(float partial, double inverse_unit, int64_t limit,
                                   ThreadTally& tally) {
  const double q = static_cast<double>(partial) * inverse_unit;
  const bool is_integer = fabs(q) < 0x1p63;  // a NaN is not
  const int64_t term = is_integer ? llrint(q) : 0;
  const bool holds = is_integer && term <= limit && term >= -limit;
  tally.non_finite += holds ? 0 : 1;
  tally.inexact += holds && static_cast<double>(term) != q ? 1 : 0;
  return holds ? term : 0;
}

// The term of `partial` in an exact sum (exact_sum.h): 0 if the grid cannot represent it.
__device__ inline int64_t ExactTerm(float partial, double inverse_unit, int64_t limit,
                                    ThreadTally& tally) {
  const int64_t term = GridTerm(partial, inverse_unit, limit, tally);
  const uint32_t magnitude = __builtin_bit_cast(uint32_t, partial) & 0x7fffffffu;
  tally.largest = magnitude > tally.largest ? magnitude : tally.largest;
  return term;
}

// totals[i] += ExactTerm(partials[i], ...). Mostly all partials are within 2^51 units and the
// limit: two additions round them then, since numbers from 2^52 to 2^53 have no fractions, and the
// bits of such a number count units. Conversions to integers and back would take three times as
// long.
template <int kCount>
__device__ __forceinline__ void AddExactTerms(const float (&partials)[kCount], double inverse_unit,
                                              int64_t limit, int64_t (&totals)[kCount],
                                              ThreadTally& tally) {
  constexpr double kShift = 0x1.8p52;
  constexpr int64_t kShiftBits = 0x4338000000000000, kMost = int64_t{1} << 51;
  uint32_t largest = 0;
  MOE_UNROLL
  for (int i = 0; i < kCount; ++i) {
    const float partial = partials[i];
    const uint32_t magnitude = __builtin_bit_cast(uint32_t, partial) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  tally.largest = largest > tally.largest ? largest : tally.largest;
  const double most = static_cast<double>(__builtin_bit_cast(float, largest)) * inverse_unit;
  if (most <= static_cast<double>(limit < kMost ? limit : kMost)) {  // no NaN is
    MOE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const double q = static_cast<double>(partials[i]) * inverse_unit;
      const double shifted = q + kShift;
      totals[i] += __builtin_bit_cast(int64_t, shifted) - kShiftBits;
      tally.inexact += shifted - kShift != q ? 1 : 0;
    }
    return;
  }
  MOE_UNROLL
  for (int i = 0; i < kCount; ++i) {
    // The branch keeps the compiler from mixing the terms, which would take more registers.
    if (partials[i] != 0) totals[i] += GridTerm(partials[i], inverse_unit, limit, tally);
  }
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
