// kernels/norm: RMS normalisation and its gradients, sums of rows, on every device.
#include "kernels/norm/rms_norm.h"

#include <cmath>
#include <numeric>

#include "tests/kernels/device_memory.h"
#include "tests/kernels/gradcheck.h"

namespace moe::testing {
namespace {

constexpr float kEpsilon = 1e-5f;

// y of one row, in float64.
std::vector<double> Reference(const std::vector<double>& x, const std::vector<double>& weight) {
  double squares = 0;
  for (const double v : x) squares += v * v;
  const double rstd = 1 / std::sqrt(squares / static_cast<double>(x.size()) + double{kEpsilon});
  std::vector<double> y;
  for (size_t h = 0; h < x.size(); ++h) y.push_back(x[h] * rstd * weight[h]);
  return y;
}

// The order of FixedDot: 16 interleaved partial sums, one fused multiply-add a term, folded
// pairwise.
template <typename A, typename B>
float FixedDotInPlainLoops(int64_t n, A a, B b) {
  float partial[16] = {};
  for (int64_t i = 0; i < n; ++i) partial[i % 16] = std::fma(a(i), b(i), partial[i % 16]);
  for (int width = 8; width >= 1; width /= 2) {
    for (int i = 0; i < width; ++i) partial[i] += partial[i + width];
  }
  return partial[0];
}

template <typename T>
struct Problem {
  Matrix<T> x, dy, y, dx;
  std::vector<float> weight, rstd, d_weight;

  // Rows of `groups` groups of `cols` columns.
  Problem(int64_t rows, int64_t cols, MatrixLayout in = {}, MatrixLayout out = {},
          int64_t groups = 1)
      : x(Matrix<T>::Random(rows, groups * cols, in, 1, 2)),
        dy(Matrix<T>::Random(rows, groups * cols, out, 2)),
        y(rows, groups * cols, out),
        dx(Matrix<T>::Random(rows, groups * cols, in, 3)),
        weight(RandomFloats(cols, 4)),
        rstd(static_cast<size_t>(rows * groups)),
        d_weight(RandomFloats(cols, 5)) {}

  absl::Status Forward(const TestDevice& device, float epsilon = kEpsilon) {
    const auto from = device.Copy(x), to = device.Copy(y);
    const auto factor = device.Copy(weight), root = device.Copy(rstd);
    const absl::Status status =
        RmsNorm<T>(from.view(), factor.span(), epsilon, to.view(), root.span(), device.stream());
    y = device.Read(to);
    rstd = device.Read(root);
    return status;
  }
  absl::Status Backward(Write write_dx, Write write_d_weight, const TestDevice& device) {
    const auto from = device.Copy(x), of_y = device.Copy(dy), to = device.Copy(dx);
    const auto factor = device.Copy(weight), root = device.Copy(rstd), d = device.Copy(d_weight);
    const absl::Status status =
        RmsNormBackward<T>(from.view(), factor.span(), root.span(), of_y.view(), to.view(),
                           write_dx, d.span(), write_d_weight, device.stream());
    dx = device.Read(to);
    d_weight = device.Read(d);
    return status;
  }

