// Products of bfloat16 in the order of tiles (grouped_gemm.h): formats of packed operands, and how
// a product is cut. Internal.
#ifndef MOE_KERNELS_GROUPED_GEMM_GEMM_TILE_ORDER_H_
#define MOE_KERNELS_GROUPED_GEMM_GEMM_TILE_ORDER_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <type_traits>

#include <absl/types/span.h>

#include "kernels/base/dtype.h"
#include "kernels/grouped_gemm/gemm_pieces.h"
#include "kernels/grouped_gemm/gemm_problem.h"

namespace moe::gemm {

// A tile is 1 KiB: kTerms terms of kTileSide rows of the left operand or columns of the right one.
// One instruction multiplies two tiles, and adds to 16 x 16 sums.
//   left    term t of row i at [i * 32 + t]
//   right   term t of column j at [t / 2 * 32 + 2 * j + t % 2]
// A step is kTerms terms of a strip of one or two tiles, a strip is its steps one after the other:
// step s of tile h at [(s * tiles + h) * kTileElements]. Zeros fill up rows, columns and terms.
// Packed weights are right strips, always of two tiles.
inline constexpr int64_t kTileSide = 16;
inline constexpr int64_t kTerms = 32;
inline constexpr int64_t kTileElements = kTileSide * kTerms;
inline constexpr int64_t kStripSide = 2 * kTileSide;
constexpr int64_t StepsOf(int64_t terms) {
  return (terms + kTerms - 1) / kTerms;
}
constexpr int64_t TilesOf(int64_t side) {
  return side > kTileSide ? 2 : 1;
}
constexpr int64_t StripsOf(int64_t side) {
  return (side + kStripSide - 1) / kStripSide;
}
// Index of term t of column j in a right strip of two tiles.
constexpr int64_t RightIndex(int64_t t, int64_t j) {
  const int64_t tile = t / kTerms * 2 + j / kTileSide;
  return tile * kTileElements + t % kTerms / 2 * kTerms + j % kTileSide * 2 + t % 2;
}

// Sums of one strip by another, 4 KiB: row i of the left one, column j of the right one at
// [i * kStripSide + j].
inline constexpr int64_t kStripSums = kStripSide * kStripSide;

// sums (+)= left * right over `steps` steps. Sums beyond the strips' tiles are unspecified. Row i
// of tile h of step s of the left operand is at left + s * left_step + h * left_tile + i *
// left_row: packed, or in place.
struct StripProduct {
  void SetPackedLeft(const BFloat16* packed, int64_t tiles) {
    left = packed;
    left_tiles = tiles;
    left_row = kTerms;
    left_tile = kTileElements;
    left_step = tiles * kTileElements;
  }

  const BFloat16* left;
  int64_t left_row, left_tile, left_step;
  const BFloat16* right;
  int64_t left_tiles, right_tiles;
  int64_t steps;
  float* sums;
  bool continues;  // from `sums`; else from +0
};

// Terms [k, k + terms) of the depth, which begin a step.
struct TermRun {
  int64_t k, terms;
  int64_t step;  // of the depth block
};
// Steps that belong to one sum.
struct SumSteps {
  int64_t steps;
  int folds;  // how many pending sums are then added to it, the latest first
};

// A part of the depth that is packed at a time: of one sum, or all leaves of a tree.
struct DepthBlock {
  absl::Span<const TermRun> terms() const { return {run.data(), runs}; }
  absl::Span<const SumSteps> sums() const { return {sum.data(), count}; }

