// One row of softmax cross-entropy on the CPU.
#ifndef MOE_KERNELS_CROSS_ENTROPY_CROSS_ENTROPY_CPU_H_
#define MOE_KERNELS_CROSS_ENTROPY_CROSS_ENTROPY_CPU_H_

#include <cstdint>

namespace moe {

// Returns the loss of a row of n logits. d_logits [n], if not null, may be `logits`.
// Instantiated for float, BFloat16 and Float16.
template <typename T>
float CrossEntropyRow(const float* logits, int64_t n, int64_t target, float scale, T* d_logits);

}  // namespace moe

#endif  // MOE_KERNELS_CROSS_ENTROPY_CROSS_ENTROPY_CPU_H_
