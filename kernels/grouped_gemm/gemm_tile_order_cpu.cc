// One block of a product in the order of tiles: pack strips, multiply them, round. The strips are
// multiplied by AMX tiles where the CPU has them, else by fused multiply-adds, with the same bits.
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
#include "kernels/grouped_gemm/gemm_tile_fma-inl.h"
#include "kernels/grouped_gemm/gemm_tile_pack-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace moe::gemm {
namespace HWY_NAMESPACE {

#if HWY_NATIVE_FMA

using namespace moe::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace): this target's lanes

using MultiplyStrips = void (*)(const StripProduct&, Prefetchers&);
MultiplyStrips BestMultiply() {
  if (UsesCheckedTiles()) return MultiplyOnCheckedTiles;
  return UsesAmx() ? MultiplyOnAmx : MultiplyOnFma;
}

// sums = pending + sums.
inline void FoldSums(const float* pending, float* sums) {
  const FloatTag d;
  for (int64_t i = 0; i < kStripSums; i += kLanes) {
    hn::StoreU(hn::Add(hn::LoadU(d, pending + i), hn::LoadU(d, sums + i)), d, sums + i);
  }
}

// Outputs larger than any core's share of a third-level cache.
constexpr int64_t kStreamedFloats = int64_t{2} << 20;

// The block's sums of `rows` rows and `cols` columns, converted to or from elements of c.
template <class TOut>
class TileOutput {
 public:
  TileOutput(const Problem<BFloat16, TOut>& problem, const TileSlot& slot)
      : problem_(problem),
        transposes_(IsLeft(problem)),
        streams_(std::is_same_v<TOut, float> && problem.write == Write::kOverwrite &&
                 !problem.exact.used() && problem.c.rows() * problem.c.cols() >= kStreamedFloats),
        scratch_(slot.transposed) {}
  ~TileOutput() {
    if (streams_) hwy::FlushStream();
  }

  // Old values, if the product adds to c.
  void Load(int64_t row, int64_t rows, int64_t col, int64_t cols, float* sums) const {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) {
        sums[transposes_ ? j * kStripSide + i : i * kStripSide + j] =
            static_cast<float>(problem_.c(row + i, col + j));
      }
    }
  }
  // Prefetches what Store writes, during `steps` steps of strips.
  WritePrefetcher Prefetch(int64_t row, int64_t rows, int64_t col, int64_t cols,
                           int64_t steps) const {
    const ExactSink& exact = problem_.exact;
    if (streams_ || (exact.used() && exact.write == SumWrite::kStreamed)) return {};
    const auto of = [&](auto* data, int64_t stride) -> WritePrefetcher {
      constexpr int64_t kBytes = sizeof *data;
      return {data, rows, cols * kBytes, stride * kBytes, steps * WritePrefetcher::kSteps};
    };
    if (exact.used()) return of(exact.sum.row(row) + col, exact.sum.stride());
    return of(problem_.c.row(row) + col, problem_.c.stride());
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
      } else if (streams_ && CanStream(row + i, col, cols)) {
        if constexpr (std::is_same_v<TOut, float>) {
          float* const to = problem_.c.row(row + i) + col;
          for (int64_t j = 0; j < kStripSide; j += kLanes) {
            hn::Stream(hn::Load(FloatTag(), sums + j), FloatTag(), to + j);
          }
        }
      } else {
        Convert(sums, cols, problem_.c.row(row + i) + col);
      }
    }
  }

 private:
  bool CanStream(int64_t row, int64_t col, int64_t cols) const {
    return cols == kStripSide && reinterpret_cast<uintptr_t>(problem_.c.row(row) + col) % 64 == 0;
  }

  const Problem<BFloat16, TOut>& problem_;
  bool transposes_;
  bool streams_;  // past the cache
  float* scratch_;
};

