// Copies of operands into the order in which the register tile reads them, as words
// (gemm_blocks.h), and conversion of outputs. Compiled once per SIMD target.
#if defined(MOE_KERNELS_GROUPED_GEMM_GEMM_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOE_KERNELS_GROUPED_GEMM_GEMM_PACK_INL_H_
#undef MOE_KERNELS_GROUPED_GEMM_GEMM_PACK_INL_H_
#else
#define MOE_KERNELS_GROUPED_GEMM_GEMM_PACK_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "kernels/base/simd-inl.h"
#include "kernels/grouped_gemm/gemm_blocks.h"
#include "kernels/grouped_gemm/gemm_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace moe::gemm {
namespace HWY_NAMESPACE {

// Converts `count` elements.
template <class From, class To>
HWY_INLINE void Convert(const From* from, int64_t count, To* to) {
  const FloatTag d;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) StoreFloats(LoadFloats(d, from + i), d, to + i);
  for (; i < count; ++i) to[i] = static_cast<To>(static_cast<float>(from[i]));
}

// The word of steps `from` and from + stride; of the first alone if `count` is 1.
template <class T>
HWY_INLINE float WordAt(const T* from, int64_t stride, int64_t count) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const uint32_t upper = count > 1 ? from[stride].bits : 0;
    return std::bit_cast<float>(upper << 16 | from->bits);
  } else {
    return static_cast<float>(*from);
  }
}

// The words of consecutive steps, as many as D has lanes.
template <class D, class T>
HWY_INLINE hn::Vec<D> LoadWords(D d, const T* from) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const hn::RebindToUnsigned<D> bits;
    return hn::BitCast(d, hn::LoadU(bits, reinterpret_cast<const uint32_t*>(from)));
  } else {
    return LoadFloats(d, from);
  }
}

// The words of neighbouring columns, where steps are rows of memory, `stride` apart; of the first
// row alone if `count` is 1.
template <class D, class T>
HWY_INLINE hn::Vec<D> LoadWordRow(D d, const T* from, int64_t stride, int64_t count) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const hn::RebindToUnsigned<D> bits;
    const hn::Rebind<uint16_t, D> halves;
    const auto load = [&](const T* row) HWY_ATTR {
      return hn::PromoteTo(bits, hn::LoadU(halves, reinterpret_cast<const uint16_t*>(row)));
    };
    auto words = load(from);
    if (count > 1) words = hn::Or(words, hn::ShiftLeft<16>(load(from + stride)));
    return hn::BitCast(d, words);
  } else {
    return LoadFloats(d, from);
  }
}

// Transposes rows of 8 (4) words in registers: column k of `from` goes to to + k * to_stride.
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
  for (int i = 0; i < kTranspose; ++i) row[i] = LoadWords(d, from + i * from_stride);
  // Within 128-bit blocks: a 4 x 4 transpose for each four rows.
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
  } else {  // Between the two blocks.
    MOE_UNROLL
    for (int k = 0; k < 4; ++k) {
      hn::StoreU(hn::ConcatLowerLower(d, out[k + 4], out[k]), d, to + k * to_stride);
      hn::StoreU(hn::ConcatUpperUpper(d, out[k + 4], out[k]), d, to + (k + 4) * to_stride);
    }
  }
}

// Packs b^T, whose columns are rows of memory: to[k * kTileCols + j] = word k of from[j], zeros for
// j >= cols. Memory is contiguous along k: whole cache lines of a few rows at a time, and stores
// that stay close.
template <class T>
void PackTransposedTile(const T* from, int64_t stride, int64_t cols, int64_t steps, float* to) {
  constexpr int64_t kPackWords = 64;
  constexpr int64_t kPair = kStepsPerWord<T>;
  const int64_t words = WordsOf<T>(steps), full_words = steps / kPair;
  const int64_t whole = cols / kTranspose * kTranspose;
  const auto word = [&](int64_t j, int64_t k) HWY_ATTR {
    return WordAt(from + j * stride + k * kPair, 1, steps - k * kPair);
  };
  for (int64_t begin = 0; begin < words; begin += kPackWords) {
    const int64_t end = std::min(words, begin + kPackWords);
    for (int64_t j = 0; j < whole; j += kTranspose) {
      int64_t k = begin;
      for (; k + kTranspose <= std::min(end, full_words); k += kTranspose) {
        TransposeSquare(from + j * stride + k * kPair, stride, to + k * kTileCols + j, kTileCols);
      }
      for (; k < end; ++k) {
        for (int64_t i = 0; i < kTranspose; ++i) to[k * kTileCols + j + i] = word(j + i, k);
      }
    }
    for (int64_t j = whole; j < kTileCols; ++j) {
      for (int64_t k = begin; k < end; ++k) {
        to[k * kTileCols + j] = j < cols ? word(j, k) : 0.0f;
      }
    }
  }
}

