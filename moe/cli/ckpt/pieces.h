// Reads a tensor of a checkpoint in boxes, so that it need not fit into memory.
#ifndef MOE_MOE_CLI_CKPT_PIECES_H_
#define MOE_MOE_CLI_CKPT_PIECES_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "moe/checkpoint/manifest.h"
#include "moe/state/canonical_tensor.h"

namespace moe::ckpt {

// Boxes of at most a million elements that are consecutive in the tensor, row-major.
inline std::vector<TensorBox> PiecesOf(const ManifestTensor& tensor) {
  constexpr int64_t kMostElements = int64_t{1} << 20;
  const int64_t cols = std::min(tensor.cols, kMostElements);
  const int64_t rows = kMostElements / cols;  // 1 if rows are cut
  std::vector<TensorBox> pieces;
  for (int64_t row = 0; row < tensor.rows; row += rows) {
    for (int64_t col = 0; col < tensor.cols; col += cols) {
      pieces.push_back({.row_begin = row,
                        .row_end = std::min(row + rows, tensor.rows),
                        .col_begin = col,
                        .col_end = std::min(col + cols, tensor.cols)});
    }
  }
  return pieces;
}

}  // namespace moe::ckpt

#endif  // MOE_MOE_CLI_CKPT_PIECES_H_
