#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/bias/bias_op.h"

namespace moe::bias {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// A warp owns a row.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks)
    AddBiasKernel(MatrixView<T> y, const float* __restrict__ bias,
                  const int64_t* __restrict__ rows) {
  if (rows != nullptr) y = RowRange(y, rows[0], rows[1]);
  ForRows<kWarpLanes>(y.rows(), [&](int64_t n, int lane) {
    T* const row = y.row(n);
    const auto sum = [&](int64_t c, auto width) {
      constexpr int kWidth = decltype(width)::value;
      auto values = Load<kWidth>(row + c);
      const auto terms = LoadElements<kWidth>(bias + c);
      for (int i = 0; i < kWidth; ++i) {
        values.at[i] = T(static_cast<float>(values.at[i]) + terms.at[i]);
      }
      return values;
    };
    ForColumns<T, kReadAheadOfMany>(y.cols(), VectorColumns<T>(y.cols(), row, bias), lane,
                                    kWarpLanes, sum, StoreTo(row));
  });
}

// A thread owns a column; neighbouring threads read neighbouring elements of a row.
template <typename T>
__global__ void __launch_bounds__(kColumnThreads)
    BiasGradientKernel(MatrixView<const T> dy, float* __restrict__ d_bias, Write write,
                       const int64_t* __restrict__ rows, int64_t segments) {
  if (rows != nullptr) dy = RowRange(dy, rows[0], rows[segments]);
  const int64_t c = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (c >= dy.cols()) return;
  float sum = write == Write::kAdd ? d_bias[c] : 0.0f;
  for (int64_t n = 0; n < dy.rows(); ++n) sum += static_cast<float>(dy(n, c));
  d_bias[c] = sum;
}

}  // namespace

template <typename T>
cudaError_t Run(const Add<T>& add, cudaStream_t stream) {
  const auto& [y, bias, rows] = add;
  if (y.rows() == 0 || y.cols() == 0) return cudaSuccess;
  return Launch(&AddBiasKernel<T>, RowShape<kWarpLanes>(y.rows()), stream, y, bias, rows);
}

template <typename T>
cudaError_t Run(const Gradient<T>& gradient, cudaStream_t stream) {
  const auto& [dy, d_bias, write, rows, segments] = gradient;
  if (dy.cols() == 0) return cudaSuccess;  // without rows the results are zeros
  return Launch(&BiasGradientKernel<T>, ColumnShape(dy.cols()), stream, dy, d_bias, write, rows,
                segments);
}

MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, Add, cudaStream_t)
MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, Gradient, cudaStream_t)

}  // namespace moe::bias
