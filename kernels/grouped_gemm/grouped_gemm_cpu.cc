// One block of a product on the CPU: pack, multiply, round. Needs fused multiply-add (x86-64-v3,
// AVX-512 or NEON); where the CPU has none, the plain loops of the specification run instead.
#include <array>
#include <tuple>
#include <type_traits>
#include <vector>

#include "kernels/base/highway_targets.h"
#include "kernels/exact_sum/exact_sum_cpu.h"
#include "kernels/grouped_gemm/gemm_blocks.h"
#include "kernels/grouped_gemm/gemm_dot_avx512.h"
#include "kernels/grouped_gemm/gemm_panels.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/grouped_gemm/grouped_gemm_cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/cache_control.h>

#include "kernels/base/simd-inl.h"
#if HWY_NATIVE_FMA
#include "kernels/exact_sum/exact_sum-inl.h"
#include "kernels/grouped_gemm/gemm_pack-inl.h"
#include "kernels/grouped_gemm/gemm_tile-inl.h"
#endif

HWY_BEFORE_NAMESPACE();
namespace moe::gemm {
namespace HWY_NAMESPACE {

#if HWY_NATIVE_FMA

// Where the float32 sums of a panel's tiles are stored until they are converted to elements of c,
// or added to integers:
//   in c itself     float32 elements, one depth block, a whole tile
//   tile by tile    one depth block: in the same few lines of the slot, which stay in the
//                   first-level cache
//   row by row      in the slot, between depth blocks; each pending node of a tree has its own
//                   memory. (Rows of c may be a power of two apart and evict each other.)
template <class T, class TOut>
class Sums {
 public:
  Sums(const Problem<T, TOut>& problem, const Block& block, const Panel& panel, const Slot& slot)
      : c_(problem.c),
        exact_(problem.exact),
        exact_write_(panel.segment == 0 ? problem.exact.write : SumWrite::kAdd),
        adds_(problem.write == Write::kAdd),
        panel_(panel),
        row_(block.row_begin),
        cols_padded_((panel.cols + kTileCols - 1) / kTileCols * kTileCols),
        slot_(slot.sums),
        node_(slot.node) {}

  // The sums of the tile whose first element is (row, j) of the panel. They continue from earlier
  // depth blocks or from Load.
  TileSums Tile(int64_t row, int64_t j) const {
    return {SumsOf(panel_.waiting, row, j), stride(j), !panel_.first || adds_, panel_.folds, node_};
  }
  // Called before the first depth block; loads the old values if the product adds to c.
  void Load(int64_t row, int64_t rows, int64_t j) const {
    if (!panel_.first || !adds_ || InPlace(j)) return;
    for (int64_t i = 0; i < rows; ++i) {
      Convert(Output(row + i, j), Cols(j), SumsOf(0, row, j) + i * stride(j));
    }
  }
  // Called after the last depth block. `tally` receives what goes to an exact grid.
  void Store(int64_t row, int64_t rows, int64_t j, TallyLanes& tally) const {
    if (!panel_.last || InPlace(j)) return;
    const float* const tile = SumsOf(0, row, j);
    for (int64_t i = 0; i < rows; ++i) {
      const float* const from = tile + i * stride(j);
      if (exact_.used()) {
        Accumulate(from, exact_.inverse_unit, exact_.limit, exact_write_, ExactOutput(row + i, j),
                   Cols(j), tally);
      } else {
        Convert(from, Cols(j), Output(row + i, j));
      }
    }
  }

  // Prefetches what Load and Store access in a strip of `rows` rows, during `steps` steps of tiles.
  WritePrefetcher PrefetchOutput(int64_t rows, int64_t j, int64_t steps) const {
    if (!panel_.last && !(panel_.first && adds_)) return {};
    if (exact_.used()) {
      if (exact_write_ == SumWrite::kStreamed) return {};
      return {ExactOutput(0, j), rows, Cols(j) * int64_t{sizeof(int64_t)},
              exact_.sum.stride() * int64_t{sizeof(int64_t)}, steps};
    }
    return {Output(0, j), rows, Cols(j) * int64_t{sizeof(TOut)},
            c_.stride() * int64_t{sizeof(TOut)}, steps};
  }

