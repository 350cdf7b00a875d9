// Blocking of a product on the packed CPU path, and what one block needs. Internal.
#ifndef MOE_KERNELS_GROUPED_GEMM_GEMM_BLOCKS_H_
#define MOE_KERNELS_GROUPED_GEMM_GEMM_BLOCKS_H_

#include <algorithm>
#include <bit>
#include <cstdint>
#include <iterator>
#include <type_traits>

#include "kernels/base/dtype.h"
#include "kernels/grouped_gemm/gemm_dot_avx512.h"
#include "kernels/grouped_gemm/gemm_problem.h"
#include "kernels/grouped_gemm/gemm_tile_order.h"

namespace moe::gemm {

// The register tile reads operands in words of 32 bits, which packed panels store as float. A word
// of float or Float16 is one step of the depth, as float32. A word of BFloat16 is two steps, the
// earlier in the lower half, the last one padded with a zero: the operand format of vdpbf16ps.
template <typename T>
inline constexpr int64_t kStepsPerWord = std::is_same_v<T, BFloat16> ? 2 : 1;
template <typename T>
constexpr int64_t WordsOf(int64_t steps) {
  return (steps + kStepsPerWord<T> - 1) / kStepsPerWord<T>;
}
// Elements of storage type in one column of packed weights for a depth of `steps`.
template <typename T>
constexpr int64_t StripSteps(int64_t steps) {
  return WordsOf<T>(steps) * kStepsPerWord<T>;
}

// Rows of the register tile: 6 x 4 accumulators, 4 columns and a broadcast fill 32 registers; 6 x 2
// fill 16. kMaxTileCols: the most columns of any target's tile; every target's number divides it.
inline constexpr int64_t kTileRows = 6;
inline constexpr int64_t kMaxTileCols = 64;

// A panel is the part of b that is multiplied by many rows at a time, 128 KiB of words: it stays in
// a second-level cache meanwhile. Panels of a plain b cover few rows of its memory, because lines a
// power of two apart share few cache sets: 470 runs of 256 bytes, 4 KiB apart, do not fit any
// second-level cache. Depths are whole chains.
struct Shape {
  int64_t panel_cols;
  int64_t panel_depth;  // in words, like all depths here
  // Rows of a block. More rows amortise packing b further; but float32 sums of a panel's columns
  // (rows x panel_cols), and the packed rows of a transposed a, must stay in cache as well.
  int64_t block_rows;
  int64_t col_step;  // columns of a block are multiples of it
};
inline constexpr Shape kTransposedB = {
    .panel_cols = 64, .panel_depth = 512, .block_rows = 512, .col_step = 64};
inline constexpr Shape kStripsOfB = {
    .panel_cols = 64, .panel_depth = 512, .block_rows = 252, .col_step = 64};
// A panel of 32 KiB is packed into and read from a first-level cache. 256 columns were 1.1 to 1.3
// times as slow at 32 and 64 rows of float32.
inline constexpr Shape kPlainB = {
    .panel_cols = 64, .panel_depth = 128, .block_rows = 252, .col_step = 256};
// For one tile of rows, or few steps, which are bound by memory: long rows of b, read from front to
// back. Input gradients of one tile read float32 weights in place: 1.2 times as fast as kPlainB at
// 4 rows, and slower from 8 on, where sums are loaded and stored too often. 256 columns are 0.85
// times as fast.
inline constexpr Shape kWideB = {
    .panel_cols = 1024, .panel_depth = 128, .block_rows = 252, .col_step = 256};
inline constexpr int64_t kFewWords = 32;
// For weight gradients with segments of more rows than kPlainB has steps: deep panels, so that sums
// stay in registers for longer, and the rows of a transposed a are packed once for all panels. 1.15
// times as fast as kPlainB from 192 rows on, no faster at 128.
inline constexpr Shape kDeepB = {
    .panel_cols = 64, .panel_depth = 512, .block_rows = 252, .col_step = 64};
inline constexpr int64_t kMostDeep = 2048;  // packed rows are 2 MiB
// For input gradients of many rows: 1.08 times as fast as kPlainB at 512.
inline constexpr Shape kTallB = {
    .panel_cols = 128, .panel_depth = 256, .block_rows = 512, .col_step = 256};

// For input gradients with trees, from 32 rows on: deep panels, so that more nodes are added within
// a tile. With kTallB those of bfloat16 would take 2 % longer.
inline constexpr Shape kTreeB = {
    .panel_cols = 128, .panel_depth = 512, .block_rows = 512, .col_step = 256};
inline constexpr int64_t kTreeRows = 32;
inline constexpr int64_t kMostPanelWords = 512;  // the most of all shapes

// Whether a chain of the depth ends with half a word, whose other half must be zero rather than
// what follows in memory.
template <typename T, typename TOut>
constexpr bool HasHalfWords(const Problem<T, TOut>& problem) {
  if (!problem.is_tree()) return problem.depth() % kStepsPerWord<T> != 0;
  const TreeCut& cut = problem.tree.cut;
  for (int s = 0; s <= cut.leaves; ++s) {
    if (cut.Begin(s) % kStepsPerWord<T> != 0) return true;
  }
  return cut.extent % kStepsPerWord<T> != 0;  // where later parts begin
}

// Whether the rows of a are copied: unless their words are in memory as the tile reads them.
template <typename T, typename TOut>
constexpr bool PacksRows(const Problem<T, TOut>& problem) {
  return problem.a_layout == Layout::kTransposed || std::is_same_v<T, Float16> ||
         HasHalfWords(problem);
}

template <typename T, typename TOut>
constexpr bool IsWide(const Problem<T, TOut>& problem) {
  if (problem.exact.used()) return false;  // sums of a panel stay in cache until they are added
  return problem.c.rows() <= kTileRows || WordsOf<T>(problem.depth()) <= kFewWords;
}

// Whether the tile reads whole strips of b in place: with one tile of rows packing would not pay.
template <typename T, typename TOut>
constexpr bool ReadsPlainInPlace(const Problem<T, TOut>& problem) {
  return std::is_same_v<T, float> && problem.b_layout == Layout::kPlain &&
         problem.c.rows() <= kTileRows;
}

template <typename T, typename TOut>
constexpr int64_t SegmentsOf(const Problem<T, TOut>& problem) {
  return std::max<int64_t>(1, std::ssize(problem.exact.segments) - 1);
}

template <typename T, typename TOut>
constexpr bool IsDeep(const Problem<T, TOut>& problem) {
  const int64_t words = WordsOf<T>(problem.depth());
  return words > kPlainB.panel_depth * SegmentsOf(problem) && words <= kMostDeep;
}

// Whether strips of b are converted to floats (FloatPairs in gemm_tile-inl.h), which pays from
// about six tiles of rows on.
inline constexpr int64_t kFewPairRows = 32;
template <typename T, typename TOut>
bool UnpacksPairs(const Problem<T, TOut>& problem) {
  return std::is_same_v<T, BFloat16> && !DotsBFloat16() && problem.c.rows() > kFewPairRows;
}

template <typename T, typename TOut>
Shape ShapeFor(const Problem<T, TOut>& problem) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (problem.is_tile_order()) {
      return {.panel_cols = kStripSide,
              .panel_depth = kMostSteps * kTerms / 2,
              .block_rows = BlockRows(problem),
              .col_step = kStripSide};
    }
  }
  if (problem.b_layout == Layout::kTransposed) return kTransposedB;
  if (problem.b_layout == Layout::kStrips) return kStripsOfB;
  if (IsWide(problem)) return kWideB;
  if (problem.is_tree() && problem.c.rows() >= kTreeRows) return kTreeB;
  if (problem.a_layout == Layout::kPlain) {
    return problem.c.rows() > kPlainB.block_rows ? kTallB : kPlainB;
  }
  return IsDeep(problem) ? kDeepB : kPlainB;
}

