// kernels/activation: activations and their gradients, on every device.
#include "kernels/activation/activation.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numbers>
#include <string>

#include "tests/kernels/device_memory.h"
#include "tests/kernels/gradcheck.h"

namespace moe::testing {
namespace {

constexpr Activation kActivations[] = {Activation::kSwiGlu,        Activation::kGeGlu,
                                       Activation::kRelu,          Activation::kRelu2,
                                       Activation::kClampedSwiGlu, Activation::kGeGluTanh};

// In float64, directly from the definitions.
double ActivationReference(Activation activation, double gate, double up) {
  switch (activation) {
    case Activation::kSwiGlu:
      return gate / (1 + std::exp(-gate)) * up;
    case Activation::kGeGlu:
      return gate * 0.5 * std::erfc(-gate / std::sqrt(2.0)) * up;
    case Activation::kGeGluTanh: {
      const double y = std::sqrt(2 / std::numbers::pi) * (gate + 0.044715 * std::pow(gate, 3));
      return gate / (1 + std::exp(-2 * y)) * up;
    }
    case Activation::kRelu:
      return std::max(gate, 0.0);
    case Activation::kRelu2:
      return std::pow(std::max(gate, 0.0), 2);
    case Activation::kClampedSwiGlu: {
      const double g = std::min(gate, 7.0), u = std::clamp(up, -7.0, 7.0);
      return (u + 1) * g / (1 + std::exp(-1.702 * g));
    }
  }
  return 0;
}

template <typename T>
Matrix<T> Forward(const TestDevice& device, ActivationFunction activation, const Matrix<T>& gate,
                  const Matrix<T>& up) {
  const auto on_gate = device.Copy(gate), on_up = device.Copy(up);
  const auto out = device.Copy(Matrix<T>(gate.rows(), gate.cols(), up.layout()));
  const MatrixView<const T> no_up;
  EXPECT_OK(ActivationForward<T>(activation, on_gate.view(),
                                 IsGated(activation) ? on_up.view() : no_up, out.view(),
                                 device.stream()));
  return device.Read(out);
}

template <typename T>
struct Gradients {
  Matrix<T> gate, up;
};

template <typename T>
Gradients<T> Backward(const TestDevice& device, ActivationFunction activation,
                      const Matrix<T>& gate, const Matrix<T>& up, const Matrix<T>& d_out) {
  const auto on_gate = device.Copy(gate), on_up = device.Copy(up), on_out = device.Copy(d_out);
  const auto d_gate = device.Copy(Matrix<T>(gate.rows(), gate.cols(), up.layout()));
  const auto d_up = device.Copy(Matrix<T>(gate.rows(), gate.cols(), gate.layout()));
  const bool gated = IsGated(activation);
  EXPECT_OK(ActivationBackward<T>(
      activation, on_gate.view(), gated ? on_up.view() : MatrixView<T>(), on_out.view(),
      d_gate.view(), gated ? d_up.view() : MatrixView<T>(), device.stream()));
  return {device.Read(d_gate), device.Read(d_up)};
}

std::string Name(const ::testing::TestParamInfo<Activation>& test) {
  constexpr const char* kNames[] = {"SwiGlu", "GeGlu",         "Relu",
                                    "Relu2",  "ClampedSwiGlu", "GeGluTanh"};
  return kNames[static_cast<int>(test.param)];
}

class ActivationTest : public ::testing::TestWithParam<Activation> {};
INSTANTIATE_TEST_SUITE_P(All, ActivationTest, ::testing::ValuesIn(kActivations), Name);

TEST(ActivationValuesTest, AreThoseComputedByHand) {
  const auto gate = Matrix<float>::Of(1, 4, {-1, 0, 1, 2});
  const Matrix<float> up(1, 4, 2.0f);
  ForEachDevice([&](const TestDevice& device) {
    const auto swiglu = Forward(device, Activation::kSwiGlu, gate, up);
    EXPECT_NEAR(swiglu(0, 0), -0.53788285, 1e-6);  // 2 * -1 / (1 + e)
    EXPECT_EQ(swiglu(0, 1), 0);
    EXPECT_NEAR(swiglu(0, 2), 1.46211716, 1e-6);
    const auto geglu = Forward(device, Activation::kGeGlu, gate, up);
    EXPECT_NEAR(geglu(0, 0), -0.31731051, 1e-6);  // 2 * -1 * P(X <= -1)
    // -(1 + tanh(-0.7978846 * 1.044715)) = -(1 - 0.6823840)
    EXPECT_NEAR(Forward(device, Activation::kGeGluTanh, gate, up)(0, 0), -0.31761602, 1e-6);
    EXPECT_EQ(Forward(device, Activation::kRelu2, gate, up).values(),
              (std::vector<double>{0, 0, 1, 4}));
  });
}

// (u + 1) g sigmoid(1.702 g); sigmoid(1.702) = 0.84579..., and the gate has no lower clamp.
TEST(ClampedSwiGluTest, ValuesInsideAndOutsideBothClampsAreThoseComputedByHand) {
  const auto gate = Matrix<float>::Of(1, 10, {0, 1, 1, 1, 1, 1, 7, 8, 1000, -9});
  const auto up = Matrix<float>::Of(1, 10, {3, 1, 7, 9, -7, -9, 0, 0, -1, 0});
  constexpr double kOut[] = {
      0,           1.691591532, 6.766366127, 6.766366127,    -5.074774596, -5.074774596,
      6.999953128, 6.999953128, 0,           -2.003177987e-6};
  ForEachDevice([&](const TestDevice& device) {
    const auto out = Forward(device, Activation::kClampedSwiGlu, gate, up);
    for (int64_t i = 0; i < 10; ++i) {
      EXPECT_NEAR(out(0, i), kOut[i], 1e-9 + 1e-6 * std::abs(out(0, i))) << i;
    }
    EXPECT_EQ(out(0, 2), out(0, 3));  // at the clamp and beyond it
    EXPECT_EQ(out(0, 4), out(0, 5));
    EXPECT_EQ(out(0, 6), out(0, 7));
  });
}

// alpha 1.3, limit 5: sigmoid(6.5) = 0.998499, sigmoid(1.3) = 0.785835.
TEST(ClampedSwiGluTest, HasTheConstantsItIsGiven) {
  constexpr ActivationFunction kGiven(Activation::kClampedSwiGlu, 1.3f, 5.0f);
  const auto gate = Matrix<float>::Of(1, 3, {6, 1, 1});
  const auto up = Matrix<float>::Of(1, 3, {-9, 5, 2});
  ForEachDevice([&](const TestDevice& device) {
    const auto out = Forward(device, kGiven, gate, up);
    EXPECT_NEAR(out(0, 0), -4 * 5 * 0.998499, 1e-4);
    EXPECT_NEAR(out(0, 1), 6 * 0.785835, 1e-5);
    const auto [d_gate, d_up] = Backward(device, kGiven, gate, up, Matrix<float>(1, 3, 1.0f));
    EXPECT_EQ(d_gate(0, 0), 0);
    EXPECT_EQ(d_up(0, 0), 0);
    EXPECT_NEAR(d_up(0, 1), 0.785835, 1e-6);
    // (g sigmoid(1.3 g))' = sigmoid (1 + 1.3 (1 - sigmoid)) = 1.004623
    EXPECT_NEAR(d_gate(0, 2), 3 * 1.004623, 1e-5);
  });
}

TEST(ClampedSwiGluTest, GradientsPassOnTheClampsAndStopOneUlpOutside) {
  const float above = std::nextafter(7.0f, 8.0f), below = std::nextafter(-7.0f, -8.0f);
  const float ups[] = {2, 7, above, -7, below, kNaN};
  constexpr int64_t kCount = std::size(ups);
  Matrix<float> gate(3, kCount), up(3, kCount), d_out(3, kCount, 1.0f);
  for (int64_t i = 0; i < kCount; ++i) {
    gate.at(0, i) = 1;
    gate.at(1, i) = 7;
    gate.at(2, i) = above;
    for (int64_t r = 0; r < 3; ++r) up.at(r, i) = ups[i];
  }
  constexpr double kSlopeOfOne = 1.067780, kSlopeOfSeven = 1.000073;  // (g sigmoid(1.702 g))'
  constexpr double kUpPlusOne[] = {3, 8, 8, -6, -6};
  constexpr double kGatedOne = 0.845796, kGatedSeven = 6.999953;  // g sigmoid(1.702 g)
  constexpr bool kUpPasses[] = {true, true, false, true, false};
  ForEachDevice([&](const TestDevice& device) {
    const auto [d_gate, d_up] = Backward(device, Activation::kClampedSwiGlu, gate, up, d_out);
    for (int64_t i = 0; i + 1 < kCount; ++i) {
      EXPECT_NEAR(d_gate(0, i), kUpPlusOne[i] * kSlopeOfOne, 1e-5) << i;
      EXPECT_NEAR(d_gate(1, i), kUpPlusOne[i] * kSlopeOfSeven, 1e-5) << i;
      EXPECT_EQ(d_gate(2, i), 0) << i;
      EXPECT_NEAR(d_up(0, i), kUpPasses[i] ? kGatedOne : 0, 1e-5) << i;
      EXPECT_NEAR(d_up(1, i), kUpPasses[i] ? kGatedSeven : 0, 1e-5) << i;
      // the gate's clamp does not affect the other gradient
      EXPECT_EQ(d_up(2, i), d_up(1, i)) << i;
    }
    EXPECT_TRUE(std::isnan(d_gate(0, kCount - 1)));
    EXPECT_EQ(d_up(0, kCount - 1), 0);  // a NaN is in no interval
  });
}

// exp is within 2 roundings (1 ulp); sum, quotient and two products add four, erfc 3 including its
// argument's rounding (6 more on CUDA, whose erfcf is within 4 ulp), which the tail magnifies by up
// to x^2 (30 at |x| = 5.5); the clamped sigmoid's argument has 2, magnified by |1.702 gate| < 12:
// 64 roundings. The tanh form's argument z has 3 and its cubic part 3 more, magnified by |z| < 21:
// 126, and 6 for the rest make 132 roundings.
// Backward: the terms of an activation's slope are below 1 + 0.25 (ReLU^2: 2 |gate| < 7), each with
// at most 16 roundings, times |d_out * up| < 9: 180 roundings; 300 are allowed.
TEST_P(ActivationTest, MatchesFloat64ForAnyWidthAndLayout) {
  const Activation activation = GetParam();
  const double roundings = activation == Activation::kGeGluTanh ? 132 : 64;
  constexpr int64_t kRows = 9;
  ForEachDevice(Simd::kAll, [&](const TestDevice& device) {
    for (const int64_t cols : {1, 7, 8, 16, 37, 277, 1049}) {
      for (const auto& [in, out] : kLayoutPairs) {
        auto gate = Matrix<float>::Random(kRows, cols, in, 1, 1.5);
        const auto up = Matrix<float>::Random(kRows, cols, out, 2);
        const auto d_out = Matrix<float>::Random(kRows, cols, in, 3);
        for (int64_t i = 0; i < kRows * cols; ++i) {  // no difference straddles the kink of ReLU
          float& g = gate.at(i / cols, i % cols);
          if (std::abs(g) < 0.01f) g = i % 2 == 0 ? 0.5f : -0.5f;
        }
        const auto y = Forward(device, activation, gate, up);
        const auto [d_gate, d_up] = Backward(device, activation, gate, up, d_out);
        EXPECT_TRUE(y.edges_intact() && d_gate.edges_intact() && d_up.edges_intact());
        for (int64_t i = 0; i < kRows * cols; ++i) {
          const int64_t r = i / cols, c = i % cols;
          const double want = ActivationReference(activation, gate(r, c), up(r, c));
          EXPECT_NEAR(y(r, c), want, roundings * kFloatRounding * std::abs(want)) << gate(r, c);
          const auto gradient = NumericGradient(
              [&](const auto& x) { return ActivationReference(activation, x[0], x[1]); },
              {gate(r, c), up(r, c)});
          const double bound = 300 * kFloatRounding + 1e-9;
          EXPECT_NEAR(d_gate(r, c), d_out(r, c) * gradient[0], bound) << gate(r, c);
          if (!IsGated(activation)) continue;
          EXPECT_NEAR(d_up(r, c), d_out(r, c) * gradient[1], bound) << gate(r, c);
        }
      }
    }
  });
}

// The products of squared ReLU are exact to one rounding each, on every device.
TEST(SquaredReluTest, HasOneRoundingAProduct) {
  const auto gate = Matrix<float>::Random(7, 21, 1), d_out = Matrix<float>::Random(7, 21, 2);
  ForEachDevice([&](const TestDevice& device) {
    const auto out = Forward(device, Activation::kRelu2, gate, gate);
    const auto d_gate = Backward(device, Activation::kRelu2, gate, gate, d_out).gate;
    for (int64_t i = 0; i < 7 * 21; ++i) {
      const float x = std::max(gate.at(i / 21, i % 21), 0.0f);
      EXPECT_EQ(out.at(i / 21, i % 21), x * x);
      EXPECT_EQ(d_gate.at(i / 21, i % 21), d_out.at(i / 21, i % 21) * (2 * x));
    }
  });
}

// On CPUs; another test has vectors, tails and unaligned rows on CUDA.
TEST_P(ActivationTest, AnElementHasTheSameBitsAnywhereOnEverySimdTargetAndAnyNumberOfThreads) {
  const int64_t rows = 400, cols = 53;
  const auto gate = Matrix<float>::Random(rows, cols, 4, 3),
             up = Matrix<float>::Random(rows, cols, 5, 4);
  const auto d_out = Matrix<float>::Random(rows, cols, 6);
  const TestDevice one{Device()};
  const auto out = Forward(one, GetParam(), gate, up);
  const auto want = Backward(one, GetParam(), gate, up, d_out);
  ForEachDevice([&](const TestDevice& device) {
    if (!device.is_cpu()) return;
    EXPECT_TRUE(SameBits(Forward(device, GetParam(), gate, up), out));
    const auto got = Backward(device, GetParam(), gate, up, d_out);
    EXPECT_TRUE(SameBits(got.gate, want.gate));
    EXPECT_TRUE(SameBits(got.up, want.up));
  });
  // Columns [c, cols) alone: elements of a row's body are now in its tail.
  for (const int64_t c : {1, 20, 45, 52}) {
    const auto cut = [&](const Matrix<float>& all) {
      return all.Cols(c, cols);
    };
    EXPECT_TRUE(SameBits(Forward(one, GetParam(), cut(gate), cut(up)), cut(out)));
    const auto got = Backward(one, GetParam(), cut(gate), cut(up), cut(d_out));
    EXPECT_TRUE(SameBits(got.gate, cut(want.gate)));
    EXPECT_TRUE(SameBits(got.up, cut(want.up)));
  }
}

// Vectors, tails and unaligned rows: an element has the same bits in all of them.
TEST_P(ActivationTest, BFloat16IsTheFloat32ResultRoundedOnceInAnyLayout) {
  constexpr int64_t kRows = 5, kCols = 37;
  ForEachDevice([&](const TestDevice& device) {
    for (const MatrixLayout layout : kLayouts) {
      const auto gate = Matrix<BFloat16>::Random(kRows, kCols, layout, 7, 2);
      const auto up = Matrix<BFloat16>::Random(kRows, kCols, kLayouts[0], 8);
      const auto d_out = Matrix<BFloat16>::Random(kRows, kCols, layout, 9);
      const auto gate32 = gate.template As<float>(), up32 = up.template As<float>();
      EXPECT_TRUE(SameBits(Forward(device, GetParam(), gate, up),
                           Forward(device, GetParam(), gate32, up32).template As<BFloat16>()));
      const auto got = Backward(device, GetParam(), gate, up, d_out);
      const auto wide = Backward(device, GetParam(), gate32, up32, d_out.template As<float>());
      EXPECT_TRUE(SameBits(got.gate, wide.gate.template As<BFloat16>()));
      EXPECT_TRUE(SameBits(got.up, wide.up.template As<BFloat16>()));
    }
  });
}

TEST_P(ActivationTest, GradientsMayOverwriteTheInputs) {
  ForEachDevice([&](const TestDevice& device) {
    for (const MatrixLayout layout : kLayouts) {
      const auto gate = Matrix<float>::Random(3, 29, layout, 1);
      const auto up = Matrix<float>::Random(3, 29, layout, 2);
      const auto d_out = Matrix<float>::Random(3, 29, layout, 3);
      const auto want = Backward(device, GetParam(), gate, up, d_out);
      const auto g = device.Copy(gate), u = device.Copy(up), d = device.Copy(d_out);
      ASSERT_OK(ActivationBackward<float>(GetParam(), g.view(), u.view(), d.view(), g.view(),
                                          u.view(), device.stream()));
      EXPECT_TRUE(SameBits(device.Read(g), want.gate));
      if (IsGated(GetParam())) {
        EXPECT_TRUE(SameBits(device.Read(u), want.up));
      }
    }
  });
}

// Far from zero no intermediate result overflows, and a NaN is preserved.
TEST_P(ActivationTest, ExtremeInputsStayFiniteAndNaNShows) {
  ForEachDevice([&](const TestDevice& device) {
    auto gate = Matrix<float>::Of(1, 4, {1000, -1000, -88.5f, 89});
    const Matrix<float> up(1, 4, 1.0f);
    const auto out = Forward(device, GetParam(), gate, up);
    const auto d_gate = Backward(device, GetParam(), gate, up, up).gate;
    for (int i = 0; i < 4; ++i) {
      EXPECT_NEAR(out(0, i), ActivationReference(GetParam(), gate(0, i), 1),
                  1e-6 * std::abs(out(0, i)) + 1e-30);
      EXPECT_TRUE(std::isfinite(d_gate(0, i))) << gate(0, i);
    }
    gate.at(0, 2) = kNaN;
    const auto with_nan = Forward(device, GetParam(), gate, up);
    EXPECT_TRUE(std::isnan(with_nan(0, 2)));
    EXPECT_FALSE(std::isnan(with_nan(0, 1)));
  });
}

// A launch without blocks would be an error.
TEST_P(ActivationTest, TakesNoRowsAndNoColumns) {
  ForEachDevice([&](const TestDevice& device) {
    for (const auto& none : {Matrix<float>(0, 5), Matrix<float>(3, 0)}) {
      EXPECT_TRUE(Forward(device, GetParam(), none, none).edges_intact());
      EXPECT_TRUE(Backward(device, GetParam(), none, none, none).gate.edges_intact());
      EXPECT_OK(device.stream().Synchronize());
    }
  });
}

TEST(ActivationArgumentsTest, ShapesMustAgree) {
  const TestDevice device{Device()};
  Matrix<float> a(2, 3), b(2, 4), c(3, 3);
  const auto forward = [&](Activation activation, auto& gate, auto& up, auto& out) {
    return ActivationForward<float>(activation, gate.view(), up.view(), out.view(),
                                    device.stream());
  };
  const auto backward = [&](auto& d_out, auto& d_up) {
    return ActivationBackward<float>(Activation::kSwiGlu, a.view(), a.view(), d_out.view(),
                                     a.view(), d_up.view(), device.stream());
  };
  ExpectRefused(forward(Activation::kSwiGlu, a, b, a),
                "ActivationForward: up is [2, 4] with stride 7, expected [2, 3]");
  ExpectRefused(forward(Activation::kRelu, a, a, c),
                "ActivationForward: out is [3, 3] with stride 6, expected [2, 3]");
  ExpectRefused(backward(a, c),
                "ActivationBackward: d_up is [3, 3] with stride 6, expected [2, 3]");
  ExpectRefused(backward(b, a),
                "ActivationBackward: d_out is [2, 4] with stride 7, expected [2, 3]");
  EXPECT_OK(forward(Activation::kSwiGlu, a, a, a));  // the stream stays usable
}

}  // namespace
}  // namespace moe::testing
