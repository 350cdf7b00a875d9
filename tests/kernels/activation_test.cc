// kernels/swiglu: activations and their gradients.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>

#include "kernels/swiglu/swiglu.h"
#include "tests/kernels/activation_oracle.h"
#include "tests/kernels/gradcheck.h"
#include "tests/kernels/op_test.h"

namespace moe {
namespace {

using testing::ActivationReference;
using testing::kFloatRounding;
using testing::Matrix;
using testing::SameBits;
using testing::TestStream;

template <typename T>
absl::Status Forward(Activation activation, const Matrix<T>& gate, const Matrix<T>& up,
                     Matrix<T>& out, TestStream& stream) {
  return ActivationForward<T>(activation, gate.view(), up.view(), out.view(), *stream);
}

template <typename T>
absl::Status Backward(Activation activation, const Matrix<T>& gate, const Matrix<T>& up,
                      const Matrix<T>& d_out, Matrix<T>& d_gate, Matrix<T>& d_up,
                      TestStream& stream) {
  return ActivationBackward<T>(activation, gate.view(), up.view(), d_out.view(), d_gate.view(),
                               d_up.view(), *stream);
}

std::string Name(const ::testing::TestParamInfo<Activation>& test) {
  return testing::NameOf(test.param);
}

class ActivationTest : public ::testing::TestWithParam<Activation> {};
INSTANTIATE_TEST_SUITE_P(All, ActivationTest, ::testing::ValuesIn(testing::kActivations), Name);

TEST(ActivationValuesTest, AreThoseComputedByHand) {
  TestStream stream;
  Matrix<float> gate(1, 4), up(1, 4, 2.0f), out(1, 4);
  for (int i = 0; i < 4; ++i) gate.at(0, i) = static_cast<float>(i - 1);  // -1 0 1 2
  ASSERT_TRUE(Forward(Activation::kSwiGlu, gate, up, out, stream).ok());
  EXPECT_NEAR(out(0, 0), -0.53788285, 1e-6);  // 2 * -1 / (1 + e)
  EXPECT_EQ(out(0, 1), 0);
  EXPECT_NEAR(out(0, 2), 1.46211716, 1e-6);
  ASSERT_TRUE(Forward(Activation::kGeGlu, gate, up, out, stream).ok());
  EXPECT_NEAR(out(0, 0), -0.31731051, 1e-6);  // 2 * -1 * P(X <= -1)
  ASSERT_TRUE(Forward(Activation::kRelu2, gate, up, out, stream).ok());
  EXPECT_EQ(out.values(), (std::vector<double>{0, 0, 1, 4}));
}

// (u + 1) g sigmoid(1.702 g); sigmoid(1.702) = 0.84579..., and the gate has no lower clamp.
TEST(ClampedSwiGluTest, ValuesInsideAndOutsideBothClampsAreThoseComputedByHand) {
  TestStream stream;
  constexpr struct {
    float gate, up;
    double out;
  } kCases[] = {{0, 3, 0},
                {1, 1, 1.691591532},
                {1, 7, 6.766366127},
                {1, 9, 6.766366127},
                {1, -7, -5.074774596},
                {1, -9, -5.074774596},
                {7, 0, 6.999953128},
                {8, 0, 6.999953128},
                {1000, -1, 0},
                {-9, 0, -2.003177987e-6}};
  constexpr int64_t kCount = std::size(kCases);
  Matrix<float> gate(1, kCount), up(1, kCount), out(1, kCount);
  for (int64_t i = 0; i < kCount; ++i) {
    gate.at(0, i) = kCases[i].gate;
    up.at(0, i) = kCases[i].up;
  }
  ASSERT_TRUE(Forward(Activation::kClampedSwiGlu, gate, up, out, stream).ok());
  for (int64_t i = 0; i < kCount; ++i) {
    EXPECT_NEAR(out(0, i), kCases[i].out, 1e-9 + 1e-6 * std::abs(out(0, i))) << i;
  }
  EXPECT_EQ(out(0, 2), out(0, 3));  // on the clamp and beyond it
  EXPECT_EQ(out(0, 4), out(0, 5));
  EXPECT_EQ(out(0, 6), out(0, 7));
}

TEST(ClampedSwiGluTest, GradientsPassOnTheClampsAndStopOneUlpOutside) {
  TestStream stream;
  const float above = std::nextafter(7.0f, 8.0f), below = std::nextafter(-7.0f, -8.0f);
  const float ups[] = {2, 7, above, -7, below, testing::kNaN};
  constexpr int64_t kCount = std::size(ups);
  Matrix<float> gate(3, kCount), up(3, kCount), d_out(3, kCount, 1.0f);
  for (int64_t i = 0; i < kCount; ++i) {
    gate.at(0, i) = 1;
    gate.at(1, i) = 7;
    gate.at(2, i) = above;
    for (int64_t r = 0; r < 3; ++r) up.at(r, i) = ups[i];
  }
  Matrix<float> d_gate(3, kCount), d_up(3, kCount);
  ASSERT_TRUE(Backward(Activation::kClampedSwiGlu, gate, up, d_out, d_gate, d_up, stream).ok());
  constexpr double kSlopeOfOne = 1.067780, kSlopeOfSeven = 1.000073;  // (g sigmoid(1.702 g))'
  constexpr double kUpPlusOne[] = {3, 8, 8, -6, -6};
  constexpr double kGatedOne = 0.845796, kGatedSeven = 6.999953;  // g sigmoid(1.702 g)
  constexpr bool kUpPasses[] = {true, true, false, true, false};
  for (int64_t i = 0; i + 1 < kCount; ++i) {
    EXPECT_NEAR(d_gate(0, i), kUpPlusOne[i] * kSlopeOfOne, 1e-5) << i;
    EXPECT_NEAR(d_gate(1, i), kUpPlusOne[i] * kSlopeOfSeven, 1e-5) << i;
    EXPECT_EQ(d_gate(2, i), 0) << i;
    EXPECT_NEAR(d_up(0, i), kUpPasses[i] ? kGatedOne : 0, 1e-5) << i;
    EXPECT_NEAR(d_up(1, i), kUpPasses[i] ? kGatedSeven : 0, 1e-5) << i;
    EXPECT_EQ(d_up(2, i), d_up(1, i)) << i;  // the gate's clamp does not stop the other gradient
  }
  EXPECT_TRUE(std::isnan(d_gate(0, kCount - 1)));
  EXPECT_EQ(d_up(0, kCount - 1), 0);  // a NaN lies in no interval
}

// Roundings as in BackwardMatchesFiniteDifferences, of terms below 1.1 * 8 * |d_out| < 30: 4 times
// its bound.
TEST(ClampedSwiGluTest, GradientsMatchFiniteDifferencesOnBothSidesOfTheClamps) {
  TestStream stream;
  const int64_t cols = 64;
  auto gate = Matrix<float>::Random(1, cols, 1, 6), up = Matrix<float>::Random(1, cols, 2, 6);
  int64_t outside = 0;
  for (Matrix<float>* m : {&gate, &up}) {
    for (int64_t c = 0; c < cols; ++c) {  // the differences must not straddle a clamp
      if (std::abs(std::abs(m->at(0, c)) - 7) < 0.01f) m->at(0, c) = 6.5f;
      outside += m->at(0, c) > 7;
    }
  }
  ASSERT_GT(outside, 0);
  const auto d_out = Matrix<float>::Random(1, cols, 3);
  Matrix<float> d_gate(1, cols), d_up(1, cols);
  ASSERT_TRUE(Backward(Activation::kClampedSwiGlu, gate, up, d_out, d_gate, d_up, stream).ok());
  const auto w = d_out.values(), g = gate.values(), u = up.values();
  const auto loss = [&](const std::vector<double>& gates, const std::vector<double>& ups) {
    double sum = 0;
    for (size_t i = 0; i < w.size(); ++i) {
      sum += w[i] * ActivationReference(Activation::kClampedSwiGlu, gates[i], ups[i]);
    }
    return sum;
  };
  const double tolerance = 1200 * kFloatRounding;
  testing::ExpectGradient([&](const auto& x) { return loss(x, u); }, g, d_gate.values(), tolerance,
                          "d_gate");
  testing::ExpectGradient([&](const auto& x) { return loss(g, x); }, u, d_up.values(), tolerance,
                          "d_up");
}

// exp is within 2 roundings (1 ulp); sum, quotient and two products add four, erfc 3 with its
// argument's rounding, which the tail magnifies by up to x^2 (30 at |x| = 5.5); the clamped
// sigmoid's argument has 2, magnified by |1.702 gate| < 12: 64 roundings.
TEST_P(ActivationTest, ForwardMatchesFloat64) {
  TestStream stream;
  for (const int64_t cols : {1, 7, 16, 33, 100}) {
    const auto gate = Matrix<float>::Random(9, cols, 1, 1.5),
               up = Matrix<float>::Random(9, cols, 2);
    Matrix<float> out(9, cols);
    ASSERT_TRUE(Forward(GetParam(), gate, up, out, stream).ok());
    EXPECT_TRUE(out.edges_intact());
    for (int64_t r = 0; r < 9; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        const double expected = ActivationReference(GetParam(), gate(r, c), up(r, c));
        EXPECT_NEAR(out(r, c), expected, 64 * kFloatRounding * std::abs(expected)) << gate(r, c);
      }
    }
  }
}

// The terms of an activation's slope are below 1 + 0.25 (ReLU^2: 2 |gate| < 7), each with at most
// 16 roundings, times |d_out * up| < 9: 180 roundings; 300 are allowed.
TEST_P(ActivationTest, BackwardMatchesFiniteDifferences) {
  TestStream stream;
  const int64_t cols = 19;
  auto gate = Matrix<float>::Random(2, cols, 1), up = Matrix<float>::Random(2, cols, 2);
  for (int64_t c = 0; c < cols; ++c) {  // the differences must not straddle the kink of ReLU
    if (std::abs(gate(0, c)) < 0.01) gate.at(0, c) = 0.5f;
    if (std::abs(gate(1, c)) < 0.01) gate.at(1, c) = -0.5f;
  }
  const auto d_out = Matrix<float>::Random(2, cols, 3);
  Matrix<float> d_gate(2, cols), d_up(2, cols);
  ASSERT_TRUE(Backward(GetParam(), gate, up, d_out, d_gate, d_up, stream).ok());
  EXPECT_TRUE(d_gate.edges_intact());
  EXPECT_TRUE(d_up.edges_intact());
  const auto w = d_out.values(), g = gate.values(), u = up.values();
  const auto loss = [&](const std::vector<double>& gates, const std::vector<double>& ups) {
    double sum = 0;
    for (size_t i = 0; i < w.size(); ++i)
      sum += w[i] * ActivationReference(GetParam(), gates[i], ups[i]);
    return sum;
  };
  const double tolerance = 300 * kFloatRounding;
  testing::ExpectGradient([&](const auto& x) { return loss(x, u); }, g, d_gate.values(), tolerance,
                          "d_gate");
  if (IsGated(GetParam())) {
    testing::ExpectGradient([&](const auto& x) { return loss(g, x); }, u, d_up.values(), tolerance,
                            "d_up");
  }
}

TEST_P(ActivationTest, AnElementHasTheSameBitsAnywhereAndOnAnyNumberOfThreads) {
  const int64_t rows = 400, cols = 53;
  const auto gate = Matrix<float>::Random(rows, cols, 4, 3),
             up = Matrix<float>::Random(rows, cols, 5, 4);
  const auto d_out = Matrix<float>::Random(rows, cols, 6);
  TestStream one;
  Matrix<float> out(rows, cols), d_gate(rows, cols), d_up(rows, cols);
  ASSERT_TRUE(Forward(GetParam(), gate, up, out, one).ok());
  ASSERT_TRUE(Backward(GetParam(), gate, up, d_out, d_gate, d_up, one).ok());
  for (const int threads : {2, 3}) {
    TestStream stream(threads);
    Matrix<float> out2(rows, cols), d_gate2(rows, cols), d_up2(rows, cols);
    ASSERT_TRUE(Forward(GetParam(), gate, up, out2, stream).ok());
    ASSERT_TRUE(Backward(GetParam(), gate, up, d_out, d_gate2, d_up2, stream).ok());
    EXPECT_TRUE(SameBits(out, out2));
    EXPECT_TRUE(SameBits(d_gate, d_gate2));
    EXPECT_TRUE(SameBits(d_up, d_up2));
  }
  // Columns [c, cols) alone: what was in the body of a row is now in its tail.
  for (const int64_t c : {1, 20, 45, 52}) {
    Matrix<float> part(rows, cols), d_gate_part(rows, cols), d_up_part(rows, cols);
    const auto cut = [&](auto view) {
      return ColumnRange(view, c, cols);
    };
    ASSERT_TRUE(ActivationForward<float>(GetParam(), cut(gate.view()), cut(up.view()),
                                         cut(part.view()), *one)
                    .ok());
    ASSERT_TRUE(ActivationBackward<float>(GetParam(), cut(gate.view()), cut(up.view()),
                                          cut(d_out.view()), cut(d_gate_part.view()),
                                          cut(d_up_part.view()), *one)
                    .ok());
    for (int64_t r = 0; r < rows; ++r) {
      ASSERT_TRUE(SameBits(part.at(r, cols - 1), out.at(r, cols - 1)));
      ASSERT_TRUE(SameBits(part.at(r, c), out.at(r, c)));
      ASSERT_TRUE(SameBits(d_gate_part.at(r, c), d_gate.at(r, c)));
      if (IsGated(GetParam())) {
        ASSERT_TRUE(SameBits(d_up_part.at(r, c), d_up.at(r, c)));
      }
    }
  }
}

// bfloat16 is the float32 result, rounded once.
TEST_P(ActivationTest, BFloat16IsTheFloat32ResultRoundedOnce) {
  TestStream stream;
  const int64_t rows = 5, cols = 37;
  const auto gate = Matrix<BFloat16>::Random(rows, cols, 7, 2),
             up = Matrix<BFloat16>::Random(rows, cols, 8),
             d_out = Matrix<BFloat16>::Random(rows, cols, 9);
  Matrix<BFloat16> out(rows, cols), d_gate(rows, cols), d_up(rows, cols);
  Matrix<float> out32(rows, cols), d_gate32(rows, cols), d_up32(rows, cols);
  const auto gate32 = gate.As<float>(), up32 = up.As<float>(), d_out32 = d_out.As<float>();
  ASSERT_TRUE(Forward(GetParam(), gate, up, out, stream).ok());
  ASSERT_TRUE(Forward(GetParam(), gate32, up32, out32, stream).ok());
  EXPECT_TRUE(SameBits(out, out32.As<BFloat16>()));
  ASSERT_TRUE(Backward(GetParam(), gate, up, d_out, d_gate, d_up, stream).ok());
  ASSERT_TRUE(Backward(GetParam(), gate32, up32, d_out32, d_gate32, d_up32, stream).ok());
  EXPECT_TRUE(SameBits(d_gate, d_gate32.As<BFloat16>()));
  EXPECT_TRUE(SameBits(d_up, d_up32.As<BFloat16>()));
  EXPECT_TRUE(out.edges_intact());
}

TEST_P(ActivationTest, GradientsMayOverwriteTheInputs) {
  TestStream stream;
  const int64_t rows = 3, cols = 29;
  auto gate = Matrix<float>::Random(rows, cols, 1), up = Matrix<float>::Random(rows, cols, 2);
  const auto d_out = Matrix<float>::Random(rows, cols, 3);
  Matrix<float> d_gate(rows, cols), d_up(rows, cols);
  ASSERT_TRUE(Backward(GetParam(), gate, up, d_out, d_gate, d_up, stream).ok());
  ASSERT_TRUE(ActivationBackward<float>(GetParam(), gate.view(), up.view(), d_out.view(),
                                        gate.view(), up.view(), *stream)
                  .ok());
  EXPECT_TRUE(SameBits(gate, d_gate));
  if (IsGated(GetParam())) {
    EXPECT_TRUE(SameBits(up, d_up));
  }
}

// Far from zero nothing overflows on the way, and a NaN is not lost.
TEST_P(ActivationTest, ExtremeInputsStayFiniteAndNaNShows) {
  TestStream stream;
  Matrix<float> gate(1, 4), up(1, 4, 1.0f), out(1, 4), d_gate(1, 4), d_up(1, 4);
  const float inputs[] = {1000.0f, -1000.0f, -88.5f, 89.0f};
  for (int i = 0; i < 4; ++i) gate.at(0, i) = inputs[i];
  ASSERT_TRUE(Forward(GetParam(), gate, up, out, stream).ok());
  ASSERT_TRUE(Backward(GetParam(), gate, up, up, d_gate, d_up, stream).ok());
  for (int i = 0; i < 4; ++i) {
    EXPECT_NEAR(out(0, i), ActivationReference(GetParam(), inputs[i], 1),
                1e-6 * std::abs(out(0, i)) + 1e-30);
    EXPECT_TRUE(std::isfinite(d_gate(0, i))) << inputs[i];
  }
  gate.at(0, 2) = testing::kNaN;
  ASSERT_TRUE(Forward(GetParam(), gate, up, out, stream).ok());
  EXPECT_TRUE(std::isnan(out(0, 2)));
  EXPECT_FALSE(std::isnan(out(0, 1)));
}

TEST(ActivationArgumentsTest, PlainActivationsTakeNoUpAndEmptyInputsAreFine) {
  TestStream stream;
  const auto gate = Matrix<float>::Random(2, 3, 1);
  Matrix<float> out(2, 3), none(0, 5);
  EXPECT_TRUE(
      ActivationForward<float>(Activation::kRelu, gate.view(), {}, out.view(), *stream).ok());
  EXPECT_TRUE(ActivationBackward<float>(Activation::kRelu, gate.view(), {}, gate.view(), out.view(),
                                        {}, *stream)
                  .ok());
  EXPECT_TRUE(Forward(Activation::kSwiGlu, none, none, none, stream).ok());
  EXPECT_TRUE(Backward(Activation::kSwiGlu, none, none, none, none, none, stream).ok());
}

TEST(ActivationArgumentsTest, ShapesMustAgree) {
  TestStream stream;
  Matrix<float> a(2, 3), b(2, 4), c(3, 3);
  const auto refused = [](const absl::Status& status, const std::string& message) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(testing::Message(status), message);
  };
  refused(Forward(Activation::kSwiGlu, a, b, a, stream),
          "ActivationForward: up is [2, 4] with stride 7, expected [2, 3]");
  refused(Forward(Activation::kRelu, a, a, c, stream),
          "ActivationForward: out is [3, 3] with stride 6, expected [2, 3]");
  refused(Backward(Activation::kSwiGlu, a, a, a, a, c, stream),
          "ActivationBackward: d_up is [3, 3] with stride 6, expected [2, 3]");
  refused(Backward(Activation::kSwiGlu, a, a, b, a, a, stream),
          "ActivationBackward: d_out is [2, 4] with stride 7, expected [2, 3]");
  EXPECT_TRUE(Forward(Activation::kSwiGlu, a, a, a, stream).ok());  // the stream stays usable
}

}  // namespace
}  // namespace moe
