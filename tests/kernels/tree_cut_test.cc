// The cut of an index into leaves, and subtrees of them.
#include "kernels/base/tree_cut.h"

#include <optional>
#include <vector>

#include <gtest/gtest.h>

namespace moe {
namespace {

TEST(TreeCut, KeepsItemsWholeAndSpreadsThemOverLeaves) {
  const TreeCut cut = {.leaves = 8, .extent = 70, .item = 16};  // items 0..4, the last of 6
  const std::vector<int64_t> begins = {0, 0, 16, 16, 32, 48, 48, 64, 70};
  for (int s = 0; s <= 8; ++s) EXPECT_EQ(cut.Begin(s), begins[s]) << s;
  EXPECT_EQ((TreeCut{.leaves = 4, .extent = 0, .item = 3}.Begin(4)), 0);
}

// Sums that differ in bits when they are folded in another order, and leaves that are empty.
std::optional<float> Leaf(int s) {
  if (s % 5 == 3) return std::nullopt;
  return 1.0f / static_cast<float>(s + 1);
}

// The node over [first, last), from values that are there or from its halves.
std::optional<float> Fold(int first, int last,
                          const std::vector<std::pair<TreeNode, std::optional<float>>>& there) {
  for (const auto& [node, value] : there) {
    if (node.first == first && node.last == last) return value;
  }
  if (last - first == 1) {
    ADD_FAILURE() << "leaf " << first << " is in no node";
    return std::nullopt;
  }
  const auto left = Fold(first, (first + last) / 2, there);
  const auto right = Fold((first + last) / 2, last, there);
  return left && right ? *left + *right : left ? left : right;
}

TEST(LargestNodes, CoverAnyRangeWithAlignedSubtrees) {
  for (int first = 0; first <= kMaxTreeLeaves; ++first) {
    for (int last = first; last <= kMaxTreeLeaves; ++last) {
      int next = first, previous = 0;
      bool smaller = false;
      for (const TreeNode& node : LargestNodes(first, last)) {
        const int size = node.last - node.first;
        EXPECT_EQ(node.first, next);
        EXPECT_TRUE(IsTreeLeaves(size) && node.first % size == 0) << first << ' ' << last;
        // As few as possible: sizes grow, then fall.
        EXPECT_TRUE(size > previous ? !smaller : size < previous || !smaller);
        smaller = smaller || size <= previous;
        next = node.last, previous = size;
      }
      EXPECT_EQ(next, last);
    }
  }
}

TEST(LargestNodes, FoldToTheSameRootForAnyPartition) {
  std::vector<std::pair<TreeNode, std::optional<float>>> leaves;
  for (int s = 0; s < kMaxTreeLeaves; ++s) leaves.push_back({{s, s + 1}, Leaf(s)});
  const auto root = Fold(0, kMaxTreeLeaves, leaves);
  float chain = 0;
  for (int s = 0; s < kMaxTreeLeaves; ++s) chain += Leaf(s).value_or(0.0f);
  ASSERT_NE(*root, chain);
  for (int a = 0; a <= kMaxTreeLeaves; ++a) {
    for (int b = a; b <= kMaxTreeLeaves; ++b) {
      std::vector<std::pair<TreeNode, std::optional<float>>> there;
      const int cuts[] = {0, a, b, kMaxTreeLeaves};
      for (int rank = 0; rank < 3; ++rank) {
        for (const TreeNode& node : LargestNodes(cuts[rank], cuts[rank + 1])) {
          there.push_back({node, Fold(node.first, node.last, leaves)});
        }
      }
      EXPECT_EQ(Fold(0, kMaxTreeLeaves, there), root) << a << ' ' << b;
    }
  }
}

}  // namespace
}  // namespace moe