// Upper bound of the words before step `begin`, the first of segment `segment`: each segment has
// whole words. For all segments: WordsBefore(depth, number of segments).
template <typename T>
constexpr int64_t WordsBefore(int64_t begin, int64_t segment) {
  return kStepsPerWord<T> == 1 ? begin : (begin + segment) / kStepsPerWord<T>;
}

// Leaves of the largest subtrees that fit a panel, 1 if none does.
template <typename T, typename TOut>
int LeavesPerPanel(const Problem<T, TOut>& problem) {
  const TreeCut& cut = problem.tree.cut;
  int leaves = cut.leaves;
  for (; leaves > 1; leaves /= 2) {
    const int64_t steps = cut.MostValues(leaves);
    // each may end with half a word
    const int64_t chains = cut.item % kStepsPerWord<T> == 0 ? 1 : leaves;
    const int64_t words = WordsBefore<T>(problem.tree.first_times * steps, chains) +
                          (problem.tree.parts - 1) * WordsBefore<T>(steps, chains);
    if (words <= ShapeFor(problem).panel_depth) break;
  }
  return leaves;
}

// Sums of a panel that a slot stores: those that are added to, and pending nodes of a tree.
template <typename T, typename TOut>
int64_t NodesOf(const Problem<T, TOut>& problem) {
  if (!problem.is_tree()) return 1;
  const auto subtrees = static_cast<uint32_t>(problem.tree.cut.leaves / LeavesPerPanel(problem));
  return std::bit_width(subtrees);
}

