// Arguments of both paths of cross_entropy.h, in the memory of one device. Internal. Plain C++: .cu
// files include it.
#ifndef MOE_KERNELS_CROSS_ENTROPY_CROSS_ENTROPY_OP_H_
#define MOE_KERNELS_CROSS_ENTROPY_CROSS_ENTROPY_OP_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"

namespace moe::cross_entropy {

template <typename T>
struct CrossEntropy {
  MatrixView<const float> logits;  // [T, V]
  const int32_t* target;           // [T]
  float scale;
  float* loss;             // [T]
  MatrixView<T> d_logits;  // [T, V], may be `logits` when T is float; no data = loss only
};

// Enqueues on `stream` and returns the launch error alone. The bits of a row depend on its values
// and on V alone. The host does not know the targets: one outside [0, V) makes its loss and its row
// of gradients NaN, and nothing is accessed out of bounds.
template <typename T>
cudaError_t Run(const CrossEntropy<T>& problem, cudaStream_t stream);

}  // namespace moe::cross_entropy

#endif  // MOE_KERNELS_CROSS_ENTROPY_CROSS_ENTROPY_OP_H_
