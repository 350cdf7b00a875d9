// Products whose reduced index ranks share: nodes of some of the leaves, folded, have the bits of
// one product over all, on every device of this build.
#include "kernels/grouped_gemm/fold_nodes.h"

#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "kernels/grouped_gemm/grouped_gemm.h"
#include "tests/kernels/gemm_test.h"
#include "tests/sanitizers.h"

namespace moe {
namespace {

using testing::DeviceMatrix;
using testing::kSanitized;
using testing::Matrix;
using testing::Mixed;
using testing::TestDevice;
using testing::Trees;
using testing::Unwritten;

TEST(LeavesOf, AreWholeEighthsInTheOrderOfRanks) {
  const auto begins = [](int ranks, int leaves) {
    std::vector<int> begin;
    for (int r = 0; r < ranks; ++r) {
      begin.push_back(LeavesOf(r, ranks, leaves).first);
      const int next = r + 1 < ranks ? LeavesOf(r + 1, ranks, leaves).first : leaves;
      EXPECT_EQ(LeavesOf(r, ranks, leaves).last, next);
    }
    return begin;
  };
  EXPECT_EQ(begins(3, 8), (std::vector<int>{0, 3, 6}));
  EXPECT_EQ(begins(3, 16), (std::vector<int>{0, 6, 12}));
  EXPECT_EQ(begins(8, 8), (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(begins(3, 2), (std::vector<int>{0, 1, 2}));  // the last has none
  EXPECT_EQ(NodesOf({8, 128, 16}, 1, 3).size(), 2);      // [3, 4) and [4, 6)
  EXPECT_EQ(NodesOf({8, 16, 16}, 0, 2).size(), 0);       // the one item is in leaf 7
}

// The columns, or rows, of a matrix that a rank holds.
template <typename T>
Matrix<T> SomeColumns(const Matrix<T>& m, const std::vector<int64_t>& columns) {
  Matrix<T> some(m.rows(), static_cast<int64_t>(columns.size()), testing::Padded(1));
  for (int64_t r = 0; r < m.rows(); ++r) {
    for (size_t c = 0; c < columns.size(); ++c) {
      some.at(r, static_cast<int64_t>(c)) = m.at(r, columns[c]);
    }
  }
  return some;
}
template <typename T>
Matrix<T> SomeRows(const Matrix<T>& m, const std::vector<int64_t>& rows) {
  Matrix<T> some(static_cast<int64_t>(rows.size()), m.cols(), testing::Padded(1));
  for (size_t r = 0; r < rows.size(); ++r) {
    for (int64_t c = 0; c < m.cols(); ++c) some.at(static_cast<int64_t>(r), c) = m.at(rows[r], c);
  }
  return some;
}

template <typename T>
class FoldNodesTest : public ::testing::Test {
 protected:
  // The values of a tree's index that leaves [held.first, held.last) have, part after part.
  static std::vector<int64_t> Held(const GemmTree& tree, const TreeNode& held) {
    std::vector<int64_t> values;
    for (int part = 0; part < tree.parts; ++part) {
      const int64_t times = tree.Times(part), begin = tree.Begin(part);
      const int64_t end = begin + times * tree.cut.Begin(held.last);
      for (int64_t k = begin + times * tree.cut.Begin(held.first); k < end; ++k) {
        values.push_back(k);
      }
    }
    return values;
  }

  // `product(values, tree, out)` is a product of the values with these numbers.
  template <typename Product>
  static void Check(const TestDevice& device, const GemmTree& tree, int ranks, int64_t rows,
                    int64_t cols, Product product) {
    SCOPED_TRACE(absl::StrCat(ranks, " ranks, ", tree.cut.leaves, " leaves of ", tree.cut.extent,
                              ", ", rows, " rows"));
    const Matrix<T> unwritten = Unwritten<T>(rows, cols, 1);
    const auto want = device.Copy(unwritten), got = device.Copy(unwritten);
    ASSERT_OK(product(Held(tree, {0, tree.cut.leaves}), tree, want.view()));
    std::vector<TreeNode> at;
    std::vector<MatrixView<const float>> views;
    std::vector<DeviceMatrix<float>> of_ranks;
    for (int r = 0; r < ranks; ++r) {
      const TreeNode held = LeavesOf(r, ranks, tree.cut.leaves);
      const TreeNodes nodes = NodesOf(tree.cut, r, ranks);
      const auto count = static_cast<int64_t>(nodes.size());
      of_ranks.push_back(device.Copy(Unwritten<float>(rows, count * cols)));
      for (int64_t j = 0; j < count; ++j) {
        const TreeNode& node = nodes[static_cast<size_t>(j)];
        const GemmTree here = {tree.cut.PartOf(held, node), tree.parts, tree.first_times};
        const auto out = ColumnRange(of_ranks.back().view(), j * cols, (j + 1) * cols);
        ASSERT_OK(product(Held(tree, held), here, out));
        at.push_back(node);
        views.emplace_back(out);
      }
    }
    ASSERT_OK(FoldNodes<T>(tree.cut.leaves, at, views, got.view(), device.stream()));
    EXPECT_TRUE(SameBits(device.Read(got), device.Read(want)));
  }
  static void CheckForward(const TestDevice& device, const Trees& trees, int ranks, int64_t rows,
                           int64_t depth) {
    const auto x = Mixed<T>(rows, depth, 1, 1), w = Mixed<T>(19, depth, 0, 2);
    Workspace workspace(device.memory());
    Check(device, trees.Of(depth), ranks, rows, 19,
          [&]<typename TOut>(const auto& values, const GemmTree& tree, MatrixView<TOut> y) {
            const auto some_x = device.Copy(SomeColumns(x, values));
            const auto some_w = device.Copy(SomeColumns(w, values));
            MOE_RETURN_IF_ERROR((Gemm<T, TOut>(some_x.view(), some_w.view(), y, workspace,
                                               device.stream(), {}, tree)));
            return device.stream().Synchronize();
          });
  }
  static void CheckInputGradient(const TestDevice& device, const Trees& trees, int ranks,
                                 int64_t rows, int64_t depth) {
    const auto dy = Mixed<T>(rows, depth, 1, 3), w = Mixed<T>(depth, 70, 0, 4);
    Workspace workspace(device.memory());
    Check(device, trees.Of(depth), ranks, rows, 70,
          [&]<typename TOut>(const auto& values, const GemmTree& tree, MatrixView<TOut> dx) {
            const auto some_dy = device.Copy(SomeColumns(dy, values));
            const auto some_w = device.Copy(SomeRows(w, values));
            MOE_RETURN_IF_ERROR((GemmInputGradient<T, TOut>(some_dy.view(), some_w.view(), dx,
                                                            workspace, device.stream(), {}, tree)));
            return device.stream().Synchronize();
          });
  }
};

using StorageTypes = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(FoldNodesTest, StorageTypes);

TYPED_TEST(FoldNodesTest, RanksThatShareAnIndexHaveTheBitsOfOne) {
  // Several panels; fewer items than leaves; an odd number of items, of which pairs are parted.
  constexpr int64_t kDepths[] = {kSanitized ? 200 : 1300, 40, 177};
  for (const auto& device : testing::TestDevices()) {
    const bool cpu = device->is_cpu();
    SCOPED_TRACE(device->name());
    for (int leaves = 1; leaves <= kMaxTreeLeaves; leaves *= 2) {
      for (int ranks = 1; ranks <= std::min(leaves, kMostTreeRanks); ++ranks) {
        if (!cpu && (leaves + ranks) % 3 != 0) continue;  // a matter of kernels, not of numbers
        const int64_t depth = kDepths[ranks % 3], item = depth == 177 ? 3 : 16;
        const auto shallow = cpu ? depth : std::min<int64_t>(depth, 330);
        this->CheckForward(*device, {.leaves = leaves, .item = item}, ranks, 5, shallow);
        this->CheckInputGradient(*device, {.leaves = leaves, .item = item}, ranks, 40, shallow);
        this->CheckInputGradient(*device,
                                 {.leaves = leaves, .item = item, .parts = 3, .first_times = 2},
                                 ranks, 40, cpu ? 4 * depth : 4 * 64);
        this->CheckInputGradient(*device, {.leaves = leaves, .item = 5, .parts = 2}, ranks, 3,
                                 cpu ? 2 * depth : 2 * 40);
      }
    }
  }
}

TEST(FoldNodes, RefusesWhatIsNoTree) {
  const auto stream = MakeInlineStream();
  Matrix<float> out(1, 1, testing::Padded(0)), node = out;
  const std::vector<MatrixView<const float>> nodes = {node.view(), node.view()};
  const auto fold = [&](int leaves, const std::vector<TreeNode>& at) {
    return std::string(FoldNodes<float>(leaves, at, nodes, out.view(), *stream).message());
  };
  EXPECT_EQ(fold(4, {{0, 2}, {2, 4}}), "");
  EXPECT_EQ(fold(4, {{0, 1}, {3, 4}}), "");  // leaves between them are empty
  EXPECT_TRUE(absl::StrContains(fold(4, {{2, 4}, {0, 2}}), "ascending"));
  EXPECT_TRUE(absl::StrContains(fold(4, {{0, 1}, {1, 3}}), "subtrees"));
  EXPECT_TRUE(absl::StrContains(fold(2, {{0, 2}, {2, 4}}), "of 2 leaves"));
  EXPECT_TRUE(absl::StrContains(fold(4, {{0, 4}}), "[2]"));
}

}  // namespace
}  // namespace moe
