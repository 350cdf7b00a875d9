// Nodes of a tree whose sums tell which order of additions made them.
#ifndef MOE_TESTS_COMM_TREE_SUMS_H_
#define MOE_TESTS_COMM_TREE_SUMS_H_

#include <cmath>
#include <cstdint>
#include <optional>

#include "kernels/base/tree_cut.h"

namespace moe::testing {

// A leaf's sum: magnitudes far enough apart that another order of additions has other bits.
inline float LeafSum(int leaf, int64_t row, int64_t col) {
  const auto mixed = static_cast<uint32_t>(leaf * 7919 + row * 104729 + col * 31) * 2654435761U;
  const float value = 1.0f + static_cast<float>(mixed >> 9) * 0x1p-23f;
  return std::ldexp(mixed % 2 == 0 ? value : -value, static_cast<int>(mixed >> 8 & 15) - 8);
}

// The node over leaves [first, last), from leaf to root.
inline std::optional<float> NodeSum(const TreeCut& cut, int first, int last, int64_t row,
                                    int64_t col) {
  if (cut.Begin(first) == cut.Begin(last)) return std::nullopt;
  if (last - first == 1) return LeafSum(first, row, col);
  const auto left = NodeSum(cut, first, (first + last) / 2, row, col);
  const auto right = NodeSum(cut, (first + last) / 2, last, row, col);
  return left && right ? *left + *right : left ? left : right;
}

}  // namespace moe::testing

#endif  // MOE_TESTS_COMM_TREE_SUMS_H_
