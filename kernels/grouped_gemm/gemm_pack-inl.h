// Copies of operands in the order in which the register tile reads them, always as float32, and
// the way back for outputs. Compiled once per SIMD target.
#if defined(MOE_KERNELS_GROUPED_GEMM_GEMM_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOE_KERNELS_GROUPED_GEMM_GEMM_PACK_INL_H_
#undef MOE_KERNELS_GROUPED_GEMM_GEMM_PACK_INL_H_
#else
#define MOE_KERNELS_GROUPED_GEMM_GEMM_PACK_INL_H_
#endif

#include <algorithm>
#include <type_traits>

#include <hwy/highway.h>

#include "kernels/base/simd-inl.h"
#include "kernels/grouped_gemm/gemm_blocks.h"
#include "kernels/grouped_gemm/gemm_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe::gemm {
namespace HWY_NAMESPACE {

using ::moe::HWY_NAMESPACE::LoadFloats;
using ::moe::HWY_NAMESPACE::StoreFloats;

// `count` elements, converted.
template <class From, class To>
HWY_INLINE void Convert(const From* from, int64_t count, To* to) {
  const FloatTag d;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) StoreFloats(LoadFloats(d, from + i), d, to + i);
  for (; i < count; ++i) to[i] = static_cast<To>(static_cast<float>(from[i]));
}

// Rows of 8 (4) floats, transposed in registers: column k of `from` to to + k * to_stride.
using TransposeTag = hn::CappedTag<float, 8>;
constexpr int64_t kTranspose = static_cast<int64_t>(hn::MaxLanes(TransposeTag()));
static_assert(kTranspose == 4 || kTranspose == 8);

template <class T>
HWY_INLINE void TransposeSquare(const T* from, int64_t from_stride, float* to, int64_t to_stride) {
  const TransposeTag d;
  const hn::RepartitionToWide<TransposeTag> pairs;
  using V = hn::Vec<TransposeTag>;
  V row[kTranspose];
  MOE_UNROLL
  for (int i = 0; i < kTranspose; ++i) row[i] = LoadFloats(d, from + i * from_stride);
  // Within 128-bit blocks: 4 x 4 for each four rows.
  V out[kTranspose];
  MOE_UNROLL
  for (int i = 0; i < kTranspose; i += 4) {
    const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(d, row[i], row[i + 1]));
    const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(d, row[i + 2], row[i + 3]));
    const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(d, row[i], row[i + 1]));
    const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(d, row[i + 2], row[i + 3]));
    out[i] = hn::BitCast(d, hn::InterleaveLower(pairs, low01, low23));
    out[i + 1] = hn::BitCast(d, hn::InterleaveUpper(pairs, low01, low23));
    out[i + 2] = hn::BitCast(d, hn::InterleaveLower(pairs, high01, high23));
    out[i + 3] = hn::BitCast(d, hn::InterleaveUpper(pairs, high01, high23));
  }
  if constexpr (kTranspose == 4) {
    MOE_UNROLL
    for (int k = 0; k < 4; ++k) hn::StoreU(out[k], d, to + k * to_stride);
  } else {  // Across the two blocks.
    MOE_UNROLL
    for (int k = 0; k < 4; ++k) {
      hn::StoreU(hn::ConcatLowerLower(d, out[k + 4], out[k]), d, to + k * to_stride);
      hn::StoreU(hn::ConcatUpperUpper(d, out[k + 4], out[k]), d, to + (k + 4) * to_stride);
    }
  }
}

// b^T: columns are rows of memory. to[k * kTileCols + j] = from[j][k], zeros for j >= cols.
// Memory runs along k: whole cache lines of a few rows at a time, and stores that stay close.
template <class T>
void PackTransposedTile(const T* from, int64_t stride, int64_t cols, int64_t depth, float* to) {
  constexpr int64_t kPackSteps = 64;
  const int64_t whole = cols / kTranspose * kTranspose;
  for (int64_t begin = 0; begin < depth; begin += kPackSteps) {
    const int64_t end = std::min(depth, begin + kPackSteps);
    for (int64_t j = 0; j < whole; j += kTranspose) {
      const T* const rows = from + j * stride;
      int64_t k = begin;
      for (; k + kTranspose <= end; k += kTranspose) {
        TransposeSquare(rows + k, stride, to + k * kTileCols + j, kTileCols);
      }
      for (; k < end; ++k) {
        for (int64_t i = 0; i < kTranspose; ++i) {
          to[k * kTileCols + j + i] = static_cast<float>(rows[i * stride + k]);
        }
      }
    }
    for (int64_t j = whole; j < kTileCols; ++j) {
      for (int64_t k = begin; k < end; ++k) {
        to[k * kTileCols + j] = j < cols ? static_cast<float>(from[j * stride + k]) : 0.0f;
      }
    }
  }
}