  // The contract in plain loops.
  void ForwardLoops() {
    for (int64_t t = 0; t < x.rows(); ++t) {
      const auto value = [&](int64_t h) {
        return static_cast<float>(x.at(t, h));
      };
      const auto n = static_cast<float>(x.cols());
      rstd[t] = 1.0f / std::sqrt(FixedDotInPlainLoops(x.cols(), value, value) / n + kEpsilon);
      for (int64_t h = 0; h < x.cols(); ++h) y.at(t, h) = T(value(h) * rstd[t] * weight[h]);
    }
  }
  void BackwardLoops(Write write_dx, Write write_d_weight) {
    std::vector<float> sum(weight.size());
    for (int64_t t = 0; t < x.rows(); ++t) {
      const auto value = [&](int64_t h) {
        return static_cast<float>(x.at(t, h));
      };
      const auto scaled = [&](int64_t h) {
        return static_cast<float>(dy.at(t, h)) * weight[h];
      };
      const float dot = FixedDotInPlainLoops(x.cols(), scaled, value);
      const float slope = rstd[t] * rstd[t] * (dot / static_cast<float>(x.cols()));
      for (int64_t h = 0; h < x.cols(); ++h) {
        const float gradient = rstd[t] * std::fma(-value(h), slope, scaled(h));
        sum[h] = std::fma(static_cast<float>(dy.at(t, h)) * value(h), rstd[t], sum[h]);
        const auto old = static_cast<float>(dx.at(t, h));
        dx.at(t, h) = T(write_dx == Write::kAdd ? old + gradient : gradient);
      }
    }
    for (size_t h = 0; h < sum.size(); ++h) {
      d_weight[h] = write_d_weight == Write::kAdd ? d_weight[h] + sum[h] : sum[h];
    }
  }
};

template <typename T>
class RmsNormTest : public ::testing::Test {};
TYPED_TEST_SUITE(RmsNormTest, StorageTypes);

// rms of (3, 4) is sqrt(12.5); weights 2 and 10.
TYPED_TEST(RmsNormTest, NormalisesARowByHand) {
  using T = TypeParam;
  const double rounding = std::is_same_v<T, BFloat16> ? 0x1p-8 : sizeof(T) == 2 ? 0x1p-11 : 0x1p-22;
  ForEachDevice([&](const TestDevice& device) {
    Problem<T> p(1, 2);
    p.x = Matrix<T>::Of(1, 2, {3, 4});
    p.weight = {2, 10};
    ASSERT_OK(p.Forward(device, 0.0f));
    const double expected = 1 / std::sqrt(12.5);
    ASSERT_EQ(p.rstd.size(), 1);
    EXPECT_NEAR(p.rstd[0], expected, 1e-7);
    ASSERT_EQ(p.y.rows(), 1);
    EXPECT_NEAR(p.y(0, 0), 6 * expected, rounding * 6 * expected);
    EXPECT_NEAR(p.y(0, 1), 40 * expected, rounding * 40 * expected);
  });
}

template <typename T>
void ExpectTheContract(const TestDevice& device, int64_t rows, int64_t cols, MatrixLayout in,
                       MatrixLayout out) {
  SCOPED_TRACE(::testing::Message() << rows << " x " << cols);
  const Problem<T> untouched(rows, cols, in, out);
  auto got = untouched, want = untouched;
  ASSERT_OK(got.Forward(device));
  want.ForwardLoops();
  EXPECT_TRUE(SameBits(got.rstd, want.rstd));
  EXPECT_TRUE(SameBits(got.y, want.y));
  for (const Write write_dx : {Write::kOverwrite, Write::kAdd}) {
    for (const Write write_d_weight : {Write::kOverwrite, Write::kAdd}) {
      got.dx = want.dx = untouched.dx;
      got.d_weight = want.d_weight = untouched.d_weight;
      ASSERT_OK(got.Backward(write_dx, write_d_weight, device));
      want.BackwardLoops(write_dx, write_d_weight);
      EXPECT_TRUE(SameBits(got.dx, want.dx));
      EXPECT_TRUE(SameBits(got.d_weight, want.d_weight));
    }
  }
}

TYPED_TEST(RmsNormTest, HasTheBitsOfTheContractForAnyShapeAndLayout) {
  ForEachDevice([](const TestDevice& device) {
    for (const int64_t cols : {1, 15, 16, 17, 64, 277}) {
      for (const auto& [in, out] : kLayoutPairs) {
        ExpectTheContract<TypeParam>(device, 19, cols, in, out);
      }
    }
    ExpectTheContract<TypeParam>(device, device.is_cpu() ? 300 : 70, 83, {}, {});
    ExpectTheContract<TypeParam>(device, 6, 150, {}, {});
  });
}

// Adjacent groups have the bits of as many separate rows.
TYPED_TEST(RmsNormTest, GroupsHaveTheBitsOfRows) {
  using T = TypeParam;
  ForEachDevice([](const TestDevice& device) {
    for (const int64_t cols : {5, 16, 20}) {
      constexpr int64_t kRows = 7, kGroups = 3;
      Problem<T> groups(kRows, cols, kLayouts[1], kLayouts[3], kGroups);
      Problem<T> rows(kRows * kGroups, cols);
      const auto below = [&](const Matrix<T>& from, Matrix<T>& to) {
        for (int64_t i = 0; i < from.rows() * from.cols(); ++i) {
          to.at(i / cols, i % cols) = from.at(i / from.cols(), i % from.cols());
        }
      };
      below(groups.x, rows.x);
      below(groups.dy, rows.dy);
      ASSERT_OK(groups.Forward(device));
      ASSERT_OK(groups.Backward(Write::kOverwrite, Write::kOverwrite, device));
      ASSERT_OK(rows.Forward(device));
      ASSERT_OK(rows.Backward(Write::kOverwrite, Write::kOverwrite, device));
      EXPECT_TRUE(groups.y.edges_intact() && groups.dx.edges_intact());
      Matrix<T> y(kRows * kGroups, cols), dx(kRows * kGroups, cols);
      below(groups.y, y);
      below(groups.dx, dx);
      EXPECT_TRUE(SameBits(y, rows.y));
      EXPECT_TRUE(SameBits(dx, rows.dx));
      EXPECT_TRUE(SameBits(groups.rstd, rows.rstd));
      EXPECT_TRUE(SameBits(groups.d_weight, rows.d_weight));
    }
  });
}

// Rows of four leaves, one empty, whole and in the hands of two: nodes of leaves [0, 2), [2, 3) and
// [3, 4). Sums are (0 + 1) + (2 + 3) of the leaves' own.
TYPED_TEST(RmsNormTest, NodesOfATreeHaveTheBitsOfItsLeaves) {
  using T = TypeParam;
  ForEachDevice([](const TestDevice& device) {
    constexpr int64_t kRows = 9, kCols = 40, kLeaf[] = {0, 5, 5, 21, kCols};
    const Matrix<T> x = Matrix<T>::Random(kRows, kCols, {}, 1, 2);
    const Matrix<T> dy = Matrix<T>::Random(kRows, kCols, {}, 2);
    const std::vector<float> weight = RandomFloats(kCols, 4);
    const auto given_x = device.Copy(x), given_dy = device.Copy(dy);
    const auto factor = device.Copy(weight);
    const auto columns = [](auto view, int64_t begin, int64_t end) {
      return ColumnRange(view, begin, end);
    };
    struct Node {
      int first, last;
    };
    // Forward and backward with the tree's nodes, by columns [0, cut) and [cut, kCols) apart.
    const auto run = [&](const std::vector<Node>& nodes, int64_t cut) {
      const auto count = static_cast<int64_t>(nodes.size());
      const auto squares = device.Copy(Matrix<float>(count, kRows));
      const auto dots = device.Copy(Matrix<float>(count, kRows));
      RowTree tree = {.leaves = 4, .cols = kCols};
      for (size_t j = 0; j < nodes.size(); ++j) {
        const auto [first, last] = nodes[j];
        tree.first_leaf[j] = first;
        RowTree node = {.leaves = last - first};
        for (int s = first; s <= last; ++s) node.begin[s - first] = kLeaf[s] - kLeaf[first];
        const auto sums_of = [&](const auto& sums) {
          return absl::Span<float>(sums.view().row(static_cast<int64_t>(j)), kRows);
        };
        const auto of_x = columns(given_x.view(), kLeaf[first], kLeaf[last]);
        const auto of_dy = columns(given_dy.view(), kLeaf[first], kLeaf[last]);
        EXPECT_OK(RmsNormSquares<T>(of_x, node, sums_of(squares), device.stream()));
        EXPECT_OK(RmsNormDots<T>(of_x, factor.span().subspan(kLeaf[first], of_x.cols()), of_dy,
                                 node, sums_of(dots), device.stream()));
      }
      Problem<T> out(kRows, kCols);
      const auto y = device.Copy(out.y), dx = device.Copy(out.dx);
      const auto rstd = device.Copy(out.rstd), d_weight = device.Copy(out.d_weight);
      for (const auto& [begin, end] : {std::pair<int64_t, int64_t>(0, cut), {cut, kCols}}) {
        if (begin == end) continue;
        const auto of_x = columns(given_x.view(), begin, end);
        const auto own = factor.span().subspan(begin, end - begin);
        tree.nodes = squares.view();
        EXPECT_OK(RmsNorm<T>(of_x, own, kEpsilon, columns(y.view(), begin, end), rstd.span(),
                             device.stream(), tree));
        tree.nodes = dots.view();
        EXPECT_OK(RmsNormBackward<T>(of_x, own, rstd.span(), columns(given_dy.view(), begin, end),
                                     columns(dx.view(), begin, end), Write::kOverwrite,
                                     d_weight.span().subspan(begin, end - begin), Write::kOverwrite,
                                     device.stream(), tree));
      }
      out.y = device.Read(y);
      out.dx = device.Read(dx);
      out.rstd = device.Read(rstd);
      out.d_weight = device.Read(d_weight);
      return out;
    };
    const Problem<T> whole = run({{0, 4}}, kCols), parts = run({{0, 2}, {2, 3}, {3, 4}}, 21);
    EXPECT_TRUE(SameBits(parts.y, whole.y));
    EXPECT_TRUE(SameBits(parts.dx, whole.dx));
    EXPECT_TRUE(SameBits(parts.rstd, whole.rstd));
    EXPECT_TRUE(SameBits(parts.d_weight, whole.d_weight));
    for (int64_t t = 0; t < kRows; ++t) {
      float leaf[4];
      for (int s = 0; s < 4; ++s) {
        const auto value = [&](int64_t h) {
          return static_cast<float>(x.at(t, kLeaf[s] + h));
        };
        leaf[s] = FixedDotInPlainLoops(kLeaf[s + 1] - kLeaf[s], value, value);
      }
      const float squares = (leaf[0] + leaf[1]) + (leaf[2] + leaf[3]);
      EXPECT_EQ(whole.rstd[static_cast<size_t>(t)],
                1.0f / std::sqrt(squares / static_cast<float>(kCols) + kEpsilon));
    }
  });
}

// The sum of squares has n / 16 + 4 roundings, all of one sign, halved by the root; mean, epsilon,
// root, quotient and two products add six, and products that are not fused one more. dx is a sum of
// two terms below rstd * |dy * weight| + |x| * rstd^3 * |mean(dy * weight * x)|, both under 30 for
// these inputs, with at most 16 roundings each; d_weight sums 5 terms below 20.
TEST(RmsNormFloat64Test, ForwardMatchesFloat64AndBackwardItsFiniteDifferences) {
  const int64_t rows = 5, cols = 21;
  ForEachDevice(Simd::kAll, [&](const TestDevice& device) {
    Problem<float> p(rows, cols);
    ASSERT_OK(p.Forward(device));
    ASSERT_OK(p.Backward(Write::kOverwrite, Write::kOverwrite, device));
    EXPECT_TRUE(p.y.edges_intact() && p.dx.edges_intact());
    const auto x = p.x.values(), dy = p.dy.values();
    const std::vector<double> weight(p.weight.begin(), p.weight.end());
    const auto y_of = [&](const std::vector<double>& all, const std::vector<double>& by) {
      std::vector<double> y;
      for (int64_t t = 0; t < rows; ++t) {
        const auto row = Reference({&all[t * cols], &all[t * cols] + cols}, by);
        y.insert(y.end(), row.begin(), row.end());
      }
      return y;
    };
    const auto expected = y_of(x, weight);
    for (int64_t i = 0; i < rows * cols; ++i) {
      const double roundings = static_cast<double>(cols) / 32 + 9;
      EXPECT_NEAR(p.y(i / cols, i % cols), expected[i],
                  roundings * kFloatRounding * std::abs(expected[i]));
    }
    const auto loss = [&](const std::vector<double>& all, const std::vector<double>& by) {
      const auto y = y_of(all, by);
      return std::inner_product(y.begin(), y.end(), dy.begin(), 0.0);
    };
    const double tolerance = 16 * 60 * kFloatRounding;
    ExpectGradient([&](const auto& v) { return loss(v, weight); }, x, p.dx.values(), tolerance,
                   "dx");
    ExpectGradient([&](const auto& v) { return loss(x, v); }, weight,
                   {p.d_weight.begin(), p.d_weight.end()}, tolerance, "d_weight");
  });
}

TYPED_TEST(RmsNormTest, NoRowsGiveAZeroWeightGradient) {
  using T = TypeParam;
  ForEachDevice([](const TestDevice& device) {
    Problem<T> none(0, 20), flat(3, 0);
    ASSERT_OK(none.Forward(device));
    const auto old = none.d_weight;
    ASSERT_OK(none.Backward(Write::kOverwrite, Write::kAdd, device));
    EXPECT_EQ(none.d_weight, old);
    ASSERT_OK(none.Backward(Write::kOverwrite, Write::kOverwrite, device));
    EXPECT_EQ(none.d_weight, std::vector<float>(20, 0.0f));
    ASSERT_OK(flat.Backward(Write::kOverwrite, Write::kOverwrite, device));
    EXPECT_OK(device.stream().Synchronize());
  });
}

TEST(RmsNormArgumentsTest, ShapesMustAgree) {
  const TestDevice device{Device()};
  Problem<float> p(2, 3);
  Problem<float> weight = p, rstd = p, y = p, d_weight = p;
  weight.weight.resize(4);
  ExpectRefused(weight.Forward(device), "RmsNorm: weight is [4], expected [3]");
  rstd.rstd.resize(1);
  ExpectRefused(rstd.Forward(device), "RmsNorm: rstd is [1], expected [2]");
  y.y = Matrix<float>(3, 3);
  ExpectRefused(y.Forward(device), "RmsNorm: y is [3, 3] with stride 6, expected [2, 3]");
  d_weight.d_weight.resize(2);
  ExpectRefused(d_weight.Backward(Write::kAdd, Write::kAdd, device),
                "RmsNormBackward: d_weight is [2], expected [3]");
}

}  // namespace
}  // namespace moe::testing
