// One range of an AdamW step on the CPU.
#ifndef MOE_KERNELS_ADAMW_ADAMW_CPU_H_
#define MOE_KERNELS_ADAMW_ADAMW_CPU_H_

#include <cstdint>

namespace moe {

// The constants of one step.
struct AdamWStep {
  float gradient_scale;
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float correction1;  // 1 - beta1^step, taken in float64
  float correction2;  // 1 - beta2^step
  float epsilon;
  float learning_rate;
  float weight_decay;
};

// Elements [0, n), in the order of operations of AdamW's header: no fused multiply-add, so the bits
// are the same on every SIMD target.
void AdamWRange(const AdamWStep& step, const float* gradient, float* weight, float* m, float* v,
                int64_t n);

}  // namespace moe

#endif  // MOE_KERNELS_ADAMW_ADAMW_CPU_H_