 private:
  // `node`: the number of pending nodes of a tree beside these sums.
  float* SumsOf(int64_t node, int64_t row, int64_t j) const {
    if (InPlace(j)) {
      if constexpr (std::is_same_v<TOut, float>) return c_.row(row_ + row) + panel_.col + j;
    }
    return OneDepthBlock() ? slot_ : slot_ + node * node_ + row * cols_padded_ + j;
  }
  int64_t stride(int64_t j) const {
    if (InPlace(j)) return c_.stride();
    return OneDepthBlock() ? kTileCols : cols_padded_;
  }
  bool OneDepthBlock() const { return panel_.first && panel_.last && panel_.waiting == 0; }
  int64_t Cols(int64_t j) const { return std::min(kTileCols, panel_.cols - j); }
  bool InPlace(int64_t j) const {
    return std::is_same_v<TOut, float> && !exact_.used() && OneDepthBlock() && Cols(j) == kTileCols;
  }
  TOut* Output(int64_t row, int64_t j) const { return c_.row(row_ + row) + panel_.col + j; }
  int64_t* ExactOutput(int64_t row, int64_t j) const {
    return exact_.sum.row(row_ + row) + panel_.col + j;
  }

  MatrixView<TOut> c_;
  ExactSink exact_;
  SumWrite exact_write_;  // for this panel's segment
  bool adds_;
  Panel panel_;
  int64_t row_;  // the block's first row of c
  int64_t cols_padded_;
  float* slot_;
  int64_t node_;
};

// Address of word `word` of column `col` of packed weights; `col` is the first of a strip.
template <class T, class TOut>
const T* StripData(const Problem<T, TOut>& problem, int64_t col, int64_t word) {
  return problem.b.data() + col * StripSteps<T>(problem.depth()) +
         word * kStepsPerWord<T> * kTileCols;
}

// Calls run(first step, steps, first word of the panel) for the whole panel; pieces that are
// contiguous in memory are joined.
template <class T, class Run>
void ForEachRun(const Pieces& pieces, const Run& run) {
  Piece joined = pieces.piece[0];
  for (const Piece& piece : pieces.all().subspan(1)) {
    if (joined.steps == joined.words * kStepsPerWord<T> && piece.k == joined.k + joined.steps) {
      joined.steps += piece.steps;
      joined.words += piece.words;
      continue;
    }
    run(joined.k, joined.steps, joined.word);
    joined = piece;
  }
  run(joined.k, joined.steps, joined.word);
}

// Copies operands that the tile does not read in place.
template <class T, class TOut>
void Pack(const Problem<T, TOut>& problem, const Panel& panel, const Pieces& pieces, float* to) {
  const int64_t stride = problem.b.stride();
  const T* const data = problem.b.data();
  ForEachRun<T>(pieces, [&](int64_t k, int64_t steps, int64_t word) HWY_ATTR {
    float* const run = to + word * kTileCols;
    if (problem.b_layout == Layout::kTransposed) {
      return PackTransposedPanel(data + panel.col * stride + k, stride, panel.cols, steps,
                                 panel.depth, run);
    }
    if (problem.b_layout == Layout::kStrips) {
      if constexpr (std::is_same_v<T, Float16>) {
        for (int64_t j = 0; j < panel.cols; j += kTileCols) {
          Convert(StripData(problem, panel.col + j, k), steps * kTileCols, run + j * panel.depth);
        }
      }
      return;
    }
    const int64_t whole = ReadsPlainInPlace(problem) ? panel.cols / kTileCols * kTileCols : 0;
    PackPlainPanel(data + k * stride + panel.col + whole, stride, panel.cols - whole, steps,
                   panel.depth, run + whole * panel.depth);
  });
}

// Whether columns [j, j + kTileCols) of the panel are read in place.
template <class T, class TOut>
bool InPlace(const Problem<T, TOut>& problem, const Panel& panel, int64_t j) {
  if (problem.b_layout == Layout::kStrips) return !std::is_same_v<T, Float16>;
  return ReadsPlainInPlace(problem) && j + kTileCols <= panel.cols;
}

// Those columns, from the panel's first word on.
template <class T, class TOut>
Strip StripAt(const Problem<T, TOut>& problem, const Panel& panel, const Slot& slot, int64_t j) {
  if (!InPlace(problem, panel, j)) return {slot.panel + j * panel.depth, kTileCols};
  if constexpr (std::is_same_v<T, float>) {
    if (problem.b_layout == Layout::kPlain) {
      return {problem.b.row(panel.k) + panel.col + j, problem.b.stride()};
    }
  }
  const T* const words = StripData(problem, panel.col + j, panel.k / kStepsPerWord<T>);
  return {reinterpret_cast<const float*>(words), kTileCols};
}

#if MOE_GEMM_DOT_AVX512 && HWY_TARGET == HWY_AVX3
#define MOE_DOTS 1
inline PlainDotRows DotRowsOf(const PlainRows<BFloat16>& a) {
  return {reinterpret_cast<const char*>(a.data), a.row_stride * int64_t{sizeof(BFloat16)}};
}
inline PlainDotRows DotRowsOf(const PlainRows<float>& a) {
  return {reinterpret_cast<const char*>(a.data), a.row_stride * int64_t{sizeof(float)}};
}
inline PackedDotRows DotRowsOf(const PackedRows& a) {
  return {reinterpret_cast<const char*>(a.data)};
}
#else
#define MOE_DOTS 0
#endif

// Multiplies `rows` rows of a by the pieces of a strip, which is `unpacked` to FloatPairs or not.
template <class T, class Rows>
void MultiplyWords(int64_t rows, const Rows& a, const Strip& b, bool unpacked,
                   absl::Span<const TilePiece> pieces, const TileSums& c, Prefetchers& ahead) {
#if MOE_DOTS
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (DotsBFloat16()) return DotTile(rows, DotRowsOf(a), b.data, pieces, c, ahead);
  }
#endif
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (unpacked) return TileOf<FloatPairs>(rows, a, b, pieces, c, ahead);
  }
  TileOf<T>(rows, a, b, pieces, c, ahead);
}

