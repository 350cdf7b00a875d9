// kernels/row_gate: the gate of a shared expert and its gradients, on every device.
#include "kernels/row_gate/row_gate.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/base/fixed_dot.h"
#include "tests/kernels/device_memory.h"

namespace moe::testing {
namespace {

template <typename T>
class RowGateTest : public ::testing::Test {};
TYPED_TEST_SUITE(RowGateTest, StorageTypes);

template <typename T>
struct Forward {
  Matrix<T> y;
  std::vector<float> gate;
  Forward(const TestDevice& device, const Matrix<T>& rows, const std::vector<float>& logits,
          const Matrix<T>& old) {
    const auto from = device.Copy(rows), to = device.Copy(old);
    const auto logit = device.Copy(logits);
    const auto of_row = device.Copy(std::vector<float>(logits.size(), -1.0f));
    EXPECT_OK(RowGate<T>(from.view(), logit.span(), of_row.span(), to.view(), device.stream()));
    y = device.Read(to);
    gate = device.Read(of_row);
  }
};

template <typename T>
struct Gradients {
  Matrix<T> rows, weight, dy, d_rows, dx;
  std::vector<float> gate, d_logit = std::vector<float>(gate.size(), NAN);

  void Compute(const TestDevice& device) {
    const auto on_rows = device.Copy(rows), on_weight = device.Copy(weight),
               on_dy = device.Copy(dy);
    const auto to_rows = device.Copy(d_rows), to_x = device.Copy(dx);
    const auto on_gate = device.Copy(gate), to_logit = device.Copy(d_logit);
    EXPECT_OK(RowGateBackward<T>({.rows = on_rows.view(),
                                  .gate = on_gate.span(),
                                  .weight = on_weight.view(),
                                  .dy = on_dy.view(),
                                  .d_rows = to_rows.view(),
                                  .d_logit = to_logit.span(),
                                  .dx = to_x.view()},
                                 device.stream()));
    d_rows = device.Read(to_rows);
    dx = device.Read(to_x);
    d_logit = device.Read(to_logit);
  }

