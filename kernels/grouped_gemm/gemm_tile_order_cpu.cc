// One block of a product in the order of tiles: pack strips, multiply them, round. The strips are
// multiplied by AMX tiles where the CPU has them, else by fused multiply-adds, with the same bits.
#include <cstring>

#include "kernels/base/highway_targets.h"
#include "kernels/base/status_macros.h"
#include "kernels/exact_sum/exact_sum_cpu.h"
#include "kernels/grouped_gemm/gemm_blocks.h"
#include "kernels/grouped_gemm/gemm_dot_avx512.h"
#include "kernels/grouped_gemm/gemm_tile_amx.h"
#include "kernels/grouped_gemm/gemm_tile_order.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/grouped_gemm/gemm_tile_order_cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/cache_control.h>

#include "kernels/base/simd-inl.h"
#if HWY_NATIVE_FMA
#include "kernels/exact_sum/exact_sum-inl.h"
#include "kernels/grouped_gemm/gemm_pack-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace moe::gemm {
namespace HWY_NAMESPACE {

#if HWY_NATIVE_FMA

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

// Copies `rows` rows of `cols` elements to the first of a whole tile of rows of `full`, zeros beyond.
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

// Packs rows (columns) [side, side + count) of an operand, a whole step of one tile of it.
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
  if (from.terms_are_rows && kIsLeft) {
    HWY_ALIGN float interleaved[kTileElements / 2];
    InterleaveTile(data, stride, interleaved);
    TransposeTile(interleaved, kTileSide, words, kWords);
  } else if (from.terms_are_rows) {
    InterleaveTile(data, stride, words);
  } else if (kIsLeft) {
    for (int64_t i = 0; i < kTileSide; ++i) {
      std::memcpy(to + i * kTerms, data + i * stride, kTerms * sizeof(BFloat16));
    }
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

void PackStripAs(bool is_left, const Operand& from, absl::Span<const TermRun> runs, int64_t side,
                 int64_t count, BFloat16* to) {
  if (is_left) {
    PackStripOf<true>(from, runs, side, count, to);
  } else {
    PackStripOf<false>(from, runs, side, count, to);
  }
}

// Rows of left tiles and vectors of columns whose sums are in registers at a time, even and odd
// ones: 24 of 32 registers, or 12 of 16.
constexpr int kFmaVectors = 2;
constexpr int kFmaRows = HWY_TARGET == HWY_AVX2 ? 3 : 6;

// sums[i] += even chain + odd chain of one step, rows [0, kRows). left: 32 terms of a row as
// float32, kTerms apart; right: term t of 32 columns at t * kStripSide.
template <int kRows>
HWY_INLINE void AddStep(const float* HWY_RESTRICT left, const float* HWY_RESTRICT right,
                        float* HWY_RESTRICT sums) {
  const FloatTag d;
  FloatLanes even[kRows][kFmaVectors], odd[kRows][kFmaVectors];
  MOE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    MOE_UNROLL
    for (int j = 0; j < kFmaVectors; ++j) even[i][j] = odd[i][j] = hn::Zero(d);
  }
  for (int64_t t = 0; t < kTerms; t += 2, right += 2 * kStripSide) {
    FloatLanes column[kFmaVectors];
    MOE_UNROLL
    for (int j = 0; j < kFmaVectors; ++j) column[j] = hn::Load(d, right + j * kLanes);
    MOE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const FloatLanes x = hn::Set(d, left[i * kTerms + t]);
      MOE_UNROLL
      for (int j = 0; j < kFmaVectors; ++j) even[i][j] = hn::MulAdd(x, column[j], even[i][j]);
    }
    MOE_UNROLL
    for (int j = 0; j < kFmaVectors; ++j) column[j] = hn::Load(d, right + kStripSide + j * kLanes);
    MOE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const FloatLanes x = hn::Set(d, left[i * kTerms + t + 1]);
      MOE_UNROLL
      for (int j = 0; j < kFmaVectors; ++j) odd[i][j] = hn::MulAdd(x, column[j], odd[i][j]);
    }
  }
  MOE_UNROLL
  for (int i = 0; i < kRows; ++i) {
    MOE_UNROLL
    for (int j = 0; j < kFmaVectors; ++j) {
      float* const sum = sums + i * kStripSide + j * kLanes;
      hn::Store(hn::Add(hn::Load(d, sum), hn::Add(even[i][j], odd[i][j])), d, sum);
    }
  }
}

