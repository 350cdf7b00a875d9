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
#include "kernels/base/simd-inl.h"
#if HWY_TARGET != HWY_SCALAR  // has no vectors to transpose
#include "kernels/grouped_gemm/gemm_pack-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace moe {
namespace HWY_NAMESPACE {
namespace {

// The three products of attention, on blocks of kBlockRows queries. Every element is one chain of
// fused multiply-adds in ascending order of its sum's index, from 0: its bits depend neither on the
// block it falls into nor on the width of a vector.

#if HWY_TARGET == HWY_SCALAR
constexpr int64_t kTranspose = 1;
HWY_INLINE void TransposeSquare(const float* from, int64_t, float* to, int64_t) {
  *to = *from;
}
#else
using ::moe::gemm::HWY_NAMESPACE::kTranspose;
using ::moe::gemm::HWY_NAMESPACE::TransposeSquare;
#endif

// Queries a block, and keys a panel in vectors: 8 x 2 accumulators where there are 32 registers,
// 4 x 2 where there are 16.
constexpr int64_t kBlockRows = kLanes == 1 ? 2 : HWY_TARGET == HWY_AVX2 ? 4 : 8;
constexpr int64_t kPanelVectors = 2;
constexpr int64_t kPanelKeys = kPanelVectors * kLanes;

// rows [n, D] -> float32 [n, stride], columns beyond D zero.
template <typename T>
HWY_INLINE void PackRows(MatrixView<const T> rows, int64_t stride, float* packed) {
  const int64_t depth = rows.cols();
  for (int64_t j = 0; j < rows.rows(); ++j) {
    const T* const in = rows.row(j);
    float* const out = packed + j * stride;
    int64_t d = 0;
    for (; d + kLanes <= depth; d += kLanes) StoreLanes(LoadLanes(in + d), out + d);
    if (d < depth) {
      StoreLanes(LoadFirst(in + d, depth - d), out + d);
      d += kLanes;
    }
    for (; d < stride; d += kLanes) StoreLanes(hn::Zero(FloatTag()), out + d);
  }
}

// rows [n, D] -> panels of kPanelKeys rows, each transposed to [D, kPanelKeys]; rows beyond n are
// zero. `block` is scratch for kTranspose rows of `stride`: rows are converted in memory order and
// transposed in registers.
template <typename T>
HWY_INLINE void PackPanels(MatrixView<const T> rows, int64_t stride, float* block, float* panels) {
  const int64_t depth = rows.cols();
  const int64_t whole = depth / kTranspose * kTranspose;
  for (int64_t first = 0; first < rows.rows(); first += kPanelKeys) {
    float* const panel = panels + first * depth;
    for (int64_t j = 0; j < kPanelKeys; j += kTranspose) {
      const int64_t begin = std::min(first + j, rows.rows());
      const int64_t count = std::min(kTranspose, rows.rows() - begin);
      PackRows(RowRange(rows, begin, begin + count), stride, block);
      std::fill(block + count * stride, block + kTranspose * stride, 0.0f);
      for (int64_t d = 0; d < whole; d += kTranspose) {
        TransposeSquare(block + d, stride, panel + d * kPanelKeys + j, kPanelKeys);
      }
      for (int64_t d = whole; d < depth; ++d) {
        for (int64_t i = 0; i < kTranspose; ++i) {
          panel[d * kPanelKeys + j + i] = block[i * stride + d];
        }
      }
    }
  }
}

// products[r, j] = sum_d block[r, d] * key[j, d] for the panels that hold keys [0, keys).
HWY_INLINE void MultiplyPanels(const float* block, int64_t block_stride, const float* panels,
                               int64_t depth, int64_t keys, float* products, int64_t stride) {
  for (int64_t j = 0; j < keys; j += kPanelKeys) {
    const float* const panel = panels + j * depth;
    FloatLanes sum[kBlockRows][kPanelVectors];
    MOE_UNROLL for (auto& row : sum) {
      MOE_UNROLL for (auto& v : row) v = hn::Zero(FloatTag());
    }
    for (int64_t d = 0; d < depth; ++d) {
      FloatLanes key[kPanelVectors];
      MOE_UNROLL for (int64_t v = 0; v < kPanelVectors; ++v) {
        key[v] = LoadLanes(panel + d * kPanelKeys + v * kLanes);
      }
      MOE_UNROLL for (int64_t r = 0; r < kBlockRows; ++r) {
        const auto x = hn::Set(FloatTag(), block[r * block_stride + d]);
        MOE_UNROLL for (int64_t v = 0; v < kPanelVectors; ++v) {
          sum[r][v] = hn::MulAdd(x, key[v], sum[r][v]);
        }
      }
    }
    MOE_UNROLL for (int64_t r = 0; r < kBlockRows; ++r) {
      MOE_UNROLL for (int64_t v = 0; v < kPanelVectors; ++v) {
        StoreLanes(sum[r][v], products + r * stride + j + v * kLanes);
      }
    }
  }
}

// out[r, c] = sum over j <= first + r of weight[r, j] * rows[j, c], for kVectors vectors of
// columns.
template <int64_t kVectors>
HWY_INLINE void WeightedRows(const float* weight, int64_t weight_stride, const float* rows,
                             int64_t row_stride, int64_t first, float* out) {
  FloatLanes sum[kBlockRows][kVectors];
  MOE_UNROLL for (auto& row : sum) {
    MOE_UNROLL for (auto& v : row) v = hn::Zero(FloatTag());
  }
  // Keys that every query of the block attends to.
  for (int64_t j = 0; j <= first; ++j) {
    FloatLanes x[kVectors];
    MOE_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
      x[v] = LoadLanes(rows + j * row_stride + v * kLanes);
    }
    MOE_UNROLL for (int64_t r = 0; r < kBlockRows; ++r) {
      const auto w = hn::Set(FloatTag(), weight[r * weight_stride + j]);
      MOE_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
        sum[r][v] = hn::MulAdd(w, x[v], sum[r][v]);
      }
    }
  }
  // The triangle on the diagonal: queries i and later attend to key first + i.
  MOE_UNROLL for (int64_t i = 1; i < kBlockRows; ++i) {
    FloatLanes x[kVectors];
    MOE_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
      x[v] = LoadLanes(rows + (first + i) * row_stride + v * kLanes);
    }
    MOE_UNROLL for (int64_t r = i; r < kBlockRows; ++r) {
      const auto w = hn::Set(FloatTag(), weight[r * weight_stride + first + i]);
      MOE_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
        sum[r][v] = hn::MulAdd(w, x[v], sum[r][v]);
      }
    }
  }
  MOE_UNROLL for (int64_t r = 0; r < kBlockRows; ++r) {
    MOE_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
      StoreLanes(sum[r][v], out + r * row_stride + v * kLanes);
    }
  }
}

