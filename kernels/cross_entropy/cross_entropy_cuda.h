// The CUDA path of cross_entropy.h. Internal: plain C++ between cross_entropy.cc (Abseil) and
// cross_entropy_cuda.cu (nvcc, no Abseil).
#ifndef MOE_KERNELS_CROSS_ENTROPY_CROSS_ENTROPY_CUDA_H_
#define MOE_KERNELS_CROSS_ENTROPY_CROSS_ENTROPY_CUDA_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"

namespace moe::cross_entropy {

// The arguments of CrossEntropy, in device memory.
template <typename T>
struct CudaCrossEntropy {
  MatrixView<const float> logits;  // [T, V]
  const int32_t* target;           // [T]
  float scale;
  float* loss;             // [T]
  MatrixView<T> d_logits;  // [T, V], may be `logits` when T is float; no data = loss only
};

// Enqueues on `stream` and returns; the error of the launch alone. The bits of a row depend on its
// values and on V alone. Targets are not known to the host: one outside [0, V) makes its loss and
// its row of gradients NaN, and nothing is accessed out of bounds.
// Instantiated for float, BFloat16 and Float16.
template <typename T>
cudaError_t Run(const CudaCrossEntropy<T>& problem, cudaStream_t stream);

}  // namespace moe::cross_entropy

#endif  // MOE_KERNELS_CROSS_ENTROPY_CROSS_ENTROPY_CUDA_H_