  void Loop() {
    for (int64_t t = 0; t < rows.rows(); ++t) {
      const double g = gate[t];
      const double d_gate = WideDot<T>(dy.view().row(t), rows.view().row(t), rows.cols());
      d_logit[t] = static_cast<float>(d_gate * g * (1 - g));
      for (int64_t h = 0; h < rows.cols(); ++h) {
        d_rows.at(t, h) = T(gate[t] * static_cast<float>(dy.at(t, h)));
        dx.at(t, h) = T(std::fma(d_logit[t], static_cast<float>(weight.at(0, h)),
                                 static_cast<float>(dx.at(t, h))));
      }
    }
  }
};

template <typename T>
std::vector<float> WeightGradient(const TestDevice& device, const Matrix<T>& x,
                                  const std::vector<float>& d_logit, const std::vector<float>& old,
                                  Write write) {
  const auto rows = device.Copy(x);
  const auto terms = device.Copy(d_logit), d_weight = device.Copy(old);
  EXPECT_OK(
      RowGateWeightGradient<T>(rows.view(), terms.span(), d_weight.span(), write, device.stream()));
  return device.Read(d_weight);
}

TYPED_TEST(RowGateTest, GateByHand) {
  using T = TypeParam;
  const auto rows = Matrix<T>::Of(3, 2, {2, 4, -6, 8, 5, 7});
  ForEachDevice([&](const TestDevice& device) {
    const Forward<T> forward(device, rows, {0, 1000, -1000}, Matrix<T>(3, 2, 10.0f));
    EXPECT_EQ(forward.gate, (std::vector<float>{0.5f, 1, 0}));
    EXPECT_EQ(forward.y.values(), (std::vector<double>{1, 2, -6, 8, 0, 0}));

    Gradients<T> backward = {.rows = rows,
                             .weight = Matrix<T>::Of(1, 2, {1, -2}),
                             .dy = Matrix<T>::Of(3, 2, {1, 0.5f, 3, 1, 9, 9}),
                             .d_rows = Matrix<T>(3, 2, 10.0f),
                             .dx = Matrix<T>(3, 2, 10.0f),
                             .gate = forward.gate};
    backward.Compute(device);
    // (1 * 2 + 0.5 * 4) * 0.5 * 0.5; a gate of 0 or 1 has no slope.
    EXPECT_EQ(backward.d_logit, (std::vector<float>{1, 0, 0}));
    EXPECT_EQ(backward.d_rows.values(), (std::vector<double>{0.5, 0.25, 3, 1, 0, 0}));
    EXPECT_EQ(backward.dx.values(), (std::vector<double>{11, 8, 10, 10, 10, 10}));

    EXPECT_EQ(WeightGradient(device, rows, {1, -1, 2}, {100, 200}, Write::kAdd),
              (std::vector<float>{118, 210}));
    EXPECT_EQ(WeightGradient(device, rows, {1, -1, 2}, {100, 200}, Write::kOverwrite),
              (std::vector<float>{18, 10}));
  });
}

// A GPU's exponential is within 2 ulps of float64, so that a gate is the sigmoid rounded to
// float32, or its neighbour if the sigmoid is nearly halfway: less than 2 roundings. The smallest
// gates are subnormal.
TYPED_TEST(RowGateTest, ForwardEqualsThePlainLoopForAnyWidthAndLayout) {
  using T = TypeParam;
  const auto check = [](const TestDevice& device, int64_t tokens, int64_t cols, MatrixLayout in,
                        MatrixLayout out) {
    auto logit = RandomFloats(tokens, 1, 4);
    logit[3] = 200;  // its exponential exceeds float32
    logit[4] = -200;
    logit[5] = 1000;  // and float64
    logit[6] = -1000;
    const auto rows = Matrix<T>::Random(tokens, cols, in, 2);
    const Forward<T> got(device, rows, logit, Matrix<T>(tokens, cols, out));
    ASSERT_EQ(got.gate.size(), logit.size());
    Matrix<T> want(tokens, cols, out);
    for (int64_t t = 0; t < tokens; ++t) {
      const double sigmoid = 1 / (1 + std::exp(-double{logit[t]}));
      EXPECT_NEAR(got.gate[t], sigmoid, 2 * kFloatRounding * sigmoid + 0x1p-149);
      if (device.has_host_math()) {
        EXPECT_EQ(got.gate[t], static_cast<float>(sigmoid));
      }
      for (int64_t h = 0; h < cols; ++h) {
        want.at(t, h) = T(got.gate[t] * static_cast<float>(rows.at(t, h)));
      }
    }
    EXPECT_TRUE(SameBits(got.y, want)) << "H=" << cols;
  };
  ForEachDevice([&](const TestDevice& device) {
    for (const int64_t cols : {1, 7, 16, 37, 277, 1049}) {
      for (const auto& [in, out] : kLayoutPairs) check(device, 13, cols, in, out);
    }
    check(device, 70, 21, {}, {});  // more rows than a task of the CPU has
  });
}

// The `odd` matrix has a layout of its own, which prevents whole vectors in all of them.
TYPED_TEST(RowGateTest, BackwardEqualsThePlainLoopForAnyWidthAndLayout) {
  using T = TypeParam;
  enum Odd { kWeight, kDy, kDRows, kDx, kOdds };
  const auto check = [](const TestDevice& device, int64_t tokens, int64_t cols, MatrixLayout most,
                        MatrixLayout one, int odd) {
    const auto layout = [&](Odd matrix) {
      return matrix == odd ? one : most;
    };
    Gradients<T> got = {.rows = Matrix<T>::Random(tokens, cols, one, 1),
                        .weight = Matrix<T>::Random(1, cols, layout(kWeight), 2),
                        .dy = Matrix<T>::Random(tokens, cols, layout(kDy), 3),
                        .d_rows = Matrix<T>(tokens, cols, layout(kDRows)),
                        .dx = Matrix<T>::Random(tokens, cols, layout(kDx), 4),
                        .gate = RandomFloats(tokens, 5)};
    for (float& g : got.gate) g = 1 / (1 + std::exp(g));
    auto want = got;
    got.Compute(device);
    want.Loop();
    EXPECT_TRUE(SameBits(got.d_rows, want.d_rows)) << "H=" << cols;
    EXPECT_TRUE(SameBits(got.dx, want.dx)) << "H=" << cols;
    EXPECT_TRUE(SameBits(got.d_logit, want.d_logit)) << "H=" << cols;
  };
  ForEachDevice([&](const TestDevice& device) {
    for (const int64_t cols : {1, 16, 37, 277}) {
      for (const auto& [most, one] : kLayoutPairs) {
        for (int odd = 0; odd < kOdds; ++odd) check(device, 13, cols, most, one, odd);
      }
    }
    check(device, 70, 21, {}, {}, kOdds);
  });
}

TYPED_TEST(RowGateTest, WeightGradientEqualsThePlainLoopForAnyShapeAndLayout) {
  using T = TypeParam;
  const auto check = [](const TestDevice& device, int64_t rows, int64_t cols, MatrixLayout layout,
                        Write write) {
    const auto d_logit = RandomFloats(rows, 1), old = RandomFloats(cols, 3);
    const auto x = Matrix<T>::Random(rows, cols, layout, 2);
    auto want = old;
    for (int64_t h = 0; h < cols; ++h) {
      if (write == Write::kOverwrite) want[h] = 0;
      for (int64_t t = 0; t < rows; ++t) {
        want[h] = std::fma(d_logit[t], static_cast<float>(x.at(t, h)), want[h]);
      }
    }
    EXPECT_TRUE(SameBits(WeightGradient(device, x, d_logit, old, write), want))
        << rows << " " << cols;
  };
  ForEachDevice([&](const TestDevice& device) {
    for (const MatrixLayout layout : kLayouts) {
      for (const Write write : {Write::kOverwrite, Write::kAdd}) {
        for (const int64_t cols : {1, 65, 130}) check(device, 70, cols, layout, write);
        check(device, 0, 5, layout, write);
      }
    }
  });
}

TYPED_TEST(RowGateTest, TakesNoRowsAndNoColumnsStillGiveGates) {
  using T = TypeParam;
  ForEachDevice([](const TestDevice& device) {
    for (const int64_t rows : {0, 1}) {
      const auto n = static_cast<size_t>(rows);
      const Matrix<T> empty(rows, rows == 0 ? 4 : 0);
      EXPECT_EQ(Forward<T>(device, empty, std::vector<float>(n, 0.0f), empty).gate,
                std::vector<float>(n, 0.5f));
      Gradients<T> backward = {.rows = empty,
                               .weight = Matrix<T>(1, empty.cols()),
                               .dy = empty,
                               .d_rows = empty,
                               .dx = empty,
                               .gate = std::vector<float>(n, 0.5f)};
      backward.Compute(device);
      EXPECT_EQ(backward.d_logit, std::vector<float>(n, 0.0f));
    }
    EXPECT_TRUE(WeightGradient(device, Matrix<T>(1, 0), {0}, {}, Write::kOverwrite).empty());
    EXPECT_OK(device.stream().Synchronize());
  });
}

TEST(RowGateArgumentsTest, WrongShapesAreRefused) {
  ForEachDevice([](const TestDevice& device) {
    Stream& stream = device.stream();
    const MatrixView<float> two(nullptr, 2, 2), wide(nullptr, 2, 3);
    const auto numbers = device.Copy<float>({1, 2});
    ExpectRefused(RowGate<float>(two, {}, numbers.span(), two, stream),
                  "RowGate: logit is [0], expected [2]");
    ExpectRefused(RowGateBackward<float>({.rows = two, .gate = {}}, stream),
                  "RowGateBackward: gate is [0], expected [2]");
    ExpectRefused(RowGateWeightGradient<float>(wide, {}, numbers.span(), Write::kAdd, stream),
                  "RowGateWeightGradient: d_logit is [0], expected [2]");
  });
}

}  // namespace
}  // namespace moe::testing
