// Tensors as files, hashes and other frameworks see them, whatever rank or memory holds them.
#ifndef MOE_MOE_STATE_CANONICAL_TENSOR_H_
#define MOE_MOE_STATE_CANONICAL_TENSOR_H_

#include <algorithm>
#include <cstdint>
#include <string>

namespace moe {

// The index that tensor parallelism cuts.
enum class TensorAxis : uint8_t { kNone, kRows, kColumns };

// Rows (columns) of a feed-forward network or of an output layer that are never parted.
inline constexpr int64_t kCutItem = 16;

// Rows [row_begin, row_end) x columns [col_begin, col_end).
struct TensorBox {
  int64_t row_begin = 0, row_end = 0, col_begin = 0, col_end = 0;
  int64_t rows() const { return row_end - row_begin; }
  int64_t cols() const { return col_end - col_begin; }
  int64_t size() const { return rows() * cols(); }
};
// What is in both; rows or columns below 1 where nothing is.
inline TensorBox Common(const TensorBox& a, const TensorBox& b) {
  return {std::max(a.row_begin, b.row_begin), std::min(a.row_end, b.row_end),
          std::max(a.col_begin, b.col_begin), std::min(a.col_end, b.col_end)};
}

struct CanonicalTensor {
  std::string name = {};  // "model.layers.3.self_attn.q_proj.weight"
  int64_t rows = 1, cols = 1;
  TensorAxis axis = TensorAxis::kNone;
  int64_t item = 1;  // rows (columns) that stay together: a head's width, else kCutItem
  int64_t size() const { return rows * cols; }
  TensorBox box() const { return {0, rows, 0, cols}; }
};

}  // namespace moe

#endif  // MOE_MOE_STATE_CANONICAL_TENSOR_H_