// Computes one tile: rows [row, row + rows) of the block times strip `b`.
template <class T, class TOut>
void MultiplyTile(const Problem<T, TOut>& problem, const Block& block, const Panel& panel,
                  const float* packed_a, int64_t row, int64_t rows, const Strip& b, bool unpacked,
                  absl::Span<const TilePiece> pieces, const TileSums& c, Prefetchers& ahead) {
  const auto multiply = [&](const auto& a) HWY_ATTR {
    MultiplyWords<T>(rows, a, b, unpacked, pieces, c, ahead);
  };
  const float* const packed = packed_a + row * panel.depth;
  if (problem.a_layout == Layout::kTransposed) return multiply(PackedRows{packed});
  if (PacksRows(problem)) return multiply(PlainRows<float>{packed, panel.depth});
  if constexpr (!std::is_same_v<T, Float16>) {
    return multiply(
        PlainRows<T>{problem.a.row(block.row_begin + row) + panel.k, problem.a.stride()});
  }
}

#undef MOE_DOTS

// The pieces of one panel in the tile's word indices.
template <class T, class TOut>
class TilePieces {
 public:
  TilePieces(const Problem<T, TOut>& problem, const Panel& panel, const Pieces& pieces)
      : packs_a_(PacksRows(problem)), k_(panel.k), pieces_(pieces) {}

  // `in_place`: b is read in place.
  absl::Span<TilePiece> Of(bool in_place) {
    for (size_t i = 0; i < pieces_.count; ++i) {
      const Piece& piece = pieces_.piece[i];
      const int64_t word = (piece.k - k_) / kStepsPerWord<T>;
      tile_[i] = {packs_a_ ? piece.word : word, in_place ? word : piece.word, piece.words,
                  piece.folds};
    }
    return absl::MakeSpan(tile_).subspan(0, pieces_.count);
  }

 private:
  bool packs_a_;
  int64_t k_;
  const Pieces& pieces_;
  std::array<TilePiece, std::tuple_size_v<decltype(Pieces::piece)>> tile_;
};

// Converts a strip to FloatPairs, piece after piece, and sets where they begin.
inline Strip UnpackStrip(const Strip& strip, absl::Span<TilePiece> pieces, float* to) {
  int64_t word = 0;
  for (TilePiece& piece : pieces) {
    const float* from = strip.data + piece.b * strip.stride;
    piece.b = word;
    for (const int64_t end = word + piece.words; word < end; ++word, from += strip.stride) {
      float* const pair = to + 2 * word * kTileCols;
      UnpackPairs(from, kTileCols, pair, pair + kTileCols);
    }
  }
  return {to, 2 * kTileCols};
}