// Packs b^T as a strip of packed weights, in the storage type.
template <class T>
void PackWeightStrip(MatrixView<const T> from, T* to) {
  if constexpr (std::is_same_v<T, Float16>) {
    constexpr int64_t kSteps = 64;
    HWY_ALIGN float wide[kSteps * kTileCols];
    for (int64_t k = 0; k < from.cols(); k += kSteps) {
      const int64_t steps = std::min(kSteps, from.cols() - k);
      PackTransposedTile(from.data() + k, from.stride(), from.rows(), steps, wide);
      Convert(wide, steps * kTileCols, to + k * kTileCols);
    }
  } else {
    PackTransposedTile(from.data(), from.stride(), from.rows(), from.cols(),
                       reinterpret_cast<float*>(to));
  }
}

// Packs `depth` words of a panel of b into tile-wide strips one after the other: column j of word k
// at to[(j / kTileCols * depth + k) * kTileCols + j % kTileCols], zeros up to a whole tile.
template <class T>
void PackPlainPanel(const T* from, int64_t stride, int64_t cols, int64_t steps, int64_t depth,
                    float* to) {
  const FloatTag d;
  const int64_t words = WordsOf<T>(steps);
  for (int64_t k = 0; k < words; ++k, from += kStepsPerWord<T> * stride, to += kTileCols) {
    const int64_t left = steps - k * kStepsPerWord<T>;
    for (int64_t j = 0; j < cols; j += kTileCols) {
      float* const strip = to + j * depth;
      const int64_t count = std::min(kTileCols, cols - j);
      int64_t i = 0;
      for (; i + kLanes <= count; i += kLanes) {
        hn::StoreU(LoadWordRow(d, from + j + i, stride, left), d, strip + i);
      }
      for (; i < count; ++i) strip[i] = WordAt(from + j + i, stride, left);
      std::fill(strip + count, strip + kTileCols, 0.0f);
    }
  }
}

template <class T>
void PackTransposedPanel(const T* from, int64_t stride, int64_t cols, int64_t steps, int64_t depth,
                         float* to) {
  for (int64_t j = 0; j < cols; j += kTileCols) {
    PackTransposedTile(from + j * stride, stride, std::min(kTileCols, cols - j), steps,
                       to + j * depth);
  }
}

// to[k * rows + i] = word k of column i.
template <class T>
HWY_INLINE void PackRows(const T* from, int64_t stride, int64_t steps, int64_t rows, float* to) {
  for (int64_t k = 0; k < steps; k += kStepsPerWord<T>) {
    for (int64_t i = 0; i < rows; ++i) *to++ = WordAt(from + k * stride + i, stride, steps - k);
  }
}

// The same for whole tiles, where kTranspose elements of every step may be read: a store also
// writes a few words of the next tile, which that tile overwrites.
template <class T>
HWY_INLINE void PackRowsWide(const T* from, int64_t stride, int64_t steps, float* to) {
  const TransposeTag d;
  constexpr int64_t kPair = kStepsPerWord<T>;
  const int64_t last = (WordsOf<T>(steps) - 1) * kPair;
  for (int64_t k = 0; k < last; k += kPair, to += kTileRows) {
    for (int64_t i = 0; i < kTileRows; i += kTranspose) {
      hn::StoreU(LoadWordRow(d, from + k * stride + i, stride, kPair), d, to + i);
    }
  }
  PackRows(from + last * stride, stride, steps - last, kTileRows, to);
}

// Packs a transposed a: steps [k, k + steps) of the rows of `cut` that start at `row`. Tile t is at
// to + cut.Begin(t) * words, word after word, the tile's rows interleaved.
template <class T, class TOut>
void PackTransposedRows(const Problem<T, TOut>& problem, int64_t k, int64_t steps, int64_t row,
                        const EvenCut& cut, float* to) {
  constexpr int64_t kSteps = 16;  // for all tiles at a time, while their cache lines are in cache
  constexpr int64_t kWide = (kTileRows + kTranspose - 1) / kTranspose * kTranspose;
  const int64_t stride = problem.a.stride(), words = WordsOf<T>(steps);
  for (int64_t s = 0; s < steps; s += kSteps) {
    const int64_t count = std::min(kSteps, steps - s);
    for (int64_t t = 0; t < cut.parts; ++t) {
      const int64_t begin = cut.Begin(t);
      const int64_t rows = cut.Begin(t + 1) - begin;
      const T* const from = problem.a.data() + (k + s) * stride + row + begin;
      float* const tile = to + begin * words + WordsOf<T>(s) * rows;
      if (rows == kTileRows && row + begin + kWide <= problem.a.cols()) {
        PackRowsWide(from, stride, count, tile);
      } else {
        PackRows(from, stride, count, rows, tile);
      }
    }
  }
}

// Packs a plain a whose words are not in memory: to[i * depth + w] = row i, word w from step k.
template <class T, class TOut>
void PackPlainRows(const Problem<T, TOut>& problem, int64_t k, int64_t steps, int64_t row,
                   int64_t rows, int64_t depth, float* to) {
  for (int64_t i = 0; i < rows; ++i, to += depth) {
    const T* const from = problem.a.row(row + i) + k;
    if constexpr (kStepsPerWord<T> == 1) {
      Convert(from, steps, to);
    } else {
      std::memcpy(to, from, static_cast<size_t>(steps) * sizeof(T));
      if (steps % 2 != 0) to[steps / 2] = WordAt(from + steps - 1, 1, 1);
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace moe::gemm
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
