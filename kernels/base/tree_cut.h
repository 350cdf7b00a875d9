// Sums over an index that ranks may share: balanced binary trees over a fixed cut of the index, so
// that whatever leaves a rank has, the same nodes are added.
#ifndef MOE_KERNELS_BASE_TREE_CUT_H_
#define MOE_KERNELS_BASE_TREE_CUT_H_

#include <algorithm>
#include <cstdint>

#include <absl/container/inlined_vector.h>

namespace moe {

// Leaves of a tree are a power of two up to this.
inline constexpr int kMaxTreeLeaves = 16;

constexpr bool IsTreeLeaves(int leaves) {
  return leaves >= 1 && leaves <= kMaxTreeLeaves && (leaves & (leaves - 1)) == 0;
}

// An index of `extent` values in items of `item`, the last one perhaps smaller, none of which is
// parted: leaf s of S has items [n s / S, n (s + 1) / S) of n. Leaves may be empty.
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

// Leaves [first, last), a subtree: a power of two of them, at a multiple of it.
struct TreeNode {
  int first = 0, last = 0;
};

// The nodes, in order, that have exactly the leaves [first, last) of a tree, as few as possible.
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
