// kernels/swiglu on the simulated GPU: against float64, with the bounds of activation_test.cc.
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/swiglu/swiglu_cuda.h"
#include "tests/cusim/schedules.h"
#include "tests/kernels/activation_oracle.h"
#include "tests/kernels/gradcheck.h"

namespace moe {
namespace {

using cusim::DeviceMatrix;
using cusim::Layout;
using testing::ActivationReference;

constexpr double kFloatRounding = 0x1p-24;
constexpr int64_t kRows = 9;

template <typename T>
struct Problem {
  Problem(int64_t cols, Layout in, Layout out, float scale = 1.5f)
      : gate(DeviceMatrix<T>::Random(kRows, cols, in, 1, scale)),
        up(DeviceMatrix<T>::Random(kRows, cols, out, 2)),
        d_out(DeviceMatrix<T>::Random(kRows, cols, in, 3)),
        y(kRows, cols, out),
        d_gate(kRows, cols, out),
        d_up(kRows, cols, in) {}

  void Run(Activation activation) {
    const MatrixView<const T> no_up;
    const auto up_view = IsGated(activation) ? std::as_const(up).view() : no_up;
    ASSERT_EQ(
        swiglu::Run(activation, swiglu::CudaForward<T>{gate.view(), up_view, y.view()}, nullptr),
        cudaSuccess);
    ASSERT_EQ(
        swiglu::Run(activation,
                    swiglu::CudaBackward<T>{gate.view(), up_view, d_out.view(), d_gate.view(),
                                            IsGated(activation) ? d_up.view() : MatrixView<T>()},
                    nullptr),
        cudaSuccess);
  }

  DeviceMatrix<T> gate, up, d_out, y, d_gate, d_up;
};

class ActivationCudaTest : public ::testing::TestWithParam<Activation> {};
INSTANTIATE_TEST_SUITE_P(All, ActivationCudaTest, ::testing::ValuesIn(testing::kActivations),
                         [](const ::testing::TestParamInfo<Activation>& test) {
                           return std::string(testing::NameOf(test.param));
                         });

// d/d gate and d/d up of one element, by finite differences in float64.
std::vector<double> Gradient(Activation activation, double gate, double up) {
  return testing::NumericGradient(
      [&](const std::vector<double>& x) { return ActivationReference(activation, x[0], x[1]); },
      {gate, up});
}

// 64 roundings forward as in activation_test.cc: CUDA's expf is within 2 roundings as the CPU's is.
// Its erfcf is within 4 ulp where the CPU's fit is within 1.2e-7: 6 roundings more, which 64 has
// room for. Backward at most 300 of a value near 1, for |gate| < 6 times |d_out| < 4 as there.
TEST_P(ActivationCudaTest, MatchesFloat64ForAnyWidthLayoutAndSchedule) {
  const Activation activation = GetParam();
  const auto check = [&](int64_t cols, Layout in, Layout out) {
    Problem<float> p(cols, in, out);
    for (int64_t c = 0; c < cols; ++c) {  // the differences must not straddle the kink of ReLU
      for (int64_t r = 0; r < kRows; ++r) {
        if (std::abs(p.gate.view()(r, c)) < 0.01f) p.gate.view()(r, c) = 0.5f;
      }
    }
    p.Run(activation);
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        const double gate = p.gate.view()(r, c), up = p.up.view()(r, c);
        const double d_out = p.d_out.view()(r, c);
        const double y = ActivationReference(activation, gate, up);
        const auto gradient = Gradient(activation, gate, up);
        EXPECT_NEAR(p.y.view()(r, c), y, 64 * kFloatRounding * std::abs(y)) << gate;
        EXPECT_NEAR(p.d_gate.view()(r, c), d_out * gradient[0], 300 * kFloatRounding + 1e-9);
        if (!IsGated(activation)) continue;
        EXPECT_NEAR(p.d_up.view()(r, c), d_out * gradient[1], 300 * kFloatRounding + 1e-9);
      }
    }
  };
  cusim::ForSeeds([&] {
    for (const int64_t cols : {1, 8, 37, 277}) {
      for (const auto& [in, out] : cusim::kLayoutPairs) check(cols, in, out);
    }
  });
}

// Vectors, tails and unaligned rows: an element has the same bits in all of them.
TEST_P(ActivationCudaTest, BFloat16IsTheFloat32ResultRoundedOnceInAnyLayout) {
  for (const Layout layout : cusim::kLayouts) {
    Problem<BFloat16> p(37, layout, cusim::kLayouts[0]);
    Problem<float> p32(37, cusim::kLayouts[0], layout);
    const auto widen = [](const DeviceMatrix<BFloat16>& from, DeviceMatrix<float>& to) {
      for (int64_t r = 0; r < kRows; ++r) {
        for (int64_t c = 0; c < 37; ++c) {
          to.view()(r, c) = static_cast<float>(from.view()(r, c));
        }
      }
    };
    widen(p.gate, p32.gate);
    widen(p.up, p32.up);
    widen(p.d_out, p32.d_out);
    p.Run(GetParam());
    p32.Run(GetParam());
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t c = 0; c < 37; ++c) {
        EXPECT_EQ(p.y.view()(r, c), BFloat16(p32.y.view()(r, c)));
        EXPECT_EQ(p.d_gate.view()(r, c), BFloat16(p32.d_gate.view()(r, c)));
        EXPECT_EQ(p.d_up.view()(r, c), BFloat16(p32.d_up.view()(r, c)));
      }
    }
  }
}

