// The CUDA path of bias.h. Internal: plain C++ between bias.cc (Abseil) and bias_cuda.cu (nvcc, no
// Abseil).
#ifndef MOE_KERNELS_BIAS_BIAS_CUDA_H_
#define MOE_KERNELS_BIAS_BIAS_CUDA_H_

#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"

namespace moe::bias {

// y[n, c] = T(float(y[n, c]) + bias[c]): AddBias for the rows of one group. y [N, C], bias [C] in
// device memory. Enqueues on `stream` and returns; the error of the launch alone. The bits of
// bias.cc. Instantiated for float, BFloat16 and Float16.
template <typename T>
cudaError_t CudaAddBias(MatrixView<T> y, const float* bias, cudaStream_t stream);

// BiasGradient: a thread owns a column and adds its terms in ascending n.
template <typename T>
cudaError_t CudaBiasGradient(MatrixView<const T> dy, float* d_bias, Write write,
                             cudaStream_t stream);

}  // namespace moe::bias

#endif  // MOE_KERNELS_BIAS_BIAS_CUDA_H_
