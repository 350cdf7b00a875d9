#include "kernels/attention/attention_cpu.h"

#include <cmath>
#include <limits>

#include "kernels/base/dtype.h"
#include "kernels/base/fixed_dot.h"
#include "kernels/base/highway_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/attention_cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include "kernels/attention/attention_blocks-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {
namespace {

static_assert(kBlockRows <= kMaxBlockRows && kMaxPanelKeys % kPanelKeys == 0);
// Before the first block its queries lend their memory to PackPanels.
static_assert(kTranspose <= kMaxBlockRows && kPanelKeys % kTranspose == 0);
static_assert(kPanelKeys % kBlockRows == 0);  // a block's diagonal lies within one panel

// Two vectors of columns at a time; `stride` is a multiple of 16, so one may be left over.
HWY_INLINE void WeightRows(const float* weight, int64_t weight_stride, const float* rows,
                           int64_t stride, int64_t first, float* out) {
  int64_t c = 0;
  for (; c + 2 * kLanes <= stride; c += 2 * kLanes) {
    WeightedRows<2>(weight, weight_stride, rows + c, stride, first, out + c);
  }
  if (c < stride) WeightedRows<1>(weight, weight_stride, rows + c, stride, first, out + c);
}

HWY_INLINE void AddBlock(const float* weight, int64_t weight_stride, const float* block,
                         int64_t stride, int64_t first, int64_t rows, float* sums) {
  int64_t c = 0;
  for (; c + 2 * kLanes <= stride; c += 2 * kLanes) {
    AddWeightedBlock<2>(weight, weight_stride, block + c, stride, first, rows, sums + c);
  }
  if (c < stride) {
    AddWeightedBlock<1>(weight, weight_stride, block + c, stride, first, rows, sums + c);
  }
}

// Rows [first, first + kBlockRows) as float32 [kBlockRows, stride]; rows past the end are zero.
template <typename T>
HWY_INLINE int64_t PackBlock(MatrixView<const T> m, int64_t first, int64_t stride, float* block) {
  const int64_t rows = std::min(kBlockRows, m.rows() - first);
  PackRows(RowRange(m, first, first + rows), stride, block);
  std::fill(block + rows * stride, block + kBlockRows * stride, 0.0f);
  return rows;
}

// out = scale * row, rounded to T.
template <typename T>
HWY_INLINE void StoreRow(const float* row, float scale, int64_t n, T* out) {
  const auto factor = hn::Set(FloatTag(), scale);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) StoreLanes(hn::Mul(LoadLanes(row + i), factor), out + i);
  if (i < n) StoreFirst(hn::Mul(LoadLanes(row + i), factor), out + i, n - i);
}

// The largest of n > 0 scores. NaNs may be passed over: the sum of exponentials shows them.
HWY_INLINE float MaxScore(const float* scores, int64_t n) {
  const FloatTag d;
  const auto lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  auto max = lowest;
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) max = hn::Max(max, LoadLanes(scores + j));
  if (j < n) {
    const auto inside = hn::FirstN(d, static_cast<size_t>(n - j));
    max = hn::Max(max, hn::IfThenElse(inside, LoadLanes(scores + j), lowest));
  }
  return hn::GetLane(hn::MaxOfLanes(d, max));
}

// scores[j] = exp(scale * (scores[j] - max)); returns their sum in the order of FixedSum. Elements
// past n, up to a whole vector, are overwritten.
HWY_INLINE float ExpScores(float* scores, int64_t n, float scale, float max) {
  const FloatTag d;
  const auto offset = hn::Set(d, max);
  const auto factor = hn::Set(d, scale);
  FixedPartials sum;
  for (int64_t first = 0; first < n; first += kPartials) {
    MOE_UNROLL for (int64_t i = 0; i < kPartials / kLanes; ++i) {
      const int64_t j = first + i * kLanes;
      if (j >= n) break;
      auto e = ExpLanes(hn::Mul(hn::Sub(LoadLanes(scores + j), offset), factor));
      if (j + kLanes > n) e = hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(n - j)), e);
      StoreLanes(e, scores + j);
      sum.lanes[i] = hn::Add(sum.lanes[i], e);
    }
  }
  return sum.Fold();
}

// The columns of one of the heads that lie side by side in `m`.
template <typename T>
MatrixView<T> HeadOf(MatrixView<T> m, int64_t head, int64_t depth) {
  return ColumnRange(m, head * depth, (head + 1) * depth);
}

