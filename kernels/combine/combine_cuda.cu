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
        Elements<T, kWidth> values[kSlotsAhead];
        float weight[kSlotsAhead];
        bool is_kept[kSlotsAhead];
        MOE_UNROLL
        for (int j = 0; j < kSlotsAhead; ++j) {
          const int64_t s = first + j;
          const int32_t row = s < end ? c.row_of_slot[s] : -1;
          is_kept[j] = row >= 0;
          values[j] = LoadOrZeros<kWidth>(is_kept[j] ? c.rows.row(row) + column : nullptr);
          weight[j] = is_kept[j] && c.weight != nullptr ? c.weight[s] : 1.0f;
        }
        MOE_UNROLL
        for (int j = 0; j < kSlotsAhead; ++j) {
          if (!is_kept[j]) continue;
          for (int i = 0; i < kWidth; ++i) {
            sum[i] = fmaf(weight[j], ToFloat(values[j].at[i]), sum[i]);  // times 1: a sum
          }
        }
      }
      Elements<T, kWidth> result;
      for (int i = 0; i < kWidth; ++i) result.at[i] = T(sum[i]);
      Store(result, out + column);
    });
  });
}

// A lane holds 4 neighbouring partial sums of WideDot for each of two slots, which share what it
// reads of dy and converts. So 4 lanes read a row, in 16 bits 8 bytes each.
constexpr int kOwned = 4, kRowLanes = kPartials / kOwned;
constexpr int kSlotsOfLane = 2;
// Reads of each row before the first is added.
template <typename T>
constexpr int kReadsAhead = 8 / static_cast<int>(sizeof(T));

template <typename T>
struct SlotDots {
  const T* dy;
  const T* row[kSlotsOfLane] = {};  // nullptr: no slot, or a dropped one
  double sum[kSlotsOfLane][kOwned] = {};

  // Adds the products of columns c, c + 16 ... c + 16 (kAhead - 1) and kWidth - 1 columns behind
  // each to the sums from kFirst on. Products of two float32 are exact in float64, so that a fused
  // multiply-add has the bits of two operations.
  template <int kAhead, int kWidth, int kFirst = 0>
  __device__ void Add(int64_t c) {
    Elements<T, kWidth> d[kAhead], values[kSlotsOfLane][kAhead] = {};
    MOE_UNROLL
    for (int a = 0; a < kAhead; ++a) d[a] = Load<kWidth>(dy + c + a * kPartials);
    MOE_UNROLL
    for (int j = 0; j < kSlotsOfLane; ++j) {
      if (row[j] == nullptr) continue;
      MOE_UNROLL
      for (int a = 0; a < kAhead; ++a) values[j][a] = Load<kWidth>(row[j] + c + a * kPartials);
    }
    MOE_UNROLL
    for (int a = 0; a < kAhead; ++a) {
      MOE_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        const double factor = ToFloat(d[a].at[i]);
        MOE_UNROLL
        for (int j = 0; j < kSlotsOfLane; ++j) {
          if (row[j] == nullptr) continue;
          double& partial = sum[j][kFirst + i];
          partial = fma(factor, static_cast<double>(ToFloat(values[j][a].at[i])), partial);
        }
      }
    }
  }

  // The dot product of slot j; all lanes of half a warp call it.
  __device__ double Fold(int j) const {
    double partial[kOwned];
    MOE_UNROLL
    for (int i = 0; i < kOwned; ++i) {
      partial[i] = sum[j][i];
      for (int width = kRowLanes / 2; width >= 1; width /= 2) {
        partial[i] += __shfl_xor_sync(HalfWarpMask(), partial[i], width);
      }
    }
    return (partial[0] + partial[2]) + (partial[1] + partial[3]);
  }
};

// Half a warp owns a token, 8 of its slots at a time; four lanes every fourth of them.
template <typename T>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks)
    WeightGradientKernel(WeightGradient<T> g) {
  constexpr int kParts = kPartials / kRowLanes, kBytes = kOwned * static_cast<int>(sizeof(T));
  constexpr int kStep = kPartials * kReadsAhead<T>;
  const int64_t cols = g.dy.cols();
  const bool aligned = RowsAlignedTo(g.dy, kBytes) && RowsAlignedTo(g.rows, kBytes);
  const int64_t whole_columns = aligned ? cols - cols % kStep : 0;
  ForRows<kPartials>(g.dy.rows(), [&](int64_t token, int lane) {
    const int64_t end = g.slot_offset[token + 1];
    for (int64_t s = g.slot_offset[token]; s < end; s += kParts * kSlotsOfLane) {
      SlotDots<T> dots = {.dy = g.dy.row(token)};
      const int64_t mine = s + lane / kRowLanes;
      MOE_UNROLL
      for (int j = 0; j < kSlotsOfLane; ++j) {
        const int64_t slot = mine + kParts * j;
        const int32_t row = slot < end ? g.row_of_slot[slot] : -1;
        if (row >= 0) dots.row[j] = g.rows.row(row);
      }
      int64_t c = lane % kRowLanes * kOwned;
      for (; c < whole_columns; c += kStep) dots.template Add<kReadsAhead<T>, kOwned>(c);
      MOE_NO_UNROLL
      for (; c < cols; c += kPartials) {
        dots.template Add<1, 1>(c);
        if (c + 1 < cols) dots.template Add<1, 1, 1>(c + 1);
        if (c + 2 < cols) dots.template Add<1, 1, 2>(c + 2);
        if (c + 3 < cols) dots.template Add<1, 1, 3>(c + 3);
      }
      MOE_UNROLL
      for (int j = 0; j < kSlotsOfLane; ++j) {
        const double dot = dots.Fold(j);
        const int64_t slot = mine + kParts * j;
        if (lane % kRowLanes == 0 && slot < end) g.d_weight[slot] = static_cast<float>(dot);
      }
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
