// Sums over an index that ranks may share: balanced binary trees over a fixed cut of the index, so
// that the same nodes are added whatever leaves a rank holds.
#ifndef MOE_KERNELS_BASE_TREE_CUT_H_
#define MOE_KERNELS_BASE_TREE_CUT_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace moe {

// Most leaves of a tree; their number is a power of two.
inline constexpr int kMaxTreeLeaves = 16;

constexpr bool IsTreeLeaves(int leaves) {
  return leaves >= 1 && leaves <= kMaxTreeLeaves && (leaves & (leaves - 1)) == 0;
}

// The subtree over leaves [first, last): their number is a power of two that divides `first`.
struct TreeNode {
  int first = 0, last = 0;
};

// An index of `extent` values in items of `item` values, the last one perhaps smaller, none of
// which is split: leaf s of S has items [n s / S, n (s + 1) / S) of n. Leaves may be empty.
struct TreeCut {
  int leaves = 1;
  int64_t extent = 0;
  int64_t item = 1;

  // Where a rank holds some leaves of a larger cut (PartOf): the leaves and the extent of that, its
  // leaf at which the rank's values begin, and its leaf that is leaf 0 here.
  int all_leaves = 0;  // 0: all are here
  int64_t all_extent = 0;
  int held = 0, first = 0;

  // First value of a leaf, for leaf = leaves the end of the last; of all leaves it is the extent.
  constexpr int64_t Begin(int leaf) const {
    if (all_leaves == 0) return At(leaf, leaves, extent);
    return At(first + leaf, all_leaves, all_extent) - At(held, all_leaves, all_extent);
  }
  // An upper bound of the values in `count` neighbouring leaves.
  constexpr int64_t MostValues(int count) const {
    const int of = all_leaves == 0 ? leaves : all_leaves;
    return (Items(all_leaves == 0 ? extent : all_extent) * count + of - 1) / of * item;
  }
  bool operator==(const TreeCut&) const = default;
  // Whether sums are nodes of a tree, which one leaf of several is, too.
  constexpr bool IsTree() const { return leaves > 1 || all_leaves > 1; }
  constexpr bool IsEmpty(const TreeNode& node) const {
    return Begin(node.first) == Begin(node.last);
  }
  // How many nodes of more than `over` and up to `most` leaves have two children that are not
  // empty, and end with leaf s.
  constexpr int Folds(int s, int over, int most) const {
    int folds = 0;
    for (int size = 2; size <= most; size *= 2) {
      const int begin = s / size * size, middle = begin + size / 2;
      if (Begin(s + 1) < Begin(begin + size)) break;
      folds += size > over && s >= middle && Begin(begin) < Begin(middle) ? 1 : 0;
    }
    return folds;
  }
  // The leaves of `node`, of which an index has leaves [here.first, here.last) alone.
  constexpr TreeCut PartOf(const TreeNode& here, const TreeNode& node) const {
    return {.leaves = node.last - node.first,
            .extent = Begin(here.last) - Begin(here.first),
            .item = item,
            .all_leaves = leaves,
            .all_extent = extent,
            .held = here.first,
            .first = node.first};
  }

 private:
  constexpr int64_t Items(int64_t values) const { return (values + item - 1) / item; }
  constexpr int64_t At(int leaf, int of, int64_t values) const {
    return std::min(values, Items(values) * leaf / of * item);
  }
};

// Nodes of a tree in ascending order: as many as have contiguous leaves, or fewer.
class TreeNodes {
 public:
  constexpr void push_back(const TreeNode& node) { nodes_[size_++] = node; }
  constexpr size_t size() const { return size_; }
  constexpr const TreeNode& operator[](size_t i) const { return nodes_[i]; }
  constexpr const TreeNode* begin() const { return nodes_.data(); }
  constexpr const TreeNode* end() const { return nodes_.data() + size_; }

 private:
  std::array<TreeNode, 6> nodes_ = {};  // leaves [1, 15) of 16: 1, 2, 4, 4, 2, 1
  size_t size_ = 0;
};

// The fewest nodes that together have exactly the leaves [first, last) of a tree, in order.
constexpr TreeNodes LargestNodes(int first, int last) {
  TreeNodes nodes;
  while (first < last) {
    int size = 1;
    while (first % (2 * size) == 0 && first + 2 * size <= last) size *= 2;
    nodes.push_back({first, first + size});
    first += size;
  }
  return nodes;
}

// Most ranks that share an index: they hold whole eighths of it, by which tensors are hashed and
// stored, too (UnitGrid).
inline constexpr int kMostTreeRanks = 8;

// The leaves that rank `index` of `ranks` holds, contiguous and ascending with the rank, as even as
// whole eighths allow. Of fewer leaves than ranks some hold none.
constexpr TreeNode LeavesOf(int index, int ranks, int leaves) {
  const int shares = std::min(leaves, kMostTreeRanks), each = leaves / shares;
  // Rounded up: of six heads three ranks then hold two each, and not one, two and three.
  const auto begin = [&](int rank) {
    return (shares * rank + ranks - 1) / ranks * each;
  };
  return {begin(index), begin(index + 1)};
}

// The nodes, none empty, whose sums rank `index` of `ranks` contributes to a tree's.
constexpr TreeNodes NodesOf(const TreeCut& cut, int index, int ranks) {
  TreeNodes nodes;
  const TreeNode held = LeavesOf(index, ranks, cut.leaves);
  for (const TreeNode& node : LargestNodes(held.first, held.last)) {
    if (!cut.IsEmpty(node)) nodes.push_back(node);
  }
  return nodes;
}

}  // namespace moe

#endif  // MOE_KERNELS_BASE_TREE_CUT_H_
