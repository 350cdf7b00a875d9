// kernels/norm: RMS normalisation and its gradients, sums of rows.
#include "kernels/norm/rms_norm.h"

#include <cmath>
#include <string>

#include "kernels/base/fixed_dot.h"
#include "tests/kernels/gradcheck.h"
#include "tests/kernels/op_test.h"

namespace moe {
namespace {

using testing::kFloatRounding;
using testing::Matrix;
using testing::RandomFloats;
using testing::SameBits;
using testing::TestStream;

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

template <typename T>
struct Problem {
  Matrix<T> x, dy, y, dx;
  std::vector<float> weight, rstd, d_weight;

  Problem(int64_t rows, int64_t cols)
      : x(Matrix<T>::Random(rows, cols, 1, 2)),
        dy(Matrix<T>::Random(rows, cols, 2)),
        y(rows, cols),
        dx(Matrix<T>::Random(rows, cols, 3)),
        weight(RandomFloats(cols, 4)),
        rstd(static_cast<size_t>(rows)),
        d_weight(RandomFloats(cols, 5)) {}

  absl::Status Forward(TestStream& stream) {
    return RmsNorm<T>(x.view(), weight, kEpsilon, y.view(), absl::MakeSpan(rstd), *stream);
  }
  absl::Status Backward(Write write_dx, Write write_d_weight, TestStream& stream) {
    return RmsNormBackward<T>(x.view(), weight, rstd, dy.view(), dx.view(), write_dx,
                              absl::MakeSpan(d_weight), write_d_weight, *stream);
  }
};

TEST(RmsNormTest, NormalisesARowByHand) {
  TestStream stream;
  Matrix<float> x(1, 2), y(1, 2);
  x.at(0, 0) = 3;
  x.at(0, 1) = 4;
  std::vector<float> rstd(1);
  ASSERT_TRUE(
      RmsNorm<float>(x.view(), {2.0f, 10.0f}, 0.0f, y.view(), absl::MakeSpan(rstd), *stream).ok());
  const double expected = 1 / std::sqrt(12.5);
  EXPECT_NEAR(rstd[0], expected, 1e-7);
  EXPECT_NEAR(y(0, 0), 6 * expected, 1e-6);
  EXPECT_NEAR(y(0, 1), 40 * expected, 1e-6);
}

// The sum of squares has n / 16 + 4 roundings, all of one sign, halved by the root; mean, epsilon,
// root, quotient and two products add six.
TEST(RmsNormTest, ForwardMatchesFloat64) {
  TestStream stream;
  for (const int64_t cols : {1, 2, 15, 16, 17, 64, 100}) {
    Problem<float> p(7, cols);
    ASSERT_TRUE(p.Forward(stream).ok());
    EXPECT_TRUE(p.y.edges_intact());
    const std::vector<double> weight(p.weight.begin(), p.weight.end());
    for (int64_t t = 0; t < 7; ++t) {
      std::vector<double> x;
      for (int64_t h = 0; h < cols; ++h) x.push_back(p.x(t, h));
      const auto expected = Reference(x, weight);
      const double roundings = static_cast<double>(cols) / 32 + 9;
      for (int64_t h = 0; h < cols; ++h) {
        EXPECT_NEAR(p.y(t, h), expected[h], roundings * kFloatRounding * std::abs(expected[h]));
      }
    }
  }
}

TEST(RmsNormTest, SumOfSquaresHasTheFixedOrder) {
  TestStream stream;
  Problem<float> p(3, 37);
  ASSERT_TRUE(p.Forward(stream).ok());
  for (int64_t t = 0; t < 3; ++t) {
    const float* const x = p.x.view().row(t);
    EXPECT_TRUE(SameBits(p.rstd[t], 1.0f / std::sqrt(FixedDot(x, x, 37) / 37.0f + kEpsilon)));
  }
}

// dx is a sum of two terms below rstd * |dy * weight| + |x| * rstd^3 * |mean(dy * weight * x)|,
// both under 30 for these inputs, with at most 16 roundings each; d_weight sums 5 terms below 20.
TEST(RmsNormTest, BackwardMatchesFiniteDifferences) {
  TestStream stream;
  const int64_t rows = 5, cols = 21;
  Problem<float> p(rows, cols);
  ASSERT_TRUE(p.Forward(stream).ok());
  ASSERT_TRUE(p.Backward(Write::kOverwrite, Write::kOverwrite, stream).ok());
  EXPECT_TRUE(p.dx.edges_intact());
  const auto dy = p.dy.values();
  const auto loss = [&](const std::vector<double>& x, const std::vector<double>& weight) {
    double sum = 0;
    for (int64_t t = 0; t < rows; ++t) {
      const std::vector<double> row(x.begin() + t * cols, x.begin() + (t + 1) * cols);
      const auto y = Reference(row, weight);
      for (int64_t h = 0; h < cols; ++h) sum += dy[t * cols + h] * y[h];
    }
    return sum;
  };
  const auto x = p.x.values();
  const std::vector<double> weight(p.weight.begin(), p.weight.end());
  const double tolerance = 16 * 60 * kFloatRounding;
  testing::ExpectGradient([&](const auto& v) { return loss(v, weight); }, x, p.dx.values(),
                          tolerance, "dx");
  testing::ExpectGradient([&](const auto& v) { return loss(x, v); }, weight,
                          {p.d_weight.begin(), p.d_weight.end()}, tolerance, "d_weight");
}

TEST(RmsNormTest, AddAddsWhatOverwriteWrites) {
  TestStream stream;
  for (const int64_t cols : {33, 150}) {
    Problem<float> over(6, cols), add(6, cols), old(6, cols);
    ASSERT_TRUE(over.Forward(stream).ok());
    ASSERT_TRUE(add.Forward(stream).ok());
    ASSERT_TRUE(over.Backward(Write::kOverwrite, Write::kOverwrite, stream).ok());
    ASSERT_TRUE(add.Backward(Write::kAdd, Write::kAdd, stream).ok());
    for (int64_t h = 0; h < cols; ++h) {
      EXPECT_EQ(add.d_weight[h], old.d_weight[h] + over.d_weight[h]) << h;
      for (int64_t t = 0; t < 6; ++t) {
        EXPECT_EQ(add.dx.at(t, h), old.dx.at(t, h) + over.dx.at(t, h)) << t << " " << h;
      }
    }
  }
}

TEST(RmsNormTest, ARowHasTheSameBitsInAnyBatchAndOnAnyNumberOfThreads) {
  const int64_t rows = 300, cols = 83;
  TestStream one;
  Problem<float> all(rows, cols);
  ASSERT_TRUE(all.Forward(one).ok());
  ASSERT_TRUE(all.Backward(Write::kOverwrite, Write::kOverwrite, one).ok());
  for (const int threads : {2, 3}) {
    TestStream stream(threads);
    Problem<float> p(rows, cols);
    ASSERT_TRUE(p.Forward(stream).ok());
    ASSERT_TRUE(p.Backward(Write::kOverwrite, Write::kOverwrite, stream).ok());
    EXPECT_TRUE(SameBits(p.y, all.y));
    EXPECT_TRUE(SameBits(p.rstd, all.rstd));
    EXPECT_TRUE(SameBits(p.dx, all.dx));
    EXPECT_TRUE(SameBits(p.d_weight, all.d_weight));
  }
  for (const int64_t t : {0, 17, 299}) {
    Matrix<float> y(1, cols), dx(1, cols);
    std::vector<float> rstd(1), d_weight(static_cast<size_t>(cols));
    ASSERT_TRUE(RmsNorm<float>(all.x.view(t, t + 1), all.weight, kEpsilon, y.view(),
                               absl::MakeSpan(rstd), *one)
                    .ok());
    ASSERT_TRUE(RmsNormBackward<float>(all.x.view(t, t + 1), all.weight, rstd,
                                       all.dy.view(t, t + 1), dx.view(), Write::kOverwrite,
                                       absl::MakeSpan(d_weight), Write::kOverwrite, *one)
                    .ok());
    EXPECT_TRUE(SameBits(y, all.y, t));
    EXPECT_TRUE(SameBits(dx, all.dx, t));
  }
}

TEST(RmsNormTest, BFloat16IsTheFloat32ResultRoundedOnce) {
  TestStream stream;
  Problem<BFloat16> p(4, 45);
  Problem<float> p32(4, 45);
  p32.x = p.x.As<float>();
  p32.dy = p.dy.As<float>();
  p32.dx = p.dx.As<float>();
  for (const Write write : {Write::kAdd, Write::kOverwrite}) {
    ASSERT_TRUE(p.Forward(stream).ok());
    ASSERT_TRUE(p32.Forward(stream).ok());
    EXPECT_TRUE(SameBits(p.y, p32.y.As<BFloat16>()));
    EXPECT_TRUE(SameBits(p.rstd, p32.rstd));
    ASSERT_TRUE(p.Backward(write, Write::kOverwrite, stream).ok());
    ASSERT_TRUE(p32.Backward(write, Write::kOverwrite, stream).ok());
    EXPECT_TRUE(SameBits(p.dx, p32.dx.As<BFloat16>()));
    EXPECT_TRUE(SameBits(p.d_weight, p32.d_weight));
    EXPECT_TRUE(p.dx.edges_intact());
  }
}

TEST(RmsNormTest, NoRowsGiveAZeroWeightGradient) {
  TestStream stream;
  Problem<float> p(0, 20);
  ASSERT_TRUE(p.Forward(stream).ok());
  const auto old = p.d_weight;
  ASSERT_TRUE(p.Backward(Write::kOverwrite, Write::kAdd, stream).ok());
  EXPECT_EQ(p.d_weight, old);
  ASSERT_TRUE(p.Backward(Write::kOverwrite, Write::kOverwrite, stream).ok());
  EXPECT_EQ(p.d_weight, std::vector<float>(20, 0.0f));
}

TEST(RmsNormTest, ShapesMustAgree) {
  TestStream stream;
  Problem<float> p(2, 3);
  const auto refused = [](const absl::Status& status, const std::string& message) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(testing::Message(status), message);
  };
  Problem<float> weight = p, rstd = p, y = p, d_weight = p;
  weight.weight.resize(4);
  refused(weight.Forward(stream), "RmsNorm: weight is [4], expected [3]");
  rstd.rstd.resize(1);
  refused(rstd.Forward(stream), "RmsNorm: rstd is [1], expected [2]");
  y.y = Matrix<float>(3, 3);
  refused(y.Forward(stream), "RmsNorm: y is [3, 3] with stride 6, expected [2, 3]");
  d_weight.d_weight.resize(2);
  refused(d_weight.Backward(Write::kAdd, Write::kAdd, stream),
          "RmsNormBackward: d_weight is [2], expected [3]");
}

TEST(AddRowsTest, AddsInPlaceAndRoundsOnce) {
  TestStream stream;
  for (const int64_t cols : {1, 16, 37}) {
    const auto a = Matrix<BFloat16>::Random(5, cols, 1), b = Matrix<BFloat16>::Random(5, cols, 2);
    Matrix<BFloat16> out(5, cols), in_place = a;
    ASSERT_TRUE(AddRows<BFloat16>(a.view(), b.view(), out.view(), *stream).ok());
    for (int64_t r = 0; r < 5; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        EXPECT_EQ(out.at(r, c),
                  BFloat16(static_cast<float>(a(r, c)) + static_cast<float>(b(r, c))));
      }
    }
    EXPECT_TRUE(out.edges_intact());
    ASSERT_TRUE(AddRows<BFloat16>(in_place.view(), b.view(), in_place.view(), *stream).ok());
    EXPECT_TRUE(SameBits(in_place, out));
  }
  Matrix<float> a(2, 3, 1.0f), wrong(2, 4), sum(2, 3);
  ASSERT_TRUE(AddRows<float>(a.view(), a.view(), sum.view(), *stream).ok());
  EXPECT_EQ(sum.values(), std::vector<double>(6, 2.0));
  EXPECT_EQ(AddRows<float>(a.view(), wrong.view(), sum.view(), *stream).code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace moe