// All of `rows` rows and the columns of `tiles` right tiles, which are whole vectors.
void AddSteps(int64_t rows, int64_t tiles, const float* left, const float* right, float* sums) {
  const EvenCut cut(rows, kFmaRows);  // 16 and 32 rows in parts of kFmaRows, or one less
  for (int64_t j = 0; j < tiles * kTileSide; j += kFmaVectors * kLanes) {
    for (int64_t part = 0; part < cut.parts; ++part) {
      const int64_t i = cut.Begin(part);
      const float* const from = left + i * kTerms;
      float* const to = sums + i * kStripSide + j;
      if (cut.Begin(part + 1) - i == kFmaRows) {
        AddStep<kFmaRows>(from, right + j, to);
      } else {
        AddStep<kFmaRows - 1>(from, right + j, to);
      }
    }
  }
}

// The portable kernel. Requires FlushSubnormals.
void MultiplyOnFma(const StripProduct& product, Prefetcher& ahead) {
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> bits;
  // Of one step, as float32; columns of tiles that are not there are zeros.
  HWY_ALIGN float left[kStripSide * kTerms], right[kTerms * kStripSide] = {};
  float* const sums = product.sums;
  const int64_t rows = product.left_tiles * kTileSide;
  if (!product.continues) std::fill_n(sums, rows * kStripSide, 0.0f);
  const auto lower = [&](const BFloat16* words) HWY_ATTR {
    return hn::BitCast(
        d, hn::ShiftLeft<16>(hn::LoadU(bits, reinterpret_cast<const uint32_t*>(words))));
  };
  const auto upper = [&](const BFloat16* words) HWY_ATTR {
    return hn::BitCast(d, hn::And(hn::LoadU(bits, reinterpret_cast<const uint32_t*>(words)),
                                  hn::Set(bits, 0xffff0000u)));
  };
  const BFloat16* from_left = product.left;
  const BFloat16* from_right = product.right;
  for (int64_t s = 0; s < product.steps; ++s) {
    ahead.Burst();
    for (int64_t i = 0; i < rows * kTerms; i += kLanes) {
      hn::Store(LoadLanes(from_left + i), d, left + i);
    }
    for (int64_t h = 0; h < product.right_tiles; ++h) {
      for (int64_t w = 0; w < kWords; ++w) {
        for (int64_t j = 0; j < kTileSide; j += kLanes) {
          const BFloat16* const words = from_right + h * kTileElements + w * kTerms + 2 * j;
          float* const to = right + 2 * w * kStripSide + h * kTileSide + j;
          hn::Store(lower(words), d, to);
          hn::Store(upper(words), d, to + kStripSide);
        }
      }
    }
    AddSteps(rows, product.right_tiles, left, right, sums);
    from_left += product.left_tiles * kTileElements;
    from_right += product.right_tiles * kTileElements;
  }
}

void MultiplyStrips(const StripProduct& product, Prefetcher& ahead) {
  if (UsesCheckedTiles()) return MultiplyOnCheckedTiles(product, ahead);
  if (UsesAmx()) return MultiplyOnAmx(product, ahead);
  MultiplyOnFma(product, ahead);
}

// sums = pending + sums.
inline void FoldSums(const float* pending, float* sums) {
  const FloatTag d;
  for (int64_t i = 0; i < kStripSums; i += kLanes) {
    hn::StoreU(hn::Add(hn::LoadU(d, pending + i), hn::LoadU(d, sums + i)), d, sums + i);
  }
}

// The block's sums of `rows` rows and `cols` columns, converted to or from elements of c.
template <class TOut>
class TileSums32 {
 public:
  TileSums32(const Problem<BFloat16, TOut>& problem, const TileSlot& slot)
      : problem_(problem), transposes_(IsLeft(problem)), scratch_(slot.transposed) {}