// Multiplies all rows of the block by one panel.
template <class T, class TOut>
void MultiplyPanel(const Problem<T, TOut>& problem, const Block& block, const EvenCut& tiles,
                   const Panel& panel, const Pieces& pieces, const Slot& slot,
                   const float* packed_a, Prefetcher next, TallyLanes& tally) {
  const Sums<T, TOut> sums(problem, block, panel, slot);
  TilePieces<T, TOut> tile_pieces(problem, panel, pieces);
  Prefetchers ahead = {.next = next};
  const bool unpacks = UnpacksPairs(problem);
  for (int64_t j = 0; j < panel.cols; j += kTileCols) {
    Strip strip = StripAt(problem, panel, slot, j);
    const auto words = tile_pieces.Of(InPlace(problem, panel, j));
    if (unpacks) strip = UnpackStrip(strip, words, slot.pairs);
    ahead.output = sums.PrefetchOutput(tiles.total, j, tiles.parts * panel.depth);
    for (int64_t t = 0; t < tiles.parts; ++t) {
      const int64_t row = tiles.Begin(t), rows = tiles.Begin(t + 1) - row;
      sums.Load(row, rows, j);
      MultiplyTile(problem, block, panel, packed_a, row, rows, strip, unpacks, words,
                   sums.Tile(row, j), ahead);
      sums.Store(row, rows, j, tally);
    }
  }
}

template <class T, class TOut>
void PackA(const Problem<T, TOut>& problem, const Block& block, const EvenCut& tiles,
           const Panel& panel, const Pieces& pieces, float* to) {
  if (problem.a_layout == Layout::kTransposed) {
    return PackTransposedRows(problem, panel.k, panel.steps, block.row_begin, tiles, to);
  }
  ForEachRun<T>(pieces, [&](int64_t k, int64_t steps, int64_t word) HWY_ATTR {
    PackPlainRows(problem, k, steps, block.row_begin, tiles.total, panel.depth, to + word);
  });
}

// Prefetches `next` while `tiles` tiles of each strip of `panel` are multiplied.
template <class T, class TOut>
Prefetcher PrefetchFor(const Problem<T, TOut>& problem, const Panel& panel, const Panel& next,
                       int64_t tiles) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(T));
  constexpr int64_t kLineBytes = kTileCols * kStepsPerWord<T> * kBytes;  // a strip's line
  const auto strips = [](int64_t cols) {
    return (cols + kTileCols - 1) / kTileCols;
  };
  const int64_t words = panel.depth * tiles * strips(panel.cols);
  const MatrixView<const T>& b = problem.b;
  const int64_t stride = b.stride();
  if (problem.b_layout == Layout::kStrips) {
    return {StripData(problem, next.col, next.k / kStepsPerWord<T>), strips(next.cols),
            next.depth * kLineBytes, WordsOf<T>(problem.depth()) * kLineBytes, words};
  }
  if (problem.b_layout == Layout::kTransposed) {
    return {b.data() + next.col * stride + next.k, next.cols, next.steps * kBytes, stride * kBytes,
            words};
  }
  return {b.data() + next.k * stride + next.col,
          next.parts,
          problem.tree.cut.extent * stride * kBytes,
          next.steps,
          next.cols * kBytes,
          stride * kBytes,
          words};
}

// Each depth block, of whole chains, adds to the float32 sums of the previous one.
template <class T, class TOut>
void Run(const Problem<T, TOut>& problem, const Block& block, const Slot& slot) {
  if (problem.depth() == 0 && problem.write == Write::kAdd) return;  // -0 stays -0
  const EvenCut tiles(block.row_end - block.row_begin, kTileRows);
  const FlushSubnormals flush(std::is_same_v<T, BFloat16>);
  const Panels<T> panels(problem, block);
  const bool packs_a = PacksRows(problem);
  const bool keeps_all = panels.words() <= KeptWords(problem);
  TallyLanes tally(problem.exact.inverse_unit, problem.exact.limit);
  Panel panel = panels.First(), after;
  Pieces pieces = panels.PiecesOf(panel);
  for (; panel.cols > 0; panel = after) {
    after = panels.After(panel);
    float* const a = keeps_all ? slot.a + panel.word * tiles.total : slot.a;
    const bool packed_before = keeps_all && panel.col > block.col_begin;
    if (packs_a && !packed_before) PackA(problem, block, tiles, panel, pieces, a);
    Pack(problem, panel, pieces, slot.panel);
    Prefetcher next;
    if (after.cols > 0) next = PrefetchFor(problem, panel, after, tiles.parts);
    MultiplyPanel(problem, block, tiles, panel, pieces, slot, a, next, tally);
    if (after.segment != panel.segment || after.part != panel.part) {
      pieces = panels.PiecesOf(after);
    }
  }
  if (!problem.exact.used()) return;
  if (problem.exact.write == SumWrite::kStreamed) hwy::FlushStream();
  AddAtomically(tally.Sum(problem.exact.inverse_unit), *problem.exact.tally);
}

#else

