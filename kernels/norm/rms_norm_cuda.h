// The CUDA path of rms_norm.h. Internal: plain C++ between rms_norm.cc (Abseil) and
// rms_norm_cuda.cu (nvcc, no Abseil).
#ifndef MOE_KERNELS_NORM_RMS_NORM_CUDA_H_
#define MOE_KERNELS_NORM_RMS_NORM_CUDA_H_

#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"

namespace moe::rms_norm {

// The arguments of RmsNorm, in device memory.
template <typename T>
struct CudaForward {
  MatrixView<const T> x;  // [T, H]
  const float* weight;    // [H]
  float epsilon;
  MatrixView<T> y;  // [T, H]
  float* rstd;      // [T]
};

// The arguments of RmsNormBackward, in device memory.
template <typename T>
struct CudaBackward {
  MatrixView<const T> x;
  const float* weight;
  const float* rstd;
  MatrixView<const T> dy;
  MatrixView<T> dx;
  Write write_dx;
  float* d_weight;  // [H]
  Write write_d_weight;
};

// Enqueue on `stream` and return; the error of the launch alone. The bits of rms_norm.cc on a CPU
// with fused multiply-add: half a warp shares a row's sum in the order of FixedDot, and a thread
// owns a column of d_weight. Instantiated for float, BFloat16 and Float16.
template <typename T>
cudaError_t Run(const CudaForward<T>& forward, cudaStream_t stream);
template <typename T>
cudaError_t Run(const CudaBackward<T>& backward, cudaStream_t stream);

// AddRows: out = a + b, rounded to T once; out may be a or b. Also 16-bit types + float.
template <typename T, typename U = T>
cudaError_t CudaAddRows(MatrixView<const T> a, MatrixView<const std::type_identity_t<U>> b,
                        MatrixView<T> out, cudaStream_t stream);

}  // namespace moe::rms_norm

#endif  // MOE_KERNELS_NORM_RMS_NORM_CUDA_H_
