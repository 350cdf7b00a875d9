// What both paths of adamw.h take. Internal. Plain C++: .cu files include it.
#ifndef MOE_KERNELS_ADAMW_ADAMW_OP_H_
#define MOE_KERNELS_ADAMW_ADAMW_OP_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"

namespace moe::adamw {

// The constants of one step.
struct Step {
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

// Arrays [n], none of them shared.
struct AdamW {
  Step step;
  const float* gradient;
  float* weight;
  float* m;
  float* v;
  int64_t n;
};

// Memory of the host. In the order of operations of AdamW's header, with no fused multiply-add, so
// that the bits are the same on every SIMD target.
void Run(const AdamW& adamw);

// Memory of the device. Enqueues on `stream` and returns; the error of the launch alone. The bits
// of the CPU: the same IEEE additions, products, divisions and square root in the same order, none
// of them fused or approximated. NaNs stay NaNs, of another payload.
cudaError_t Run(const AdamW& adamw, cudaStream_t stream);

}  // namespace moe::adamw

#endif  // MOE_KERNELS_ADAMW_ADAMW_OP_H_