// b^T as a strip of packed weights: the same in the storage type.
template <class T>
void PackWeightStrip(MatrixView<const T> from, T* to) {
  if constexpr (std::is_same_v<T, float>) {
    PackTransposedTile(from.data(), from.stride(), from.rows(), from.cols(), to);
  } else {
    constexpr int64_t kSteps = 64;
    HWY_ALIGN float wide[kSteps * kTileCols];
    for (int64_t k = 0; k < from.cols(); k += kSteps) {
      const int64_t steps = std::min(kSteps, from.cols() - k);
      PackTransposedTile(from.data() + k, from.stride(), from.rows(), steps, wide);
      Convert(wide, steps * kTileCols, to + k * kTileCols);
    }
  }
}

// A panel of b, tile-wide strips one after the other: column j of step k at
// to[(j / kTileCols * depth + k) * kTileCols + j % kTileCols], zeros up to a whole tile.
template <class T>
void PackPlainPanel(const T* from, int64_t stride, int64_t cols, int64_t depth, float* to) {
  for (int64_t k = 0; k < depth; ++k, from += stride, to += kTileCols) {
    for (int64_t j = 0; j < cols; j += kTileCols) {
      float* const strip = to + j * depth;
      const int64_t count = std::min(kTileCols, cols - j);
      Convert(from + j, count, strip);
      std::fill(strip + count, strip + kTileCols, 0.0f);
    }
  }
}

template <class T>
void PackTransposedPanel(const T* from, int64_t stride, int64_t cols, int64_t depth, float* to) {
  for (int64_t j = 0; j < cols; j += kTileCols) {
    PackTransposedTile(from + j * stride, stride, std::min(kTileCols, cols - j), depth,
                       to + j * depth);
  }
}

// to[k * rows + i] = from[k][i].
template <class T>
HWY_INLINE void PackRows(const T* from, int64_t stride, int64_t depth, int64_t rows, float* to) {
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t i = 0; i < rows; ++i) to[k * rows + i] = static_cast<float>(from[k * stride + i]);
  }
}

// The same for whole tiles, where kTranspose elements of every step may be read: a step is stored
// with a few elements of the tile behind it, which the next step overwrites.
template <class T>
HWY_INLINE void PackRowsWide(const T* from, int64_t stride, int64_t depth, float* to) {
  const TransposeTag d;
  for (int64_t k = 0; k + 1 < depth; ++k) {
    for (int64_t i = 0; i < kTileRows; i += kTranspose) {
      hn::StoreU(LoadFloats(d, from + k * stride + i), d, to + k * kTileRows + i);
    }
  }
  PackRows(from + (depth - 1) * stride, stride, 1, kTileRows, to + (depth - 1) * kTileRows);
}

// Transposed a: steps [k, k + depth) of the rows of `cut` that start at `row`. Tile t lies at
// to + cut.Begin(t) * depth, and in it step after step, the tile's rows side by side.
template <class T, class TOut>
void PackTransposedRows(const Problem<T, TOut>& problem, int64_t k, int64_t depth, int64_t row,
                        const EvenCut& cut, float* to) {
  constexpr int64_t kSteps = 16;  // of all tiles at a time, while their cache lines are near
  constexpr int64_t kWide = (kTileRows + kTranspose - 1) / kTranspose * kTranspose;
  const int64_t stride = problem.a.stride();
  for (int64_t s = 0; s < depth; s += kSteps) {
    const int64_t steps = std::min(kSteps, depth - s);
    for (int64_t t = 0; t < cut.parts; ++t) {
      const int64_t begin = cut.Begin(t);
      const int64_t rows = cut.Begin(t + 1) - begin;
      const T* const from = problem.a.data() + (k + s) * stride + row + begin;
      float* const tile = to + begin * depth + s * rows;
      if (rows == kTileRows && row + begin + kWide <= problem.a.cols()) {
        PackRowsWide(from, stride, steps, tile);
      } else {
        PackRows(from, stride, steps, rows, tile);
      }
    }
  }
}

// Plain a, where the tile does not read its element type: to[i * depth + s] = row i, step k + s.
template <class T, class TOut>
void PackPlainRows(const Problem<T, TOut>& problem, int64_t k, int64_t depth, int64_t row,
                   int64_t rows, float* to) {
  for (int64_t i = 0; i < rows; ++i) {
    Convert(problem.a.data() + (row + i) * problem.a.stride() + k, depth, to + i * depth);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace moe::gemm
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