  // Old values, if the product adds to c.
  void Load(int64_t row, int64_t rows, int64_t col, int64_t cols, float* sums) const {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) {
        sums[transposes_ ? j * kStripSide + i : i * kStripSide + j] =
            static_cast<float>(problem_.c(row + i, col + j));
      }
    }
  }
  void Store(const float* sums, int64_t row, int64_t rows, int64_t col, int64_t cols,
             int64_t segment, TallyLanes& tally) const {
    if (transposes_) {
      for (int64_t i = 0; i < TilesOf(cols); ++i) {
        for (int64_t j = 0; j < TilesOf(rows); ++j) {
          TransposeTile(sums + (i * kStripSide + j) * kTileSide, kStripSide,
                        scratch_ + (j * kStripSide + i) * kTileSide, kStripSide);
        }
      }
      sums = scratch_;
    }
    const ExactSink& exact = problem_.exact;
    for (int64_t i = 0; i < rows; ++i, sums += kStripSide) {
      if (exact.used()) {
        Accumulate(sums, exact.inverse_unit, exact.limit,
                   segment == 0 ? exact.write : SumWrite::kAdd, exact.sum.row(row + i) + col, cols,
                   tally);
      } else {
        Convert(sums, cols, problem_.c.row(row + i) + col);
      }
    }
  }

 private:
  const Problem<BFloat16, TOut>& problem_;
  bool transposes_;
  float* scratch_;
};

// Prefetches rows (columns) [side, side + count) of an operand over `steps` steps of products.
inline Prefetcher PrefetchStrip(const Operand& from, const DepthBlock& depth, int64_t side,
                                int64_t count, int64_t steps) {
  constexpr int64_t kBytes = sizeof(BFloat16);
  const TermRun& run = depth.run[0];  // of a tree the first
  const int64_t stride = from.m.stride() * kBytes;
  if (depth.runs == 0 || count <= 0) return {};
  return from.terms_are_rows ? Prefetcher(from.At(side, run.k), run.terms, count * kBytes, stride,
                                          steps * Prefetcher::kSteps)
                             : Prefetcher(from.At(side, run.k), count, run.terms * kBytes, stride,
                                          steps * Prefetcher::kSteps);
}

template <class TOut>
void RunDepth(const Problem<BFloat16, TOut>& problem, const Block& block, const DepthBlock& depth,
              const TileSlot& slot, bool cuts_sums, TallyLanes& tally) {
  const bool b_is_left = IsLeft(problem), in_place = problem.b_layout == Layout::kStrips;
  const Operand a = {problem.a, problem.a_layout == Layout::kTransposed};
  const Operand b = {problem.b, problem.b_layout == Layout::kPlain};
  const TileSums32<TOut> output(problem, slot);
  const int64_t rows = block.row_end - block.row_begin, strip = depth.steps * kTerms;
  for (int64_t i = 0; i < rows; i += kStripSide) {
    PackStripAs(!b_is_left, a, depth.terms(), block.row_begin + i, std::min(kStripSide, rows - i),
                slot.kept + i * strip);
  }
  const int64_t row_strips = (rows + kStripSide - 1) / kStripSide;
  float* sums = slot.sums;
  for (int64_t col = block.col_begin; col < block.col_end; col += kStripSide) {
    const int64_t cols = std::min(kStripSide, block.col_end - col);
    const int64_t next = col + kStripSide;
    const BFloat16* panel = slot.panel;
    Prefetcher ahead;
    if (in_place) {
      panel = problem.b.data() + col * strip;
      if (next < block.col_end) {
        ahead = Prefetcher(panel + kStripSide * strip, 1, kStripSide * strip * 2, 0,
                           row_strips * depth.steps * Prefetcher::kSteps);
      }
    } else {
      PackStripAs(b_is_left, b, depth.terms(), col, cols, slot.panel);
      ahead = PrefetchStrip(b, depth, next, std::min(kStripSide, block.col_end - next),
                            row_strips * depth.steps);
    }
    for (int64_t i = 0; i < rows; i += kStripSide) {
      const int64_t row = block.row_begin + i, count = std::min(kStripSide, rows - i);
      const BFloat16* kept = slot.kept + i * strip;
      StripProduct product = {.left = b_is_left ? panel : kept,
                              .right = b_is_left ? kept : panel,
                              .left_tiles = TilesOf(b_is_left ? cols : count),
                              .right_tiles = TilesOf(b_is_left ? count : cols),
                              .sums = sums,
                              .continues = !depth.first};
      // A strip of packed weights always has two tiles.
      if (in_place) product.left_tiles = 2;
      if (depth.first && problem.write == Write::kAdd) {
        output.Load(row, count, col, cols, sums);
        product.continues = true;
      }
      int waiting = 0;
      for (const SumSteps& sum : depth.sums()) {
        product.steps = sum.steps;
        MultiplyStrips(product, ahead);
        product.left += product.left_tiles * sum.steps * kTileElements;
        product.right += product.right_tiles * sum.steps * kTileElements;
        for (int fold = 0; fold < sum.folds; ++fold) {
          FoldSums(slot.pending + --waiting * kStripSums, sums);
        }
        if (&sum != &depth.sums().back()) {
          std::copy_n(sums, kStripSums, slot.pending + waiting++ * kStripSums);
        }
      }
      if (depth.last) output.Store(sums, row, count, col, cols, depth.segment, tally);
      if (cuts_sums) sums += kStripSums;
    }
  }
}

