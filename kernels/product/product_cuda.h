// The CUDA path of product.h. Internal: plain C++ between product.cc (Abseil) and product_cuda.cu
// (nvcc, no Abseil).
#ifndef MOE_KERNELS_PRODUCT_PRODUCT_CUDA_H_
#define MOE_KERNELS_PRODUCT_PRODUCT_CUDA_H_

#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"

namespace moe::product {

// The arguments of MultiplyRows, in device memory; all [T, H].
template <typename T, typename U>
struct CudaProduct {
  MatrixView<const U> a;
  MatrixView<const float> b;
  MatrixView<T> out;  // may be a or b
  Write write;
};

// Enqueues on `stream` and returns; the error of the launch alone. The bits of product.cc.
// Instantiated for float, the 16-bit types, and those from float.
template <typename T, typename U>
cudaError_t Run(const CudaProduct<T, U>& product, cudaStream_t stream);

}  // namespace moe::product

#endif  // MOE_KERNELS_PRODUCT_PRODUCT_CUDA_H_
