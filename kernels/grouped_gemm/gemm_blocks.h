// How the packed CPU path cuts a product, and what one piece of it needs. Internal.
#ifndef MOE_KERNELS_GROUPED_GEMM_GEMM_BLOCKS_H_
#define MOE_KERNELS_GROUPED_GEMM_GEMM_BLOCKS_H_

#include <algorithm>
#include <cstdint>

#include "kernels/base/dtype.h"
#include "kernels/grouped_gemm/gemm_problem.h"

namespace moe::gemm {

// Columns packed at a time, a multiple of every target's tile width; and the depth packed at a
// time. A packed panel, 64 x 512 float32 = 128 KiB, stays in a second-level cache while all rows
// of a block pass by it.
inline constexpr int64_t kPanelCols = 64;
inline constexpr int64_t kDepthBlock = 512;
// Rows of the register tile. 6 x 4 accumulators, 4 columns and a broadcast fill 32 registers;
// 6 x 2 fill 16.
inline constexpr int64_t kTileRows = 6;

// Rows that share one packed panel. More rows spread the cost of packing b further; the float32
// partial sums of a block (rows x 64) have to stay in cache as well.
inline constexpr int64_t kBlockRows = 512;
// With a transposed, its block (rows x 512) is packed too and shared by several panels, so that
// both copies are small beside the products.
inline constexpr int64_t kTransposedBlockRows = 192;
inline constexpr int64_t kTransposedBlockCols = 4 * kPanelCols;

// A rectangle of the output: what one thread computes in one go.
struct Block {
  int64_t row_begin = 0, row_end = 0;
  int64_t col_begin = 0, col_end = 0;
};

// `total` in parts of at most `most`, as even as possible; part i is [Begin(i), Begin(i + 1)).
struct EvenCut {
  EvenCut(int64_t whole, int64_t most) : total(whole), parts((whole + most - 1) / most) {}
  int64_t Begin(int64_t i) const { return total * i / parts; }
  int64_t total;
  int64_t parts;
};

// The blocks of one problem: rows cut evenly, columns in whole panels.
struct BlockGrid {
  BlockGrid(int64_t row_count, int64_t col_count, Layout a_layout)
      : rows(row_count, a_layout == Layout::kPlain ? kBlockRows : kTransposedBlockRows),
        cols(col_count),
        block_cols(a_layout == Layout::kPlain ? kPanelCols : kTransposedBlockCols),
        col_blocks((cols + block_cols - 1) / block_cols) {}

  int64_t size() const { return rows.parts * col_blocks; }
  // Blocks of the same columns follow each other: they read the same part of b.
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

// Scratch of one thread, in floats: a packed panel of b, partial sums of one panel, and the packed
// block of a transposed a.
struct Slot {
  static constexpr int64_t kPanel = kPanelCols * kDepthBlock;
  static constexpr int64_t kSums = kPanelCols * kBlockRows;
  static constexpr int64_t kA = kTransposedBlockRows * kDepthBlock;
  static constexpr int64_t Size(Layout a_layout) {
    return kPanel + kSums + (a_layout == Layout::kPlain ? 0 : kA);
  }
  float* panel() const { return data; }
  float* sums() const { return data + kPanel; }
  float* a() const { return data + kPanel + kSums; }

  float* data;
};

// Computes one block of one problem with the best instructions of this CPU.
void RunBlock(const Problem<float, float>& problem, const Block& block, Slot slot);
void RunBlock(const Problem<BFloat16, BFloat16>& problem, const Block& block, Slot slot);
void RunBlock(const Problem<BFloat16, float>& problem, const Block& block, Slot slot);

}  // namespace moe::gemm

#endif  // MOE_KERNELS_GROUPED_GEMM_GEMM_BLOCKS_H_