template <class TOut>
void RunInTiles(const Problem<BFloat16, TOut>& problem, const Block& block, float* memory) {
  if (problem.depth() == 0 && problem.write == Write::kAdd) return;  // -0 stays -0
  const FlushSubnormals flush(true);
  const TileSession session;
  const TileSlot slot(memory, problem);
  const DepthBlocks depths(problem);
  TallyLanes tally(problem.exact.inverse_unit, problem.exact.limit);
  depths.ForEach([&](const DepthBlock& depth) {
    RunDepth(problem, block, depth, slot, depths.cuts_sums(), tally);
  });
  if (!problem.exact.used()) return;
  if (problem.exact.write == SumWrite::kStreamed) hwy::FlushStream();
  AddAtomically(tally.Sum(problem.exact.inverse_unit), *problem.exact.tally);
}

#else

// Other targets run the plain loops of the specification (grouped_gemm_cpu.cc).
template <class TOut>
void RunInTiles(const Problem<BFloat16, TOut>&, const Block&, float*) {
  MOE_CHECK(false);
}

#endif  // HWY_NATIVE_FMA

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace moe::gemm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe::gemm {

void PackTileStrip(MatrixView<const BFloat16> from, const GemmTree& tree, BFloat16* to) {
  const Problem<BFloat16, BFloat16> whole = {.a = from, .tree = tree};
  int64_t step = 0;
  DepthBlocks(whole).ForEach([&](const DepthBlock& depth) {
    for (const TermRun& run : depth.terms()) {
      for (int64_t i = 0; i < kStripSide; ++i) {
        for (int64_t t = 0; t < StepsOf(run.terms) * kTerms; t += kTerms) {
          BFloat16* const row =
              to + (step + run.step + t / kTerms) * 2 * kTileElements + i * kTerms;
          const int64_t terms = i < from.rows() ? std::min(kTerms, run.terms - t) : 0;
          std::fill(std::copy_n(from.data() + i * from.stride() + run.k + t, terms, row),
                    row + kTerms, BFloat16());
        }
      }
    }
    step += depth.steps;
  });
}

template <typename TOut>
void RunTileBlock(const Problem<BFloat16, TOut>& problem, const Block& block, float* memory) {
  MOE_SIMD(RunInTiles<TOut>)(problem, block, memory);
}
template void RunTileBlock(const Problem<BFloat16, float>&, const Block&, float*);
template void RunTileBlock(const Problem<BFloat16, BFloat16>&, const Block&, float*);

}  // namespace moe::gemm
#endif  // HWY_ONCE
