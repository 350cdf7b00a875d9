#include <math.h>

#include "kernels/base/cuda_fixed_dot.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/norm/rms_norm_op.h"

namespace moe::rms_norm {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// Half a warp owns a row, leaf by leaf.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) SumsKernel(Sums<T> s) {
  ForRows<kPartials>(s.x.rows(), [&](int64_t t, int lane) {
    LeafFold fold;
    float sum = 0;
    for (int i = 0; i < s.leaves.count; ++i) {
      const int64_t begin = s.leaves.begin[i];
      const T* const x = s.x.row(t) + begin;
      const int64_t cols = s.leaves.begin[i + 1] - begin;
      const auto leaf = FixedSumOf<float>(cols, lane, [&](int64_t h, float partial) {
        const auto value = static_cast<float>(x[h]);
        if (s.weight == nullptr) return fmaf(value, value, partial);
        const auto dy = static_cast<float>(s.dy.row(t)[begin + h]);
        return fmaf(dy * s.weight[begin + h], value, partial);
      });
      sum = fold.Add(i, leaf);
    }
    if (lane == 0) s.sums[t] = sum;
  });
}

// Half a warp owns a row: each lane holds one of the 16 partial sums, then handles every 16th
// vector.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) ForwardKernel(Forward<T> f) {
  const int64_t cols = f.groups.cols;
  ForRows<kPartials>(f.x.rows() * f.groups.count, [&](int64_t t, int lane) {
    const T* const x = f.groups.Row(f.x, t);
    T* const y = f.groups.Row(f.y, t);
    const bool own = f.nodes.leaves == 0;
    const auto squares = FixedSumOf<float>(own ? cols : 0, lane, [&](int64_t h, float sum) {
      const auto value = static_cast<float>(x[h]);
      return fmaf(value, value, sum);
    });
    const auto all = static_cast<float>(own ? cols : f.nodes.cols);
    const float rstd = 1.0f / sqrtf((own ? squares : f.nodes.Sum(t)) / all + f.epsilon);
    if (lane == 0) f.rstd[t] = rstd;
    const auto scaled = [&](int64_t h, auto width) {
      constexpr int kWidth = decltype(width)::value;
      auto values = Load<kWidth>(x + h);
      const auto weights = LoadElements<kWidth>(f.weight + h);
      for (int i = 0; i < kWidth; ++i) {
        values.at[i] = T(static_cast<float>(values.at[i]) * rstd * weights.at[i]);
      }
      return values;
    };
    ForColumns<T, kReadAheadOfMany>(cols, VectorColumns<T>(cols, x, y, f.weight), lane, kPartials,
                                    scaled, StoreTo(y));
  });
}

// Half a warp owns a row: dx (+)= rstd * (dy * weight - x * slope).
template <typename T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) InputGradientKernel(Backward<T> b) {
  const int64_t cols = b.groups.cols;
  ForRows<kPartials>(b.x.rows() * b.groups.count, [&](int64_t t, int lane) {
    const T* const x = b.groups.Row(b.x, t);
    const T* const dy = b.groups.Row(b.dy, t);
    T* const dx = b.groups.Row(b.dx, t);
    const bool own = b.nodes.leaves == 0;
    const auto dot = FixedSumOf<float>(own ? cols : 0, lane, [&](int64_t h, float sum) {
      return fmaf(static_cast<float>(dy[h]) * b.weight[h], static_cast<float>(x[h]), sum);
    });
    const float rstd = b.rstd[t];
    const auto all = static_cast<float>(own ? cols : b.nodes.cols);
    const float slope = rstd * rstd * ((own ? dot : b.nodes.Sum(t)) / all);
    const auto gradients = [&](int64_t h, auto width) {
      constexpr int kWidth = decltype(width)::value;
      const auto x_values = Load<kWidth>(x + h);
      const auto dy_values = Load<kWidth>(dy + h);
      const auto weights = LoadElements<kWidth>(b.weight + h);
      Elements<T, kWidth> old = {};
      if (b.write_dx == Write::kAdd) old = Load<kWidth>(dx + h);
      Elements<T, kWidth> result;
      for (int i = 0; i < kWidth; ++i) {
        const float scaled = static_cast<float>(dy_values.at[i]) * weights.at[i];
        const float gradient = rstd * fmaf(-static_cast<float>(x_values.at[i]), slope, scaled);
        result.at[i] =
            T(b.write_dx == Write::kAdd ? static_cast<float>(old.at[i]) + gradient : gradient);
      }
      return result;
    };
    ForColumns<T, kReadAheadOfMany>(cols, VectorColumns<T>(cols, x, dy, dx, b.weight), lane,
                                    kPartials, gradients, StoreTo(dx));
  });
}

// A thread owns a column and adds its tokens in ascending order.
template <typename T>
__global__ void __launch_bounds__(kColumnThreads) WeightGradientKernel(Backward<T> b) {
  const int64_t h = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (h >= b.groups.cols) return;
  float sum = 0;
  for (int64_t t = 0; t < b.x.rows() * b.groups.count; ++t) {
    const float product =
        static_cast<float>(b.groups.Row(b.dy, t)[h]) * static_cast<float>(b.groups.Row(b.x, t)[h]);
    sum = fmaf(product, b.rstd[t], sum);
  }
  b.d_weight[h] = b.write_d_weight == Write::kAdd ? b.d_weight[h] + sum : sum;
}

}  // namespace

template <typename T>
cudaError_t Run(const Sums<T>& sums, cudaStream_t stream) {
  if (sums.x.rows() == 0) return cudaSuccess;
  return Launch(&SumsKernel<T>, RowShape<kPartials>(sums.x.rows()), stream, sums);
}

template <typename T>
cudaError_t Run(const Forward<T>& forward, cudaStream_t stream) {
  if (forward.x.rows() == 0 || forward.x.cols() == 0) return cudaSuccess;
  return Launch(&ForwardKernel<T>, RowShape<kPartials>(forward.rows()), stream, forward);
}

template <typename T>
cudaError_t Run(const Backward<T>& backward, cudaStream_t stream) {
  if (backward.x.cols() == 0) return cudaSuccess;
  // Without rows the results are zeros.
  const cudaError_t error =
      Launch(&WeightGradientKernel<T>, ColumnShape(backward.groups.cols), stream, backward);
  if (error != cudaSuccess || backward.x.rows() == 0) return error;
  return Launch(&InputGradientKernel<T>, RowShape<kPartials>(backward.rows()), stream, backward);
}

MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, Sums, cudaStream_t)
MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, Forward, cudaStream_t)
MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, Backward, cudaStream_t)

}  // namespace moe::rms_norm
