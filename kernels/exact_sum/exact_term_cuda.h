// Partials on an exact grid, for kernels that add them up.
#ifndef MOE_KERNELS_EXACT_SUM_EXACT_TERM_CUDA_H_
#define MOE_KERNELS_EXACT_SUM_EXACT_TERM_CUDA_H_

#include <cstdint>

#include <math.h>

#include <cuda/atomic>

#include "kernels/base/cuda_kernel.h"

namespace moe::exact_sum {

// What `partial` adds to an exact sum (exact_sum.h): 0, and 1 to `non_finite`, if the grid cannot
// hold it.
__device__ inline int64_t ExactTerm(float partial, double inverse_unit, int64_t limit,
                                    int& non_finite) {
  const double q = static_cast<double>(partial) * inverse_unit;
  const bool is_integer = fabs(q) < 0x1p63;  // a NaN is not
  const int64_t term = is_integer ? llrint(q) : 0;
  const bool holds = is_integer && term <= limit && term >= -limit;
  non_finite += holds ? 0 : 1;
  return holds ? term : 0;
}

// Such partials are rare: each thread that found some adds their number once, an integer, so that
// the order does not matter.
__device__ inline void CountNonFinite(int count, int64_t* non_finite) {
  if (count == 0) return;
  ::cuda::atomic_ref<int64_t, ::cuda::thread_scope_device>(*non_finite)
      .fetch_add(count, ::cuda::memory_order_relaxed);
}

}  // namespace moe::exact_sum

#endif  // MOE_KERNELS_EXACT_SUM_EXACT_TERM_CUDA_H_
