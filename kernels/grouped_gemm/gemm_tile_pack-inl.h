// Copies of operands into strips of tiles (gemm_tile_order.h). Compiled once per SIMD target.
#if defined(MOE_KERNELS_GROUPED_GEMM_GEMM_TILE_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MOE_KERNELS_GROUPED_GEMM_GEMM_TILE_PACK_INL_H_
#undef MOE_KERNELS_GROUPED_GEMM_GEMM_TILE_PACK_INL_H_
#else
#define MOE_KERNELS_GROUPED_GEMM_GEMM_TILE_PACK_INL_H_
#endif

#include "kernels/base/simd-inl.h"
#include "kernels/grouped_gemm/gemm_pack-inl.h"
#include "kernels/grouped_gemm/gemm_tile_order.h"

HWY_BEFORE_NAMESPACE();
namespace moe::gemm {
namespace HWY_NAMESPACE {

using namespace moe::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace): this target's lanes

constexpr int64_t kWords = kTerms / 2;  // of a row of a tile; a word is a pair of terms

// Transposes 16 rows of 16 words, `from_stride` and `to_stride` elements of T apart.
template <class T>
HWY_INLINE void TransposeTile(const T* from, int64_t from_stride, float* to, int64_t to_stride) {
  constexpr int64_t kWord = kStepsPerWord<T>;
  for (int64_t i = 0; i < kTileSide; i += kTranspose) {
    for (int64_t k = 0; k < kTileSide; k += kTranspose) {
      TransposeSquare(from + i * from_stride + k * kWord, from_stride, to + k * to_stride + i,
                      to_stride);
    }
  }
}

// to[w * 16 + j] = the pair of terms 2 w and 2 w + 1 of column j; terms are rows, `stride` apart.
// Neighbouring tiles one after the other: their rows share cache lines.
template <int kTiles>
HWY_INLINE void InterleaveTiles(const BFloat16* from, int64_t stride, float* to) {
  const FloatTag d;
  for (int64_t w = 0; w < kWords; ++w, from += 2 * stride, to += kTileSide) {
    MOE_UNROLL
    for (int64_t j = 0; j < kTiles * kTileSide; j += kLanes) {
      hn::StoreU(LoadWordRow(d, from + j, stride, 2), d,
                 to + j / kTileSide * kWords * kTileSide + j % kTileSide);
    }
  }
}

// An operand in memory: terms are contiguous in its rows, or they are rows.
struct Operand {
  MatrixView<const BFloat16> m;
  bool terms_are_rows;

  const BFloat16* At(int64_t side, int64_t term) const {
    return terms_are_rows ? m.row(term) + side : m.row(side) + term;
  }
};

// Packs a whole step of one tile of an operand, whose first element is at `from`. Left operands
// whose terms are contiguous are PackLeftStrip's.
template <bool kIsLeft>
HWY_INLINE void PackWholeTile(const BFloat16* from, int64_t stride, bool terms_are_rows,
                              BFloat16* to) {
  float* const words = reinterpret_cast<float*>(to);
  if (kIsLeft) {
    HWY_ALIGN float interleaved[kTileElements / 2];
    InterleaveTiles<1>(from, stride, interleaved);
    TransposeTile(interleaved, kTileSide, words, kWords);
  } else if (terms_are_rows) {
    InterleaveTiles<1>(from, stride, words);
  } else {
    TransposeTile(from, stride, words, kTileSide);
  }
}

// The same of a part of a tile, zeros beyond.
template <bool kIsLeft>
HWY_NOINLINE void PackPartOfTile(const BFloat16* from, int64_t stride, bool terms_are_rows,
                                 int64_t count, int64_t terms, BFloat16* to) {
  HWY_ALIGN BFloat16 padded[kTileElements] = {};
  const int64_t rows = terms_are_rows ? terms : count, cols = terms_are_rows ? count : terms;
  const int64_t full = terms_are_rows ? kTileSide : kTerms;
  for (int64_t i = 0; i < rows; ++i) std::copy_n(from + i * stride, cols, padded + i * full);
  PackWholeTile<kIsLeft>(padded, full, terms_are_rows, to);
}

// Packs rows (columns) [side, side + count) of an operand, at most a tile; of none zeros.
template <bool kIsLeft>
HWY_INLINE void PackTile(const Operand& from, int64_t side, int64_t count, int64_t term,
                         int64_t terms, BFloat16* to) {
  if (count == 0) {
    std::fill_n(to, kTileElements, BFloat16());
    return;
  }
  const BFloat16* const data = from.At(side, term);
  const int64_t stride = from.m.stride();
  if (count == kTileSide && terms == kTerms) {
    PackWholeTile<kIsLeft>(data, stride, from.terms_are_rows, to);
  } else {
    PackPartOfTile<kIsLeft>(data, stride, from.terms_are_rows, count, terms, to);
  }
}

// Packs one strip of 1 or 2 tiles, rows (columns) [side, side + count) of an operand.
template <bool kIsLeft>
void PackStripOf(const Operand& from, absl::Span<const TermRun> runs, int64_t tiles, int64_t side,
                 int64_t count, BFloat16* to) {
  constexpr int64_t kSteps = 4;  // of all tiles at a time, so that whole lines are used
  for (const TermRun& run : runs) {
    BFloat16* const begin = to + run.step * tiles * kTileElements;
    const int64_t steps = StepsOf(run.terms);
    for (int64_t first = 0; first < steps; first += kSteps) {
      for (int64_t h = 0; h < tiles; ++h) {
        for (int64_t s = first; s < std::min(steps, first + kSteps); ++s) {
          PackTile<kIsLeft>(from, side + h * kTileSide,
                            std::clamp<int64_t>(count - h * kTileSide, 0, kTileSide),
                            run.k + s * kTerms, std::min(kTerms, run.terms - s * kTerms),
                            begin + (s * tiles + h) * kTileElements);
        }
      }
    }
  }
}

// Packs right strips of an operand whose terms are rows: a row of all strips at a time.
void PackRightStrips(const Operand& from, absl::Span<const TermRun> runs, int64_t col, int64_t cols,
                     int64_t strip, BFloat16* to) {
  for (const TermRun& run : runs) {
    for (int64_t s = 0; s < StepsOf(run.terms); ++s) {
      const int64_t k = run.k + s * kTerms, terms = std::min(kTerms, run.terms - s * kTerms);
      for (int64_t j = 0; j < cols; j += kStripSide) {
        const int64_t tiles = TilesOf(std::min(kStripSide, cols - j));
        BFloat16* const step = to + j / kStripSide * strip + (run.step + s) * tiles * kTileElements;
        if (cols - j >= kStripSide && terms == kTerms) {
          InterleaveTiles<2>(from.At(col + j, k), from.m.stride(), reinterpret_cast<float*>(step));
          continue;
        }
        for (int64_t h = 0; h < tiles; ++h) {
          const int64_t side = j + h * kTileSide;
          PackTile<false>(from, col + side, std::min(kTileSide, cols - side), k, terms,
                          step + h * kTileElements);
        }
      }
    }
  }
}

void PackStripAs(bool is_left, const Operand& from, absl::Span<const TermRun> runs, int64_t side,
                 int64_t count, BFloat16* to) {
  const int64_t tiles = TilesOf(count);
  if (!is_left) return PackStripOf<false>(from, runs, tiles, side, count, to);
  if (from.terms_are_rows) return PackStripOf<true>(from, runs, tiles, side, count, to);
  PackLeftStrip(RowRange(from.m, side, side + count), runs, tiles, to);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace moe::gemm
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