  std::array<TermRun, kMaxTreeLeaves * GemmTree::kMaxParts> run;
  size_t runs = 0;
  std::array<SumSteps, kMaxTreeLeaves> sum;
  size_t count = 0;
  int64_t steps = 0;
  int64_t steps_before = 0;        // of its sum
  bool first = true, last = true;  // of its sum
  int64_t segment = 0;
};

// The most steps of a depth block, except for trees: a strip of 64 KiB. With 2,816 terms at a time
// input gradients take twice as long.
inline constexpr int64_t kMostSteps = 32;
// Packed rows of a block, half of a second-level cache: b is read once for as many. Strips of b
// that are packed at a time are fewer, because the first ones of a block are not prefetched.
inline constexpr int64_t kKeptBytes = int64_t{1} << 20;
inline constexpr int64_t kMostKeptRows = 512;
inline constexpr int64_t kPanelBytes = int64_t{128} << 10;
inline constexpr int64_t kMostPanels = 8;

// Whether b is the left operand: rows of weights are then copied as they are, and the fewer rows of
// a are transposed. Sums come out transposed, too.
template <typename TOut>
constexpr bool IsLeft(const Problem<BFloat16, TOut>& problem) {
  return problem.b_layout == Layout::kTransposed;
}

// Steps of a packed operand whose whole depth is one block: each run of a tree begins a step.
constexpr int64_t TreeSteps(const GemmTree& tree, int64_t depth) {
  if (!tree.cut.IsTree()) return StepsOf(depth);
  int64_t steps = 0;
  for (int s = 0; s < tree.cut.leaves; ++s) {
    const int64_t values = tree.cut.Begin(s + 1) - tree.cut.Begin(s);
    for (int part = 0; part < tree.parts; ++part) steps += StepsOf(tree.Times(part) * values);
  }
  return steps;
}

// The depth of a product, block by block.
class DepthBlocks {
 public:
  template <typename TOut>
  explicit DepthBlocks(const Problem<BFloat16, TOut>& problem)
      : tree_(problem.tree),
        is_tree_(problem.is_tree()),
        segments_(problem.exact.segments),
        depth_(problem.depth()) {}

  // Upper bound of the steps of a block.
  int64_t steps() const {
    return is_tree_ ? TreeSteps(tree_, depth_) : std::min(kMostSteps, StepsOf(depth_));
  }
  // Whether sums are stored between blocks.
  bool cuts_sums() const { return !is_tree_ && StepsOf(depth_) > kMostSteps; }

  // Calls run(block) for each in ascending order.
  template <class Run>
  void ForEach(const Run& run) const {
    if (is_tree_) return run(OfTree());
    const auto segments = std::max<int64_t>(1, std::ssize(segments_) - 1);
    for (int64_t s = 0; s < segments; ++s) {
      const int64_t begin = segments_.empty() ? 0 : segments_[static_cast<size_t>(s)];
      const int64_t end = segments_.empty() ? depth_ : segments_[static_cast<size_t>(s) + 1];
      const int64_t steps = StepsOf(end - begin);
      const int64_t blocks = std::max<int64_t>(1, (steps + kMostSteps - 1) / kMostSteps);
      for (int64_t i = 0; i < blocks; ++i) {
        const int64_t from = steps * i / blocks, to = steps * (i + 1) / blocks;
        DepthBlock block;
        block.run[block.runs++] = {begin + from * kTerms,
                                   std::min(end - begin, to * kTerms) - from * kTerms, 0};
        block.sum[block.count++] = {to - from, 0};
        block.steps = to - from;
        block.steps_before = from;
        block.first = i == 0;
        block.last = i + 1 == blocks;
        block.segment = s;
        run(block);
      }
    }
  }

 private:
  DepthBlock OfTree() const {
    DepthBlock block;
    const TreeCut& cut = tree_.cut;
    for (int s = 0; s < cut.leaves; ++s) {
      const int64_t begin = cut.Begin(s), values = cut.Begin(s + 1) - begin;
      if (values == 0) continue;
      const int64_t before = block.steps;
      for (int part = 0; part < tree_.parts; ++part) {
        const int64_t times = tree_.Times(part);
        block.run[block.runs++] = {tree_.Begin(part) + times * begin, times * values, block.steps};
        block.steps += StepsOf(times * values);
      }
      block.sum[block.count++] = {block.steps - before, cut.Folds(s, 1, cut.leaves)};
    }
    if (block.count == 0) block.sum[block.count++] = {0, 0};
    return block;
  }