template <typename T>
void Forward(const HeadsForward<T>& heads, float* memory) {
  const int64_t n = heads.q.rows();
  const int64_t past = heads.k.rows() - n;  // keys before the first query's own
  const int64_t depth = heads.k.cols();
  const int64_t stride = PaddedDepth(depth);
  const int64_t keys = PaddedTokens(past + (n + kBlockRows - 1) / kBlockRows * kBlockRows);
  HeadScratch scratch(memory);
  float* const key_panels = scratch.Take(keys * depth);
  float* const values = scratch.Take(keys * stride);
  float* const queries = scratch.Take(kMaxBlockRows * stride);
  float* const scores = scratch.Take(kBlockRows * keys);
  float* const sums = scratch.Take(kBlockRows * stride);
  PackPanels(heads.k, stride, queries, key_panels);
  PackRows(heads.v, stride, values);
  std::fill(values + (past + n) * stride, values + keys * stride, 0.0f);
  const float scale = 1.0f / std::sqrt(static_cast<float>(depth));
  for (int64_t head = 0; head < heads.q.cols() / depth; ++head) {
    const auto q = HeadOf(heads.q, head, depth);
    const auto out = HeadOf(heads.out, head, depth);
    for (int64_t first = 0; first < n; first += kBlockRows) {
      const int64_t rows = PackBlock(q, first, stride, queries);
      MultiplyPanels(queries, stride, key_panels, depth, past + first + rows, scores, keys);
      float reciprocal[kBlockRows] = {};
      for (int64_t r = 0; r < rows; ++r) {
        float* const row = scores + r * keys;
        const int64_t seen = past + first + r + 1;
        const float max = MaxScore(row, seen);
        const float sum = ExpScores(row, seen, scale, max);
        reciprocal[r] = 1.0f / sum;
        if (heads.log_sum_exp.rows() > 0) {
          heads.log_sum_exp(first + r, head) = scale * max + std::log(sum);
        }
      }
      WeightRows(scores, keys, values, stride, past + first, sums);
      for (int64_t r = 0; r < rows; ++r) {
        StoreRow(sums + r * stride, reciprocal[r], depth, out.row(first + r));
      }
    }
  }
}

// From score s and product d_out . v, in place: p = exp(scale * s - log_sum_exp), and
// scale * p * (product - dot) for the gradient by q and k.
HWY_INLINE void ScoreGradients(float* scores, float* products, int64_t n, float scale,
                               float log_sum_exp, float dot) {
  const FloatTag d;
  const auto factor = hn::Set(d, scale);
  const auto log_sum = hn::Set(d, log_sum_exp);
  const auto row_dot = hn::Set(d, dot);
  for (int64_t j = 0; j < n; j += kLanes) {
    const auto p = ExpLanes(hn::MulSub(LoadLanes(scores + j), factor, log_sum));
    const auto slope = hn::Mul(hn::Sub(LoadLanes(products + j), row_dot), factor);
    StoreLanes(p, scores + j);
    StoreLanes(hn::Mul(p, slope), products + j);
  }
}

template <typename T>
void Backward(const HeadsBackward<T>& heads, float* memory) {
  const int64_t n = heads.q.rows();
  const int64_t depth = heads.k.cols();
  const int64_t stride = PaddedDepth(depth);
  const int64_t keys = PaddedTokens(n);
  HeadScratch scratch(memory);
  float* const key_panels = scratch.Take(keys * depth);
  float* const value_panels = scratch.Take(keys * depth);
  float* const key_rows = scratch.Take(keys * stride);
  float* const d_keys = scratch.Take(keys * stride);
  float* const d_values = scratch.Take(keys * stride);
  float* const queries = scratch.Take(kMaxBlockRows * stride);
  float* const d_outs = scratch.Take(kBlockRows * stride);
  float* const scores = scratch.Take(kBlockRows * keys);
  float* const products = scratch.Take(kBlockRows * keys);
  float* const d_queries = scratch.Take(kBlockRows * stride);
  PackPanels(heads.k, stride, queries, key_panels);
  PackPanels(heads.v, stride, queries, value_panels);
  PackRows(heads.k, stride, key_rows);
  std::fill(key_rows + n * stride, key_rows + keys * stride, 0.0f);
  std::fill_n(d_keys, n * stride, 0.0f);
  std::fill_n(d_values, n * stride, 0.0f);
  const float scale = 1.0f / std::sqrt(static_cast<float>(depth));
  for (int64_t head = 0; head < heads.log_sum_exp.cols(); ++head) {
    const auto q = HeadOf(heads.q, head, depth), out = HeadOf(heads.out, head, depth);
    const auto d_out = HeadOf(heads.d_out, head, depth);
    const auto d_q = HeadOf(heads.d_q, head, depth);
    for (int64_t first = 0; first < n; first += kBlockRows) {
      const int64_t rows = PackBlock(q, first, stride, queries);
      PackBlock(d_out, first, stride, d_outs);
      MultiplyPanels(queries, stride, key_panels, depth, first + rows, scores, keys);
      MultiplyPanels(d_outs, stride, value_panels, depth, first + rows, products, keys);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t i = first + r;
        const float dot = FixedDot(d_out.row(i), out.row(i), depth);
        ScoreGradients(scores + r * keys, products + r * keys, i + 1, scale,
                       heads.log_sum_exp(i, head), dot);
      }
      WeightRows(products, keys, key_rows, stride, first, d_queries);
      AddBlock(products, keys, queries, stride, first, rows, d_keys);
      AddBlock(scores, keys, d_outs, stride, first, rows, d_values);
      for (int64_t r = 0; r < rows; ++r) {
        StoreRow(d_queries + r * stride, 1.0f, depth, d_q.row(first + r));
      }
    }
  }
  for (int64_t j = 0; j < n; ++j) {
    StoreRow(d_keys + j * stride, 1.0f, depth, heads.d_k.row(j));
    StoreRow(d_values + j * stride, 1.0f, depth, heads.d_v.row(j));
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace moe
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe {

template <typename T>
void AttendHeads(const HeadsForward<T>& heads, float* scratch) {
  MOE_SIMD(Forward<T>)(heads, scratch);
}
template <typename T>
void AttendHeadsBackward(const HeadsBackward<T>& heads, float* scratch) {
  MOE_SIMD(Backward<T>)(heads, scratch);
}

#define MOE_INSTANTIATE(T)                                   \
  template void AttendHeads(const HeadsForward<T>&, float*); \
  template void AttendHeadsBackward(const HeadsBackward<T>&, float*);
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe
#endif  // HWY_ONCE
