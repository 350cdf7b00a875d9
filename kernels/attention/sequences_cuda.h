// Where a row of packed sequences belongs. Device code.
#ifndef MOE_KERNELS_ATTENTION_SEQUENCES_CUDA_H_
#define MOE_KERNELS_ATTENTION_SEQUENCES_CUDA_H_

#include <cstdint>

#include "kernels/base/cuda_kernel.h"

namespace moe::attention {

// The last s in [0, count) with start(s) <= at, for starts that do not descend and start(0) <= at.
template <typename Start>
__device__ inline int64_t LastStartedBy(int64_t at, int64_t count, Start start) {
  int64_t low = 0, high = count;  // start(low) <= at; start(high) > at, or high is the end
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (start(middle) <= at ? low : high) = middle;
  }
  return low;
}

}  // namespace moe::attention

#endif  // MOE_KERNELS_ATTENTION_SEQUENCES_CUDA_H_