  GemmTree tree_;
  bool is_tree_;
  absl::Span<const int64_t> segments_;
  int64_t depth_;
};

// Bytes of a packed row or column, at most.
template <typename TOut>
int64_t SideBytes(const Problem<BFloat16, TOut>& problem) {
  return std::max<int64_t>(1, DepthBlocks(problem).steps()) * kTerms * int64_t{sizeof(BFloat16)};
}
// Rows of a block: as many as are packed within kKeptBytes.
template <typename TOut>
int64_t BlockRows(const Problem<BFloat16, TOut>& problem) {
  const int64_t rows = kKeptBytes / SideBytes(problem) / kStripSide * kStripSide;
  const int64_t all = StripsOf(problem.c.rows()) * kStripSide;
  const int64_t most = std::clamp(all, kStripSide, kMostKeptRows);
  return std::clamp(rows, kStripSide, most);
}
// Strips of b that are packed at a time: several where terms are rows, whose neighbouring columns
// are then read together.
template <typename TOut>
int64_t PanelsAtOnce(const Problem<BFloat16, TOut>& problem) {
  if (problem.b_layout != Layout::kPlain) return 1;
  const int64_t most = std::clamp<int64_t>(StripsOf(problem.c.cols()), 1, kMostPanels);
  return std::clamp<int64_t>(kPanelBytes / (kStripSide * SideBytes(problem)), 1, most);
}

// Scratch of one thread. Each array is a multiple of 64 bytes long.
struct TileSlot {
  template <typename TOut>
  TileSlot(float* memory, const Problem<BFloat16, TOut>& problem) {
    const DepthBlocks depth(problem);
    kept = reinterpret_cast<BFloat16*>(memory);
    memory += BlockRows(problem) * depth.steps() * kTerms / 2;
    panel = reinterpret_cast<BFloat16*>(memory);
    memory += PanelsAtOnce(problem) * kStripSide * depth.steps() * kTerms / 2;
    transposed = memory;
    pending = transposed + kStripSums;
    sums = pending + kMaxWaiting * kStripSums;
  }
  // Size in floats, for blocks of at most `cols` columns.
  template <typename TOut>
  static int64_t Size(const Problem<BFloat16, TOut>& problem, int64_t cols) {
    const DepthBlocks depth(problem);
    const int64_t rows = BlockRows(problem);
    cols = std::min(cols, problem.c.cols());
    const int64_t strips = depth.cuts_sums() ? StripsOf(rows) * StripsOf(cols) : 1;
    return (rows + PanelsAtOnce(problem) * kStripSide) * depth.steps() * kTerms / 2 +
           (1 + kMaxWaiting + strips) * kStripSums;
  }

  BFloat16* kept;     // strips of the block's rows of a
  BFloat16* panel;    // PanelsAtOnce strips of b
  float* transposed;  // sums that come out transposed
  float* pending;     // sums of leaves
  float* sums;        // of each strip of the block, or of one
};

// Packs the rows of `from` [1 to 16 tiles, depth], whose terms are contiguous, as a left strip: row
// by row, as memory prefetches.
inline void PackLeftStrip(MatrixView<const BFloat16> from, absl::Span<const TermRun> runs,
                          int64_t tiles, BFloat16* to) {
  for (const TermRun& run : runs) {
    for (int64_t i = 0; i < tiles * kTileSide; ++i) {
      const BFloat16* const row = from.row(std::min(i, from.rows() - 1)) + run.k;
      BFloat16* line = to + run.step * tiles * kTileElements + i * kTerms;
      for (int64_t t = 0; t < run.terms; t += kTerms, line += tiles * kTileElements) {
        const int64_t terms = i < from.rows() ? std::min(kTerms, run.terms - t) : 0;
        if (terms == kTerms) {
          std::memcpy(line, row + t, kTerms * sizeof(BFloat16));
        } else {
          std::fill(std::copy_n(row + t, terms, line), line + kTerms, BFloat16());
        }
      }
    }
  }
}

// A strip of packed weights, rows of `from` [rows <= kStripSide, depth], as the right operand of
// products with that tree. `to`: kStripSide * TreeSteps * kTerms elements.
void PackTileStrip(MatrixView<const BFloat16> from, const GemmTree& tree, BFloat16* to);

struct Block;  // gemm_blocks.h

// Computes one block of one problem in the order of tiles. `memory`: for TileSlot. Needs fused
// multiply-add.
template <typename TOut>
void RunTileBlock(const Problem<BFloat16, TOut>& problem, const Block& block, float* memory);

}  // namespace moe::gemm

#endif  // MOE_KERNELS_GROUPED_GEMM_GEMM_TILE_ORDER_H_