// The panels of b that a block multiplies, packed or in place.
template <class TOut>
class PanelsOfB {
 public:
  PanelsOfB(const Problem<BFloat16, TOut>& problem, const Block& block, const DepthBlock& depth,
            const TileSlot& slot)
      : problem_(problem),
        block_(block),
        depth_(depth),
        memory_(slot.panel),
        most_cols_(PanelsAtOnce(problem) * kStripSide),
        // copied first, forward products would take 1.35 times as long at 128 rows, 1.07 at 512
        reads_in_place_(problem.b_layout == Layout::kTransposed && depth.runs == 1 &&
                        depth.run[0].terms % kTerms == 0) {}

  // `next` prefetches what comes after the last Set, while panels are multiplied.
  Prefetchers ahead;

  // Sets the operand of `product` that has `cols` columns from `col` on.
  void Set(int64_t col, int64_t cols, StripProduct& product) {
    const MatrixView<const BFloat16>& b = problem_.b;
    const int64_t strip = depth_.steps * kTerms * kStripSide;
    const int64_t after = col + kStripSide;
    const int64_t cols_after = std::min(kStripSide, block_.col_end - after);
    if (problem_.b_layout == Layout::kStrips) {
      const int64_t whole = TreeSteps(problem_.tree, problem_.depth()) * kTerms;
      const auto at = [&](int64_t column) {
        return b.data() + (column * whole) + depth_.steps_before * kTerms * kStripSide;
      };
      if (cols_after > 0) Prefetch(at(after), 1, strip, strip, 1);
      product.right = at(col);
      product.right_tiles = 2;
      return;
    }
    if (reads_in_place_ && cols == kStripSide) {
      // One strip of rows only waits for memory.
      if (block_.row_end - block_.row_begin > kStripSide) PrefetchNext(after, cols_after, 1);
      product.left = b.row(col) + depth_.run[0].k;
      product.left_tiles = 2;
      product.left_row = b.stride();
      product.left_tile = kTileSide * b.stride();
      product.left_step = kTerms;
      return;
    }
    if (problem_.b_layout == Layout::kTransposed) {
      PrefetchNext(after, cols_after, 1);
      PackLeftStrip(RowRange(b, col, col + cols), depth_.terms(), TilesOf(cols), memory_);
      return product.SetPackedLeft(memory_, TilesOf(cols));
    }
    if (col >= packed_end_) {
      packed_begin_ = col;
      packed_end_ = std::min(block_.col_end, col + most_cols_);
      PackRightStrips({b, true}, depth_.terms(), col, packed_end_ - col, strip, memory_);
      PrefetchNext(packed_end_, std::min(most_cols_, block_.col_end - packed_end_),
                   StripsOf(packed_end_ - col));
    }
    product.right = memory_ + (col - packed_begin_) / kStripSide * strip;
    product.right_tiles = TilesOf(cols);
  }

 private:
  // Columns [col, col + cols) in memory, of a tree's depth the first run, while `panels` panels are
  // multiplied.
  void PrefetchNext(int64_t col, int64_t cols, int64_t panels) {
    if (cols <= 0 || depth_.runs == 0) return;
    const MatrixView<const BFloat16>& b = problem_.b;
    const TermRun& run = depth_.run[0];
    if (problem_.b_layout == Layout::kPlain) {
      return Prefetch(b.row(run.k) + col, run.terms, cols, b.stride(), panels);
    }
    Prefetch(b.row(col) + run.k, cols, run.terms, b.stride(), panels);
  }
  void Prefetch(const BFloat16* data, int64_t rows, int64_t cols, int64_t stride, int64_t panels) {
    constexpr int64_t kBytes = sizeof(BFloat16);
    const int64_t strips = StripsOf(block_.row_end - block_.row_begin);
    ahead.next = {data, rows, cols * kBytes, stride * kBytes,
                  panels * strips * depth_.steps * Prefetcher::kSteps};
  }

  const Problem<BFloat16, TOut>& problem_;
  const Block& block_;
  const DepthBlock& depth_;
  BFloat16* memory_;
  int64_t most_cols_;  // packed at a time
  bool reads_in_place_;
  int64_t packed_begin_ = 0, packed_end_ = 0;
};

