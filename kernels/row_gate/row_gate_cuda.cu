#include <math.h>

#include "kernels/base/cuda_fixed_dot.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/row_gate/row_gate_op.h"

namespace moe::row_gate {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// A warp owns a row.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) ForwardKernel(Forward<T> f) {
  const int64_t cols = f.rows.cols();
  ForRows<kWarpLanes>(f.rows.rows(), [&](int64_t t, int lane) {
    const T* const row = f.rows.row(t);
    T* const y = f.y.row(t);
    const auto gate = static_cast<float>(1.0 / (1.0 + exp(-static_cast<double>(f.logit[t]))));
    if (lane == 0) f.gate[t] = gate;
    const auto gated = [&](int64_t h, auto width) {
      auto values = Load<decltype(width)::value>(row + h);
      for (T& value : values.at) value = T(gate * static_cast<float>(value));
      return values;
    };
    ForColumns<T, kReadAhead>(cols, VectorColumns<T>(cols, row, y), lane, kWarpLanes, gated,
                              StoreTo(y));
  });
}

// Half a warp owns a row: each lane holds one of the 16 partial sums of WideDot, whose products are
// exact, then handles every 16th vector.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) BackwardKernel(Backward<T> b) {
  const int64_t cols = b.dy.cols();
  ForRows<kPartials>(b.dy.rows(), [&](int64_t t, int lane) {
    const T* const dy = b.dy.row(t);
    const T* const row = b.rows.row(t);
    T* const d_row = b.d_rows.row(t);
    T* const dx = b.dx.row(t);
    const auto d_gate = FixedSumOf<double>(cols, lane, [&](int64_t h, double sum) {
      return sum + static_cast<double>(static_cast<float>(dy[h])) *
                       static_cast<double>(static_cast<float>(row[h]));
    });
    const float gate = b.gate[t];
    const auto d_logit = static_cast<float>(d_gate * gate * (1 - static_cast<double>(gate)));
    if (lane == 0) b.d_logit[t] = d_logit;
    const int64_t vector_columns = VectorColumns<T>(cols, dy, b.weight, d_row, dx);
    ForColumns<T>(cols, vector_columns, lane, kPartials, [&](int64_t h, auto width) {
      constexpr int kWidth = decltype(width)::value;
      const auto weights = Load<kWidth>(b.weight + h);
      auto d_values = Load<kWidth>(dy + h);
      auto dx_values = Load<kWidth>(dx + h);
      for (int i = 0; i < kWidth; ++i) {
        d_values.at[i] = T(gate * static_cast<float>(d_values.at[i]));
        dx_values.at[i] = T(
            fmaf(d_logit, static_cast<float>(weights.at[i]), static_cast<float>(dx_values.at[i])));
      }
      Store(d_values, d_row + h);
      Store(dx_values, dx + h);
    });
  });
}

// A thread owns a column and adds its tokens in ascending order.
template <typename T>
__global__ void __launch_bounds__(kColumnThreads) WeightGradientKernel(WeightGradient<T> g) {
  const int64_t h = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (h >= g.x.cols()) return;
  float sum = g.write == Write::kAdd ? g.d_weight[h] : 0.0f;
  for (int64_t t = 0; t < g.x.rows(); ++t) {
    sum = fmaf(g.d_logit[t], static_cast<float>(g.x(t, h)), sum);
  }
  g.d_weight[h] = sum;
}

}  // namespace

template <typename T>
cudaError_t Run(const Forward<T>& forward, cudaStream_t stream) {
  if (forward.rows.rows() == 0) return cudaSuccess;  // without columns the gates are still written
  return Launch(&ForwardKernel<T>, RowShape<kWarpLanes>(forward.rows.rows()), stream, forward);
}

template <typename T>
cudaError_t Run(const Backward<T>& backward, cudaStream_t stream) {
  if (backward.dy.rows() == 0) return cudaSuccess;  // without columns the gradients are 0
  return Launch(&BackwardKernel<T>, RowShape<kPartials>(backward.dy.rows()), stream, backward);
}

template <typename T>
cudaError_t Run(const WeightGradient<T>& gradient, cudaStream_t stream) {
  if (gradient.x.cols() == 0) return cudaSuccess;  // without rows the results are zeros
  return Launch(&WeightGradientKernel<T>, ColumnShape(gradient.x.cols()), stream, gradient);
}

MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, Forward, cudaStream_t)
MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, Backward, cudaStream_t)
MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, WeightGradient, cudaStream_t)

}  // namespace moe::row_gate
