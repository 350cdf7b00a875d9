#include <math.h>

#include "kernels/base/cuda_fixed_dot.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/base/cuda_vector.h"
#include "kernels/combine/combine_op.h"

namespace moe::combine {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

// Slots whose rows a thread reads before it adds the first of them.
constexpr int kSlotsAhead = 4;

// A warp owns a token. A thread owns a few neighbouring columns at a time and keeps their sums in
// registers over the token's slots in choice order.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks) CombineKernel(Combine<T> c) {
  const int64_t cols = c.out.cols();
  const bool aligned = RowsAlignedTo(c.rows, kVectorBytes) && RowsAlignedTo(c.out, kVectorBytes);
  const int64_t vector_columns = aligned ? cols - cols % kVectorWidth<T> : 0;
  ForRows<kWarpLanes>(c.out.rows(), [&](int64_t token, int lane) {
    const int64_t begin = c.slot_offset[token], end = c.slot_offset[token + 1];
    T* const out = c.out.row(token);
    ForColumns<T>(cols, vector_columns, lane, kWarpLanes, [&](int64_t column, auto width) {
      constexpr int kWidth = decltype(width)::value;
      float sum[kWidth] = {};
      if (c.write == Write::kAdd) {
        const auto old = Load<kWidth>(out + column);
        for (int i = 0; i < kWidth; ++i) sum[i] = static_cast<float>(old.at[i]);
      }
      for (int64_t first = begin; first < end; first += kSlotsAhead) {
        Elements<T, kWidth> values[kSlotsAhead] = {};
        float weight[kSlotsAhead];
        bool is_kept[kSlotsAhead];
        MOE_UNROLL
        for (int j = 0; j < kSlotsAhead; ++j) {
          const int64_t s = first + j;
          const int32_t row = s < end ? c.row_of_slot[s] : -1;
          is_kept[j] = row >= 0;
          if (!is_kept[j]) continue;
          weight[j] = c.weight == nullptr ? 0.0f : c.weight[s];
          values[j] = Load<kWidth>(c.rows.row(row) + column);
        }
        MOE_UNROLL
        for (int j = 0; j < kSlotsAhead; ++j) {
          if (!is_kept[j]) continue;
          for (int i = 0; i < kWidth; ++i) {
            const auto value = static_cast<float>(values[j].at[i]);
            sum[i] = c.weight == nullptr ? sum[i] + value : fmaf(weight[j], value, sum[i]);
          }
        }
      }
      Elements<T, kWidth> result;
      for (int i = 0; i < kWidth; ++i) result.at[i] = T(sum[i]);
      Store(result, out + column);
    });
  });
}

// Half a warp owns a token and processes its slots one after the other; each lane holds one of the
// 16 partial sums of WideDot. Products of two float32 are exact in float64.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks)
    WeightGradientKernel(WeightGradient<T> g) {
  ForRows<kPartials>(g.dy.rows(), [&](int64_t token, int lane) {
    const T* const dy = g.dy.row(token);
    for (int64_t s = g.slot_offset[token]; s < g.slot_offset[token + 1]; ++s) {
      const int32_t row = g.row_of_slot[s];
      double dot = 0;
      if (row >= 0) {
        const T* const values = g.rows.row(row);
        dot = FixedSumOf<double>(g.dy.cols(), lane, [&](int64_t h, double sum) {
          return sum + static_cast<double>(static_cast<float>(dy[h])) *
                           static_cast<double>(static_cast<float>(values[h]));
        });
      }
      if (lane == 0) g.d_weight[s] = static_cast<float>(dot);
    }
  });
}

}  // namespace

template <typename T>
cudaError_t Run(const Combine<T>& combine, cudaStream_t stream) {
  if (combine.out.rows() == 0 || combine.out.cols() == 0) return cudaSuccess;
  return Launch(&CombineKernel<T>, RowShape<kWarpLanes>(combine.out.rows()), stream, combine);
}

template <typename T>
cudaError_t Run(const WeightGradient<T>& gradient, cudaStream_t stream) {
  if (gradient.dy.rows() == 0) return cudaSuccess;  // without columns the results are zeros
  return Launch(&WeightGradientKernel<T>, RowShape<kPartials>(gradient.dy.rows()), stream,
                gradient);
}

MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, Combine, cudaStream_t)
MOE_INSTANTIATE_OVERLOAD(cudaError_t, Run, WeightGradient, cudaStream_t)

}  // namespace moe::combine