template <class TOut>
void RunDepth(const Problem<BFloat16, TOut>& problem, const Block& block, const DepthBlock& depth,
              const TileSlot& slot, MultiplyStrips multiply, TallyLanes& tally) {
  const bool cuts_sums = DepthBlocks(problem).cuts_sums();
  const bool b_is_left = IsLeft(problem);
  const Operand a = {problem.a, problem.a_layout == Layout::kTransposed};
  const TileOutput<TOut> output(problem, slot);
  const int64_t rows = block.row_end - block.row_begin, strip = depth.steps * kTerms;
  for (int64_t i = 0; i < rows; i += kStripSide) {
    PackStripAs(!b_is_left, a, depth.terms(), block.row_begin + i, std::min(kStripSide, rows - i),
                slot.kept + i * strip);
  }
  PanelsOfB<TOut> panels(problem, block, depth, slot);
  float* sums = slot.sums;
  for (int64_t col = block.col_begin; col < block.col_end; col += kStripSide) {
    const int64_t cols = std::min(kStripSide, block.col_end - col);
    StripProduct panel;
    panels.Set(col, cols, panel);
    for (int64_t i = 0; i < rows; i += kStripSide) {
      const int64_t row = block.row_begin + i, count = std::min(kStripSide, rows - i);
      StripProduct product = panel;
      const BFloat16* const kept = slot.kept + i * strip;
      if (b_is_left) {
        product.right = kept;
        product.right_tiles = TilesOf(count);
      } else {
        product.SetPackedLeft(kept, TilesOf(count));
      }
      product.sums = sums;
      product.continues = !depth.first;
      if (depth.first && problem.write == Write::kAdd) {
        output.Load(row, count, col, cols, sums);
        product.continues = true;
      }
      if (depth.last) panels.ahead.output = output.Prefetch(row, count, col, cols, depth.steps);
      int waiting = 0;
      for (const SumSteps& sum : depth.sums()) {
        product.steps = sum.steps;
        multiply(product, panels.ahead);
        product.left += sum.steps * product.left_step;
        product.right += sum.steps * product.right_tiles * kTileElements;
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

void PackWholeStrip(MatrixView<const BFloat16> from, absl::Span<const TermRun> runs, BFloat16* to) {
  PackStripOf<false>({from, false}, runs, 2, 0, from.rows(), to);
}

template <class TOut>
void RunInTiles(const Problem<BFloat16, TOut>& problem, const Block& block, float* memory) {
  if (problem.depth() == 0 && problem.write == Write::kAdd) return;  // -0 stays -0
  const FlushSubnormals flush(true);
  const TileSession session;
  const TileSlot slot(memory, problem);
  const MultiplyStrips multiply = BestMultiply();
  TallyLanes tally(problem.exact.inverse_unit, problem.exact.limit);
  DepthBlocks(problem).ForEach(
      [&](const DepthBlock& depth) { RunDepth(problem, block, depth, slot, multiply, tally); });
  if (!problem.exact.used()) return;
  if (problem.exact.write == SumWrite::kStreamed) hwy::FlushStream();
  AddAtomically(tally.Sum(problem.exact.inverse_unit), *problem.exact.tally);
}

#else

void PackWholeStrip(MatrixView<const BFloat16> from, absl::Span<const TermRun> runs, BFloat16* to) {
  for (const TermRun& run : runs) {
    for (int64_t t = 0; t < StepsOf(run.terms) * kTerms; ++t) {
      for (int64_t j = 0; j < kStripSide; ++j) {
        const bool is_there = j < from.rows() && t < run.terms;
        to[run.step * 2 * kTileElements + RightIndex(t, j)] =
            is_there ? from(j, run.k + t) : BFloat16();
      }
    }
  }
}

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
  DepthBlocks(whole).ForEach([&](const DepthBlock& depth) {
    MOE_SIMD(PackWholeStrip)(from, depth.terms(), to + depth.steps_before * 2 * kTileElements);
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