TEST_P(ActivationCudaTest, GradientsMayOverwriteTheInputs) {
  for (const Layout layout : cusim::kLayouts) {
    Problem<float> p(29, layout, layout);
    p.Run(GetParam());
    auto gate = p.gate, up = p.up;
    ASSERT_EQ(swiglu::Run(GetParam(),
                          swiglu::CudaBackward<float>{gate.view(), up.view(), p.d_out.view(),
                                                      gate.view(), up.view()},
                          nullptr),
              cudaSuccess);
    EXPECT_TRUE(gate == p.d_gate);
    if (IsGated(GetParam())) {
      EXPECT_TRUE(up == p.d_up);
    }
  }
}

// Far from zero nothing overflows on the way, and a NaN is not lost.
TEST_P(ActivationCudaTest, ExtremeInputsStayFiniteAndNaNShows) {
  std::vector<float> gate = {1000, -1000, -88.5f, 89}, up(4, 1.0f), out(4), d_gate(4), d_up(4);
  const auto row = [](std::vector<float>& v) {
    return MatrixView<float>(v.data(), 1, 4);
  };
  const auto run = [&] {
    EXPECT_EQ(
        swiglu::Run(GetParam(), swiglu::CudaForward<float>{row(gate), row(up), row(out)}, nullptr),
        cudaSuccess);
    EXPECT_EQ(swiglu::Run(
                  GetParam(),
                  swiglu::CudaBackward<float>{row(gate), row(up), row(up), row(d_gate), row(d_up)},
                  nullptr),
              cudaSuccess);
  };
  run();
  for (int i = 0; i < 4; ++i) {
    EXPECT_NEAR(out[i], ActivationReference(GetParam(), gate[i], 1),
                1e-6 * std::abs(out[i]) + 1e-30);
    EXPECT_TRUE(std::isfinite(d_gate[i])) << gate[i];
  }
  gate[2] = std::numeric_limits<float>::quiet_NaN();
  run();
  EXPECT_TRUE(std::isnan(out[2]));
  EXPECT_FALSE(std::isnan(out[1]));
}

// (u + 1) g sigmoid(1.702 g), inside and outside both clamps, as in activation_test.cc.
TEST(ClampedSwiGluCudaTest, ValuesAreThoseComputedByHand) {
  std::vector<float> gate = {1, 1, 1, 1, 1, 7, 8, 1000, -9};
  std::vector<float> up = {1, 7, 9, -7, -9, 0, 0, -1, 0};
  const std::vector<double> want = {1.691591532,    6.766366127, 6.766366127, -5.074774596,
                                    -5.074774596,   6.999953128, 6.999953128, 0,
                                    -2.003177987e-6};
  std::vector<float> out(9);
  const auto row = [](std::vector<float>& v) {
    return MatrixView<float>(v.data(), 1, 9);
  };
  ASSERT_EQ(swiglu::Run(Activation::kClampedSwiGlu,
                        swiglu::CudaForward<float>{row(gate), row(up), row(out)}, nullptr),
            cudaSuccess);
  for (int i = 0; i < 9; ++i) EXPECT_NEAR(out[i], want[i], 1e-9 + 1e-6 * std::abs(want[i])) << i;
}

// Clamps: on them, one unit in the last place outside, and a NaN, which lies in no interval.
TEST(ClampedSwiGluCudaTest, GradientsPassOnTheClampsAndStopOneUlpOutside) {
  const float above = std::nextafter(7.0f, 8.0f), nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> gate = {7, above, 1, 1, 1, 1}, up = {2, 2, 7, above, -above, nan};
  std::vector<float> ones(6, 1.0f), d_gate(6), d_up(6);
  const auto row = [](std::vector<float>& v) {
    return MatrixView<float>(v.data(), 1, 6);
  };
  ASSERT_EQ(swiglu::Run(
                Activation::kClampedSwiGlu,
                swiglu::CudaBackward<float>{row(gate), row(up), row(ones), row(d_gate), row(d_up)},
                nullptr),
            cudaSuccess);
  EXPECT_NEAR(d_gate[0], 3 * 1.000073, 1e-5);  // (g sigmoid(1.702 g))' at 7, times up + 1
  EXPECT_EQ(d_gate[1], 0);
  EXPECT_NEAR(d_up[2], 0.845796, 1e-5);  // g sigmoid(1.702 g) at 1
  EXPECT_EQ(d_up[3], 0);
  EXPECT_EQ(d_up[4], 0);
  EXPECT_TRUE(std::isnan(d_gate[5]));
  EXPECT_EQ(d_up[5], 0);
}

TEST(ActivationArgumentsCudaTest, NothingIsLaunchedForNoRowsOrNoColumns) {
  for (const Activation activation : testing::kActivations) {
    for (const MatrixView<float> none :
         {MatrixView<float>(nullptr, 0, 3), MatrixView<float>(nullptr, 3, 0)}) {
      EXPECT_EQ(swiglu::Run(activation, swiglu::CudaForward<float>{none, none, none}, nullptr),
                cudaSuccess);
      EXPECT_EQ(swiglu::Run(activation, swiglu::CudaBackward<float>{none, none, none, none, none},
                            nullptr),
                cudaSuccess);
    }
  }
}

}  // namespace
}  // namespace moe