// sums[j, c] += sum over r with first + r >= j of weight[r, j] * block[r, c], r ascending, for
// kVectors vectors of columns and keys [0, first + rows).
template <int64_t kVectors>
HWY_INLINE void AddWeightedBlock(const float* weight, int64_t weight_stride, const float* block,
                                 int64_t stride, int64_t first, int64_t rows, float* sums) {
  FloatLanes x[kBlockRows][kVectors];
  MOE_UNROLL for (int64_t r = 0; r < kBlockRows; ++r) {
    MOE_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
      x[r][v] = LoadLanes(block + r * stride + v * kLanes);
    }
  }
  const int64_t full = rows == kBlockRows ? first + 1 : 0;
  for (int64_t j = 0; j < full; ++j) {
    FloatLanes sum[kVectors];
    MOE_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
      sum[v] = LoadLanes(sums + j * stride + v * kLanes);
    }
    MOE_UNROLL for (int64_t r = 0; r < kBlockRows; ++r) {
      const auto w = hn::Set(FloatTag(), weight[r * weight_stride + j]);
      MOE_UNROLL for (int64_t v = 0; v < kVectors; ++v) sum[v] = hn::MulAdd(w, x[r][v], sum[v]);
    }
    MOE_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
      StoreLanes(sum[v], sums + j * stride + v * kLanes);
    }
  }
  if (full > 0) {
    // The triangle on the diagonal: queries i and later attend to key first + i.
    MOE_UNROLL for (int64_t i = 1; i < kBlockRows; ++i) {
      const int64_t j = first + i;
      MOE_UNROLL for (int64_t v = 0; v < kVectors; ++v) {
        float* const out = sums + j * stride + v * kLanes;
        auto sum = LoadLanes(out);
        MOE_UNROLL for (int64_t r = i; r < kBlockRows; ++r) {
          const auto w = hn::Set(FloatTag(), weight[r * weight_stride + j]);
          sum = hn::MulAdd(w, x[r][v], sum);
        }
        StoreLanes(sum, out);
      }
    }
    return;
  }
  // A last block with fewer rows.
  for (int64_t j = 0; j < first + rows; ++j) {
    for (int64_t r = std::max<int64_t>(0, j - first); r < rows; ++r) {
      const auto w = hn::Set(FloatTag(), weight[r * weight_stride + j]);
      for (int64_t v = 0; v < kVectors; ++v) {
        float* const sum = sums + j * stride + v * kLanes;
        StoreLanes(hn::MulAdd(w, LoadLanes(block + r * stride + v * kLanes), LoadLanes(sum)), sum);
      }
    }
  }
}

static_assert(kBlockRows <= kMaxBlockRows && kMaxPanelKeys % kPanelKeys == 0);
// Before the first block PackPanels uses the memory of the block's queries.
static_assert(kTranspose <= kMaxBlockRows && kPanelKeys % kTranspose == 0);
static_assert(kPanelKeys % kBlockRows == 0);  // a block's diagonal is within one panel

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

// The largest of n > 0 scores. It may ignore NaNs: the sum of exponentials exposes them.
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

// The columns of one of the adjacent heads of `m`.
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

MOE_INSTANTIATE_FOR_STORAGE(AttendHeads)
MOE_INSTANTIATE_FOR_STORAGE(AttendHeadsBackward)

}  // namespace moe
#endif  // HWY_ONCE
