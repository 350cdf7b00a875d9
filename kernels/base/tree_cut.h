// Sums over an index that ranks may share: balanced binary trees over a fixed cut of the index, so
// that the same nodes are added whatever leaves a rank holds.
#ifndef MOE_KERNELS_BASE_TREE_CUT_H_
#define MOE_KERNELS_BASE_TREE_CUT_H_

#include <algorithm>
#include <cstdint>

#include <absl/container/inlined_vector.h>

namespace moe {

// Most leaves of a tree; their number is a power of two.
inline constexpr int kMaxTreeLeaves = 16;

constexpr bool IsTreeLeaves(int leaves) {
  return leaves >= 1 && leaves <= kMaxTreeLeaves && (leaves & (leaves - 1)) == 0;
}

// An index of `extent` values in items of `item` values, the last one perhaps smaller, none of
// which is split: leaf s of S has items [n s / S, n (s + 1) / S) of n. Leaves may be empty.
struct TreeCut {
  int leaves = 1;
  int64_t extent = 0;
  int64_t item = 1;

  // First value of a leaf, the extent for leaf = leaves.
  constexpr int64_t Begin(int leaf) const {
    const int64_t items = (extent + item - 1) / item;
    return std::min(extent, items * leaf / leaves * item);
  }
};

// The subtree over leaves [first, last): their number is a power of two that divides `first`.
struct TreeNode {
  int first = 0, last = 0;
};

// The fewest nodes that together have exactly the leaves [first, last) of a tree, in order.
inline absl::InlinedVector<TreeNode, 6> LargestNodes(int first, int last) {
  absl::InlinedVector<TreeNode, 6> nodes;
  while (first < last) {
    int size = 1;
    while (first % (2 * size) == 0 && first + 2 * size <= last) size *= 2;
    nodes.push_back({first, first + size});
    first += size;
  }
  return nodes;
}

}  // namespace moe

#endif  // MOE_KERNELS_BASE_TREE_CUT_H_
