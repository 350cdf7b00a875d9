// Products as trees, on every device of this build: float32 has the bits of the specification,
// leaves of 16-bit types those of products of their terms alone.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/grouped_gemm/grouped_gemm.h"
#include "tests/kernels/device_memory.h"
#include "tests/kernels/gemm_test.h"

namespace moe::testing {
namespace {

template <typename T>
class DeviceTreeTest : public ::testing::Test {
 protected:
  static constexpr bool kIsFloat = std::is_same_v<T, float>;

  // Both directions of all groups.
  void CheckGroups(const std::vector<int64_t>& rows, int64_t out, int64_t in, const Trees& trees,
                   const Layouts& layouts = kAligned) {
    const Groups<T> groups(rows, out, in, layouts.weight);
    Check(groups, true, trees.Of(in), layouts);
    Check(groups, false, trees.Of(out), layouts);
  }

  std::vector<Path> paths_ = Paths();

 private:
  void Check(const Groups<T>& groups, bool forward, const GemmTree& tree, const Layouts& layouts) {
    const int64_t depth = tree.Begin(tree.parts), rows = groups.total();
    const Matrix<T>& weight = groups.weight[0];
    const int64_t cols = forward ? weight.rows() : weight.cols();
    const auto x = Mixed<T>(rows, depth, layouts.in, 1);
    for (const Path& path : paths_) {
      const TestDevice& device = *path.device;
      // The CPU's products of 16-bit types have suites of their own; cuBLAS has no trees.
      if ((device.is_cpu() && !kIsFloat) || path.cublas != nullptr) continue;
      SCOPED_TRACE(path.name() << ", " << rows << " rows, " << depth << " to " << cols << ", "
                               << tree.cut.leaves << " leaves, " << tree.parts << " parts of "
                               << tree.cut.extent << " by " << tree.cut.item);
      const auto want = Wanted(device, x, groups, forward, tree);
      const auto got = Product<float>(device, x, groups, forward, tree, layouts.out);
      EXPECT_TRUE(SameBits(got, want));
      const auto rounded = Product<T>(device, x, groups, forward, tree, layouts.out);
      EXPECT_TRUE(SameBits(rounded, want.template As<T>()));
    }
  }

  template <typename TOut>
  static Matrix<TOut> Product(const TestDevice& device, const Matrix<T>& x, const Groups<T>& groups,
                              bool forward, const GemmTree& tree, MatrixLayout layout) {
    Workspace workspace(device.memory());
    const auto weights = WeightsOn(device, groups);
    const auto there = device.Copy(x);
    const int64_t cols = forward ? groups.weight[0].rows() : groups.weight[0].cols();
    const auto y = device.Copy(Matrix<TOut>(x.rows(), cols, layout, kNaN));
    EXPECT_OK((forward ? GroupedGemm<T, TOut>
                       : GroupedGemmInputGradient<T, TOut>)(there.view(), groups.offsets,
                                                            weights.views, y.view(), workspace,
                                                            device.stream(), {}, tree));
    return device.Read(y);
  }

  // The root, in float32.
  static Matrix<float> Wanted(const TestDevice& device, const Matrix<T>& x, const Groups<T>& groups,
                              bool forward, const GemmTree& tree) {
    if constexpr (kIsFloat) {
      return Expected<float, float>(x, groups, forward, 0, tree);
    } else {
      const auto node = Node(device, x, groups, forward, tree, 0, tree.cut.leaves);
      const int64_t cols = forward ? groups.weight[0].rows() : groups.weight[0].cols();
      return node ? *node : Matrix<float>(x.rows(), cols);
    }
  }

  static std::optional<Matrix<float>> Node(const TestDevice& device, const Matrix<T>& x,
                                           const Groups<T>& groups, bool forward,
                                           const GemmTree& tree, int first, int last) {
    if (last - first == 1) return Leaf(device, x, groups, forward, tree, first);
    const int middle = (first + last) / 2;
    auto left = Node(device, x, groups, forward, tree, first, middle);
    const auto right = Node(device, x, groups, forward, tree, middle, last);
    if (!left || !right) return left ? left : right;
    for (int64_t r = 0; r < left->rows(); ++r) {
      for (int64_t c = 0; c < left->cols(); ++c) left->at(r, c) += right->at(r, c);
    }
    return left;
  }

  // A leaf by one product of a copy of its terms, each part filled up with zeros to whole steps of
  // tensor cores, and to whole tiles.
  static std::optional<Matrix<float>> Leaf(const TestDevice& device, const Matrix<T>& x,
                                           const Groups<T>& groups, bool forward,
                                           const GemmTree& tree, int s) {
    constexpr int64_t kTileDepth = 32;
    std::vector<int64_t> terms;  // -1: zero
    for (int part = 0; part < tree.parts; ++part) {
      const int64_t times = tree.Times(part);
      const int64_t end = tree.Begin(part) + times * tree.cut.Begin(s + 1);
      for (int64_t k = tree.Begin(part) + times * tree.cut.Begin(s); k < end; ++k) {
        terms.push_back(k);
      }
      while (terms.size() % kTileDepth != 0) terms.push_back(-1);
    }
    if (terms.empty()) return std::nullopt;
    const auto count = std::ssize(terms);
    Matrix<T> some_x(x.rows(), count, kLayouts[0]);
    for (int64_t r = 0; r < x.rows(); ++r) {
      for (int64_t i = 0; i < count; ++i) {
        some_x.at(r, i) = terms[i] < 0 ? T(0.0f) : x.at(r, terms[i]);
      }
    }
    Groups<T> some = groups;
    for (Matrix<T>& w : some.weight) {
      const Matrix<T> all = w;
      const int64_t cols = forward ? all.rows() : all.cols();
      w = forward ? Matrix<T>(cols, count, kLayouts[0]) : Matrix<T>(count, cols, kLayouts[0]);
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t c = 0; c < cols; ++c) {
          T& to = forward ? w.at(c, i) : w.at(i, c);
          to = terms[i] < 0 ? T(0.0f) : forward ? all.at(c, terms[i]) : all.at(terms[i], c);
        }
      }
    }
    return Product<float>(device, some_x, some, forward, {}, kLayouts[0]);
  }
};
TYPED_TEST_SUITE(DeviceTreeTest, StorageTypes);