// Words that a slot stores of each packed row of a, a multiple of 16.
template <typename T, typename TOut>
int64_t KeptWords(const Problem<T, TOut>& problem) {
  if (!PacksRows(problem)) return 0;
  const int64_t words = ShapeFor(problem).panel_depth;
  if (problem.a_layout == Layout::kPlain || !IsDeep(problem)) return words;
  const int64_t all = WordsBefore<T>(problem.depth(), SegmentsOf(problem));
  return std::max(words, (all + 15) / 16 * 16);
}

// The most columns of a block when all threads have work: the next panel is prefetched while one is
// multiplied, and a packed a is used for all of them.
inline constexpr int64_t kMaxBlockCols = 1024;

// A rectangle of the output that one thread computes at a time.
struct Block {
  int64_t row_begin = 0, row_end = 0;
  int64_t col_begin = 0, col_end = 0;
};

// `total` cut into ranges of at most `most`, as even as possible; range i is [Begin(i), Begin(i +
// 1)).
struct EvenCut {
  EvenCut(int64_t whole, int64_t most) : total(whole), parts((whole + most - 1) / most) {}
  int64_t Begin(int64_t i) const { return total * i / parts; }
  int64_t total;
  int64_t parts;
};

// The blocks of one problem: rows are cut evenly, columns by `max_block_cols`, in multiples of the
// shape's column step, at least one. Results do not depend on the cut.
struct BlockGrid {
  BlockGrid(int64_t row_count, int64_t col_count, const Shape& shape, int64_t max_block_cols)
      : rows(row_count, shape.block_rows),
        cols(col_count),
        block_cols(std::max(shape.col_step, max_block_cols / shape.col_step * shape.col_step)),
        col_blocks((cols + block_cols - 1) / block_cols) {}

  int64_t size() const { return rows.parts * col_blocks; }
  // Blocks of the same columns are consecutive: they read the same part of b.
  Block At(int64_t i) const {
    const int64_t row = i % rows.parts;
    const int64_t col = i / rows.parts * block_cols;
    return {rows.Begin(row), rows.Begin(row + 1), col, std::min(cols, col + block_cols)};
  }

  EvenCut rows;
  int64_t cols;
  int64_t block_cols;
  int64_t col_blocks;
};

// Scratch of one thread: a packed panel of b, the sums of its columns for each pending node, a
// converted strip, and the packed rows of a where they are copied. Each array is a multiple of 64
// bytes long.
struct Slot {
  template <typename T, typename TOut>
  Slot(float* data, const Problem<T, TOut>& problem)
      : panel(data),
        sums(panel + ShapeFor(problem).panel_cols * ShapeFor(problem).panel_depth),
        node(ShapeFor(problem).panel_cols * ShapeFor(problem).block_rows),
        pairs(sums + node * NodesOf(problem)),
        a(pairs + PairsOf(problem)) {}
  // Size in floats, also for RunBlock in the order of tiles.
  template <typename T, typename TOut>
  static int64_t Size(const Problem<T, TOut>& problem) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (problem.is_tile_order()) return TileSlot::Size(problem, kMaxBlockCols);
    }
    const Shape shape = ShapeFor(problem);
    return shape.panel_cols * (shape.panel_depth + shape.block_rows * NodesOf(problem)) +
           PairsOf(problem) + KeptWords(problem) * shape.block_rows;
  }
  template <typename T, typename TOut>
  static int64_t PairsOf(const Problem<T, TOut>& problem) {
    return UnpacksPairs(problem) ? 2 * kMaxTileCols * ShapeFor(problem).panel_depth : 0;
  }

  float* panel;
  float* sums;
  int64_t node;  // floats between the sums of two nodes
  float* pairs;  // a strip of the panel, if it is converted
  float* a;
};

// StripCols: columns of a strip of packed weights on this CPU. PackStrip packs one: columns (rows
// of memory) [0, cols) of `from` [cols, depth]; the rest of the strip is zeros. packed_weights.h
// has a picture.
int64_t StripCols();
template <typename T>
void PackStrip(MatrixView<const T> from, T* to);

// Computes one block of one problem with the best instructions of this CPU. `memory`: Slot::Size
// floats.
template <typename T, typename TOut>
void RunBlock(const Problem<T, TOut>& problem, const Block& block, float* memory);

}  // namespace moe::gemm

#endif  // MOE_KERNELS_GROUPED_GEMM_GEMM_BLOCKS_H_
