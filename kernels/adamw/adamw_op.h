// Arguments of both paths of adamw.h. Internal. Plain C++: .cu files include it.
#ifndef MOE_KERNELS_ADAMW_ADAMW_OP_H_
#define MOE_KERNELS_ADAMW_ADAMW_OP_H_

#include <cstdint>

#include "kernels/adamw/adamw_slice.h"
#include "kernels/base/cuda_types.h"
#include "kernels/exact_sum/sum_view.h"

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
};

// View: SumView of float or int64_t.
template <class View>
struct AdamW {
  Step step;
  View gradients;
  const AdamWSlice* slices;  // [count], which cover elements [first, end) of the gradients
  int64_t count;
  int64_t first, end;
  int64_t* non_finite;  // may be null
};

// Arrays are device memory. Enqueues on `stream` and returns the launch error alone. The bits are
// the CPU's: the same IEEE additions, products, divisions and square root in the same order, none
// of them fused or approximated. NaNs stay NaNs, but their payload may differ.
template <class View>
cudaError_t Run(const AdamW<View>& adamw, cudaStream_t stream);

}  // namespace moe::adamw

#endif  // MOE_KERNELS_ADAMW_ADAMW_OP_H_