// Adding e to 1 has no effect: a chain stays at 1, but pairs of leaves sum to (1 + e) + (e + e). A
// leaf holds an item of each of two parts; of two leaves of one item the first is empty, and its
// sum no 0 to which -0 is added.
TYPED_TEST(DeviceTreeTest, AddsLeavesAsABalancedTree) {
  using T = TypeParam;
  constexpr float e = 0x1p-24f;
  const auto x = Matrix<T>::Of(1, 8, {1, 0x1p-12f, 0x1p-12f, 0x1p-12f, 0, 0, 0, 0});
  const auto w = Matrix<T>::Of(1, 8, {1, 0x1p-12f, 0x1p-12f, 0x1p-12f, 0, 0, 0, 0});
  for (const Path& path : this->paths_) {
    const TestDevice& device = *path.device;
    if ((device.is_cpu() && !this->kIsFloat) || path.cublas != nullptr) continue;
    SCOPED_TRACE(path.name());
    Workspace workspace(device.memory());
    const auto there = device.Copy(x), w_there = device.Copy(w);
    const auto y = device.Copy(Matrix<float>(1, 1));
    const auto add = [&](int leaves, int parts) {
      EXPECT_OK((Gemm<T, float>(there.view(), w_there.view(), y.view(), workspace, device.stream(),
                                {}, {{leaves, 8 / parts, 1}, parts})));
      return static_cast<float>(device.Read(y)(0, 0));
    };
    EXPECT_EQ(add(8, 1), 1 + 2 * e);
    EXPECT_EQ(add(4, 2), 1 + 2 * e);  // leaves 1, e, e, e
    if (!this->kIsFloat) continue;
    EXPECT_EQ(add(1, 1), 1.0f);
    EXPECT_EQ(add(4, 1), 1 + 2 * e);
    EXPECT_EQ(add(2, 1), 1.0f);  // one leaf holds all
    EXPECT_EQ(add(2, 2), 1 + 2 * e);
    const auto small = device.Copy(Matrix<T>::Of(1, 1, {-0x1p-100f}));
    const auto one = device.Copy(Matrix<T>::Of(1, 1, {0x1p-100f}));
    EXPECT_OK((Gemm<T, float>(small.view(), one.view(), y.view(), workspace, device.stream(), {},
                              {{.leaves = 2, .extent = 1}})));
    EXPECT_TRUE(std::signbit(device.Read(y)(0, 0)));
  }
}

// Each depth with one cut, so that each number of leaves meets each kind of depth: empty leaves,
// parts of which none begins at a multiple of 16 bytes, more than a chain, more than a tile.
TYPED_TEST(DeviceTreeTest, EqualsTheSpecificationAtEveryDepth) {
  constexpr int64_t kItems[] = {1, 16, 3, 8};
  const bool slow = kSimulatedCuda && !this->kIsFloat;
  const int64_t step = kSanitized ? 59 : slow ? 23 : 1;
  for (int64_t depth = 1; depth <= 300; depth += step) {
    const Trees trees = {.leaves = 1 << depth % 5,
                         .item = kItems[depth / 5 % 4],
                         .parts = 1 + static_cast<int>(depth % 3),
                         .first_times = 1 + depth / 3 % 3};
    if (depth % 2 == 0) {
      this->CheckGroups({1, 0, 5}, 18, depth, trees);
    } else {
      this->CheckGroups({1, 0, 5}, depth, 18, trees);
    }
  }
}

TYPED_TEST(DeviceTreeTest, EqualsTheSpecificationForAnySchedule) {
  ForSchedules([this] {
    this->CheckGroups({2, 0, 129}, 136, 104, {.leaves = 4, .item = 8});
    this->CheckGroups({3, 70}, 3 * 40, 72, {.leaves = 8, .item = 8, .parts = 2, .first_times = 2});
  });
}

TYPED_TEST(DeviceTreeTest, EqualsTheSpecificationForAnyLayout) {
  for (const auto& [in, out] : kLayoutPairs) {
    this->CheckGroups({3, 17}, 24, 48, {.leaves = 4, .item = 8}, {in, out, in});
    if (kSanitized) continue;
    this->CheckGroups({18}, 9, 33, {.leaves = 2, .item = 1}, {out, in, out});
  }
}

// No terms: the root is zero, in rows of groups.
TYPED_TEST(DeviceTreeTest, ATreeWithoutTermsIsZero) {
  using T = TypeParam;
  for (const Path& path : this->paths_) {
    if (path.cublas != nullptr) continue;
    const TestDevice& device = *path.device;
    Workspace workspace(device.memory());
    const auto y = device.Copy(Matrix<T>(3, 5, kNaN));
    EXPECT_OK(Gemm<T>(MatrixView<const T>(nullptr, 3, 0), {nullptr, 5, 0}, y.view(), workspace,
                      device.stream(), {}, {{.leaves = 8, .extent = 0}}));
    EXPECT_TRUE(SameBits(device.Read(y), Matrix<T>(3, 5)));
  }
}

}  // namespace
}  // namespace moe::testing
