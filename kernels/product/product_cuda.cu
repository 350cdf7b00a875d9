#include "kernels/base/cuda_elements.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/product/product_cuda.h"

namespace moe::product {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// A warp owns a row.
template <typename T, typename U>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) ProductKernel(CudaProduct<T, U> p) {
  const int64_t cols = p.out.cols();
  ForRows<kWarpLanes>(p.out.rows(), [&](int64_t t, int lane) {
    const U* const a = p.a.row(t);
    const float* const b = p.b.row(t);
    T* const out = p.out.row(t);
    const int64_t vector_columns = VectorColumns<T>(cols, a, b, out);
    ForColumns<T>(cols, vector_columns, lane, kWarpLanes, [&](int64_t h, auto width) {
      constexpr int kWidth = decltype(width)::value;
      const auto a_values = LoadElements<kWidth>(a + h);
      const auto b_values = LoadElements<kWidth>(b + h);
      Elements<T, kWidth> old = {};
      if (p.write == Write::kAdd) old = Load<kWidth>(out + h);
      Elements<T, kWidth> result;
      for (int i = 0; i < kWidth; ++i) {
        const float product = static_cast<float>(a_values.at[i]) * b_values.at[i];
        result.at[i] =
            T(p.write == Write::kAdd ? static_cast<float>(old.at[i]) + product : product);
      }
      Store(result, out + h);
    });
  });
}

}  // namespace

template <typename T, typename U>
cudaError_t Run(const CudaProduct<T, U>& product, cudaStream_t stream) {
  if (product.out.rows() == 0 || product.out.cols() == 0) return cudaSuccess;
  return Launch(&ProductKernel<T, U>, RowShape<kWarpLanes>(product.out.rows()), stream, product);
}

template cudaError_t Run(const CudaProduct<float, float>&, cudaStream_t);
template cudaError_t Run(const CudaProduct<BFloat16, BFloat16>&, cudaStream_t);
template cudaError_t Run(const CudaProduct<Float16, Float16>&, cudaStream_t);
template cudaError_t Run(const CudaProduct<BFloat16, float>&, cudaStream_t);
template cudaError_t Run(const CudaProduct<Float16, float>&, cudaStream_t);

}  // namespace moe::product
