// The CPU path of partial_sum.h. Internal.
#ifndef MOE_KERNELS_PARTIAL_SUM_PARTIAL_SUM_CPU_H_
#define MOE_KERNELS_PARTIAL_SUM_PARTIAL_SUM_CPU_H_

#include <cstdint>

namespace moe {

// acc[i] = partial[i] + acc[i], both [n]. The width of the vectors changes no bit.
void AddPartialRange(const float* partial, float* acc, int64_t n);
void AddPartialRange(const uint64_t* partial, uint64_t* acc, int64_t n);

}  // namespace moe

#endif  // MOE_KERNELS_PARTIAL_SUM_PARTIAL_SUM_CPU_H_