constexpr int64_t kTileCols = kMaxTileCols;

template <class T>
void PackWeightStrip(MatrixView<const T> from, T* to) {
  for (int64_t k = 0; k < from.cols(); k += kStepsPerWord<T>) {
    for (int64_t j = 0; j < kTileCols; ++j) {
      for (int64_t half = k; half < k + kStepsPerWord<T>; ++half) {
        *to++ = j < from.rows() && half < from.cols() ? from(j, half) : T(0.0f);
      }
    }
  }
}

// `part` has the operands of `block` alone, a transposed and b plain.
template <class T>
void RunExact(const Problem<T, float>& part, const Block& block) {
  const int64_t rows = block.row_end - block.row_begin, cols = block.col_end - block.col_begin;
  std::vector<float> sums(static_cast<size_t>(rows * cols));
  const ExactSink& exact = part.exact;
  GridTally tally;
  for (size_t s = 0; s + 1 < exact.segments.size(); ++s) {
    Problem<T, float> segment = part;
    segment.a = RowRange(part.a, exact.segments[s], exact.segments[s + 1]);
    segment.b = RowRange(part.b, exact.segments[s], exact.segments[s + 1]);
    segment.c = {sums.data(), rows, cols};
    Reference(segment);
    for (int64_t i = 0; i < rows; ++i) {
      tally.Add(ExactAccumulateRange(segment.c.row(i), exact.inverse_unit, exact.limit,
                                     s == 0 ? exact.write : SumWrite::kAdd,
                                     exact.sum.row(block.row_begin + i) + block.col_begin, cols));
    }
  }
  AddAtomically(tally, *exact.tally);
}

template <class T, class TOut>
void Run(const Problem<T, TOut>& problem, const Block& block, const Slot&) {
  const auto cut = [](auto m, int64_t row, int64_t rows, int64_t col, int64_t cols) {
    return decltype(m)(m.data() + row * m.stride() + col, rows, cols, m.stride());
  };
  const int64_t rows = block.row_end - block.row_begin;
  const int64_t cols = block.col_end - block.col_begin;
  const int64_t depth = problem.depth();
  Problem<T, TOut> part = problem;
  part.a = problem.a_layout == Layout::kPlain ? cut(part.a, block.row_begin, rows, 0, depth)
                                              : cut(part.a, 0, depth, block.row_begin, rows);
  if (problem.b_layout == Layout::kPlain) part.b = cut(part.b, 0, depth, block.col_begin, cols);
  if (problem.b_layout == Layout::kTransposed) {
    part.b = cut(part.b, block.col_begin, cols, 0, depth);
  }
  if (problem.b_layout == Layout::kStrips) {  // blocks are whole strips
    const int64_t begin = problem.is_tile_order()
                              ? block.col_begin / kStripSide * TreeSteps(problem.tree, depth)
                              : block.col_begin / kTileCols * StripSteps<T>(depth);
    part.b = cut(part.b, begin, part.b.rows() - begin, 0, part.b.cols());
  }
  if constexpr (std::is_same_v<TOut, float>) {
    if (problem.exact.used()) return RunExact(part, block);
  }
  part.c = cut(part.c, block.row_begin, rows, block.col_begin, cols);
  Reference(part);
}

#endif  // HWY_NATIVE_FMA

int64_t TileCols() {
  return kTileCols;
}

template <class AnyProblem>
void RunAny(const AnyProblem& problem, const Block& block, float* memory) {
#if HWY_NATIVE_FMA
  if constexpr (AnyProblem::kIsBFloat16) {
    if (problem.is_tile_order()) return RunTileBlock(problem, block, memory);
  }
#endif
  Run(problem, block, Slot(memory, problem));
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace moe::gemm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace moe::gemm {

int64_t StripCols() {
  return MOE_SIMD(TileCols)();
}

template <typename T>
void PackStrip(MatrixView<const T> from, T* to) {
  MOE_SIMD(PackWeightStrip<T>)(from, to);
}
MOE_INSTANTIATE_FOR_STORAGE(PackStrip)

template <typename T, typename TOut>
void RunBlock(const Problem<T, TOut>& problem, const Block& block, float* memory) {
  using ThisProblem = Problem<T, TOut>;
  MOE_SIMD(RunAny<ThisProblem>)(problem, block, memory);
}
#define MOE_INSTANTIATE(T, TOut) \
  template void RunBlock(const Problem<T, TOut>&, const Block&, float*);
MOE_FOR_PRODUCTS(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe::gemm
#endif  // HWY_ONCE
