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
HWY_INLINE void InterleaveTile(const BFloat16* from, int64_t stride, float* to) {
  const FloatTag d;
  for (int64_t w = 0; w < kWords; ++w) {
    for (int64_t j = 0; j < kTileSide; j += kLanes) {
      hn::StoreU(LoadWordRow(d, from + 2 * w * stride + j, stride, 2), d, to + w * kTileSide + j);
    }
  }
}

// Copies `rows` rows of `cols` elements into a whole tile of rows of `full`, zeros beyond.
inline void CopyPadded(const BFloat16* from, int64_t stride, int64_t rows, int64_t cols,
                       int64_t full, BFloat16* to) {
  std::fill_n(to, kTileElements, BFloat16());
  for (int64_t i = 0; i < rows; ++i) std::copy_n(from + i * stride, cols, to + i * full);
}

// An operand in memory: terms are contiguous in its rows, or they are rows.
struct Operand {
  MatrixView<const BFloat16> m;
  bool terms_are_rows;

  const BFloat16* At(int64_t side, int64_t term) const {
    return terms_are_rows ? m.row(term) + side : m.row(side) + term;
  }
};

// Packs rows (columns) [side, side + count) of an operand, a whole step of one tile of it. Left
// operands whose terms are contiguous are PackLeftStrip's.
template <bool kIsLeft>
HWY_INLINE void PackTile(const Operand& from, int64_t side, int64_t count, int64_t term,
                         int64_t terms, BFloat16* to) {
  HWY_ALIGN BFloat16 padded[kTileElements];
  const BFloat16* data = from.At(side, term);
  int64_t stride = from.m.stride();
  float* const words = reinterpret_cast<float*>(to);
  if (count < kTileSide || terms < kTerms) {
    const bool rows = from.terms_are_rows;
    CopyPadded(data, stride, rows ? terms : count, rows ? count : terms, rows ? kTileSide : kTerms,
               padded);
    data = padded;
    stride = rows ? kTileSide : kTerms;
  }
  if (kIsLeft) {
    HWY_ALIGN float interleaved[kTileElements / 2];
    InterleaveTile(data, stride, interleaved);
    TransposeTile(interleaved, kTileSide, words, kWords);
  } else if (from.terms_are_rows) {
    InterleaveTile(data, stride, words);
  } else {
    TransposeTile(data, stride, words, kTileSide);
  }
}

// Packs one strip, rows (columns) [side, side + count) of an operand.
template <bool kIsLeft>
void PackStripOf(const Operand& from, absl::Span<const TermRun> runs, int64_t side, int64_t count,
                 BFloat16* to) {
  constexpr int64_t kSteps = 4;  // of all tiles at a time, so that whole lines are used
  const int64_t tiles = TilesOf(count);
  for (const TermRun& run : runs) {
    BFloat16* const begin = to + run.step * tiles * kTileElements;
    const int64_t steps = StepsOf(run.terms);
    for (int64_t first = 0; first < steps; first += kSteps) {
      for (int64_t h = 0; h < tiles; ++h) {
        for (int64_t s = first; s < std::min(steps, first + kSteps); ++s) {
          PackTile<kIsLeft>(from, side + h * kTileSide, std::min(kTileSide, count - h * kTileSide),
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
      for (int64_t j = 0; j < cols; j += kStripSide) {
        const int64_t tiles = TilesOf(std::min(kStripSide, cols - j));
        for (int64_t h = 0; h < tiles; ++h) {
          const int64_t side = j + h * kTileSide;
          PackTile<false>(
              from, col + side, std::min(kTileSide, cols - side), run.k + s * kTerms,
              std::min(kTerms, run.terms - s * kTerms),
              to + j / kStripSide * strip + ((run.step + s) * tiles + h) * kTileElements);
        }
      }
    }
  }
}

void PackStripAs(bool is_left, const Operand& from, absl::Span<const TermRun> runs, int64_t side,
                 int64_t count, BFloat16* to) {
  if (!is_left) return PackStripOf<false>(from, runs, side, count, to);
  if (from.terms_are_rows) return PackStripOf<true>(from, runs, side, count, to);
  PackLeftStrip(RowRange(from.m, side, side + count), runs, TilesOf(count), to);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace moe::gemm
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
