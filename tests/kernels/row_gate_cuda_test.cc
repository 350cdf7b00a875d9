// kernels/row_gate on the simulated GPU: the bits of the contract, in plain loops.
#include "kernels/row_gate/row_gate_cuda.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/base/fixed_dot.h"
#include "tests/cusim/schedules.h"

namespace moe {
namespace {

using cusim::DeviceMatrix;
using cusim::Layout;

template <typename T>
class RowGateCudaTest : public ::testing::Test {};
using Types = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(RowGateCudaTest, Types);

constexpr int64_t kRows = 13;

// The simulator's exponential is the CPU's.
TYPED_TEST(RowGateCudaTest, ForwardEqualsThePlainLoopForAnyWidthLayoutAndSchedule) {
  using T = TypeParam;
  auto logit = cusim::RandomFloats(kRows, 1);
  logit[3] = 200;  // its exponential is no float32
  logit[4] = -200;
  logit[5] = 1000;  // and no float64
  logit[6] = -1000;
  const auto check = [&](int64_t cols, Layout in, Layout out) {
    const auto rows = DeviceMatrix<T>::Random(kRows, cols, in, 2);
    DeviceMatrix<T> got(kRows, cols, out), want(kRows, cols, out);
    std::vector<float> got_gate(kRows, NAN), want_gate(kRows);
    for (int64_t t = 0; t < kRows; ++t) {
      want_gate[t] = static_cast<float>(1 / (1 + std::exp(-double{logit[t]})));
      for (int64_t h = 0; h < cols; ++h) {
        want.view()(t, h) = T(want_gate[t] * static_cast<float>(rows.view()(t, h)));
      }
    }
    ASSERT_EQ(row_gate::Run(
                  row_gate::CudaForward<T>{rows.view(), logit.data(), got_gate.data(), got.view()},
                  nullptr),
              cudaSuccess);
    EXPECT_TRUE(got == want) << "H=" << cols;
    EXPECT_EQ(got_gate, want_gate) << "H=" << cols;
  };
  cusim::ForSeeds([&] {
    for (const int64_t cols : {1, 7, 16, 37, 277}) {
      for (const auto& [in, out] : cusim::kLayoutPairs) check(cols, in, out);
    }
  });
}

// Forward's results, and room for the kernel's and the loop's. The `odd` matrix has a layout of its
// own, which keeps whole vectors from all of them.
template <typename T>
struct Backward {
  enum Odd { kWeight, kDy, kDRows, kDx, kOdds };
  Backward(int64_t cols, Layout most, Layout one, int odd)
      : rows(DeviceMatrix<T>::Random(kRows, cols, one, 1)),  // read element by element
        weight(DeviceMatrix<T>::Random(1, cols, odd == kWeight ? one : most, 2)),
        dy(DeviceMatrix<T>::Random(kRows, cols, odd == kDy ? one : most, 3)),
        d_rows(kRows, cols, odd == kDRows ? one : most),
        dx(DeviceMatrix<T>::Random(kRows, cols, odd == kDx ? one : most, 4)) {
    for (float& g : gate) g = 1 / (1 + std::exp(g));
  }

  void Run() {
    const row_gate::CudaBackward<T> backward = {.rows = rows.view(),
                                                .gate = gate.data(),
                                                .weight = weight.view().data(),
                                                .dy = dy.view(),
                                                .d_rows = d_rows.view(),
                                                .d_logit = d_logit.data(),
                                                .dx = dx.view()};
    ASSERT_EQ(row_gate::Run(backward, nullptr), cudaSuccess);
  }

  void Loop() {
    const int64_t cols = rows.view().cols();
    for (int64_t t = 0; t < kRows; ++t) {
      const double g = gate[t];
      const double d_gate = WideDot<T>(dy.view().row(t), rows.view().row(t), cols);
      d_logit[t] = static_cast<float>(d_gate * g * (1 - g));
      for (int64_t h = 0; h < cols; ++h) {
        d_rows.view()(t, h) = T(gate[t] * static_cast<float>(dy.view()(t, h)));
        T& element = dx.view()(t, h);
        element = T(std::fma(d_logit[t], static_cast<float>(weight.view()(0, h)),
                             static_cast<float>(element)));
      }
    }
  }

  DeviceMatrix<T> rows, weight, dy, d_rows, dx;
  std::vector<float> gate = cusim::RandomFloats(kRows, 5);
  std::vector<float> d_logit = std::vector<float>(kRows, NAN);
};

TYPED_TEST(RowGateCudaTest, BackwardEqualsThePlainLoopForAnyWidthLayoutAndSchedule) {
  using T = TypeParam;
  const auto check = [](int64_t cols, Layout most, Layout one, int odd) {
    Backward<T> got(cols, most, one, odd), want(cols, most, one, odd);
    got.Run();
    want.Loop();
    EXPECT_TRUE(got.d_rows == want.d_rows) << "H=" << cols;
    EXPECT_TRUE(got.dx == want.dx) << "H=" << cols;
    EXPECT_EQ(got.d_logit, want.d_logit) << "H=" << cols;
  };
  cusim::ForSeeds([&] {
    for (const int64_t cols : {1, 16, 37, 277}) {
      for (const auto& [most, one] : cusim::kLayoutPairs) {
        for (int odd = 0; odd < Backward<T>::kOdds; ++odd) check(cols, most, one, odd);
      }
    }
  });
}

// 2^24 + 2^-6 - 2^24, in one partial sum: float32 has no room for 2^-6.
TYPED_TEST(RowGateCudaTest, GateGradientSurvivesCancellation) {
  using T = TypeParam;
  std::vector<T> rows(48, T(0.0f)), dy(48, T(1.0f)), d_rows(48), dx(48), weight(48);
  rows[5] = dy[5] = dy[37] = T(4096.0f);
  rows[21] = T(0.015625f);
  rows[37] = T(-4096.0f);
  const float gate = 0.5f;
  float d_logit = 0;
  ASSERT_EQ(row_gate::Run(row_gate::CudaBackward<T>{.rows = {rows.data(), 1, 48},
                                                    .gate = &gate,
                                                    .weight = weight.data(),
                                                    .dy = {dy.data(), 1, 48},
                                                    .d_rows = {d_rows.data(), 1, 48},
                                                    .d_logit = &d_logit,
                                                    .dx = {dx.data(), 1, 48}},
                          nullptr),
            cudaSuccess);
  EXPECT_EQ(d_logit, 0.015625f / 4);
}

TYPED_TEST(RowGateCudaTest, WeightGradientEqualsThePlainLoopForAnyShapeLayoutAndSchedule) {
  using T = TypeParam;
  const auto d_logit = cusim::RandomFloats(70, 1);
  const auto check = [&](int64_t rows, int64_t cols, Layout layout, Write write) {
    const auto x = DeviceMatrix<T>::Random(rows, cols, layout, 2);
    auto got = DeviceMatrix<float>::Random(1, cols, layout, 3), want = got;
    for (int64_t h = 0; h < cols; ++h) {
      float& sum = want.view()(0, h);
      if (write == Write::kOverwrite) sum = 0;
      for (int64_t t = 0; t < rows; ++t) {
        sum = std::fma(d_logit[t], static_cast<float>(x.view()(t, h)), sum);
      }
    }
    ASSERT_EQ(row_gate::Run(row_gate::CudaWeightGradient<T>{x.view(), d_logit.data(),
                                                            got.view().data(), write},
                            nullptr),
              cudaSuccess);
    EXPECT_TRUE(got == want) << rows << " " << cols;
  };
  cusim::ForSeeds([&] {
    for (const Layout layout : cusim::kLayouts) {
      for (const Write write : {Write::kOverwrite, Write::kAdd}) {
        for (const int64_t cols : {1, 65, 130}) check(70, cols, layout, write);
        check(0, 5, layout, write);
      }
    }
  });
}

TYPED_TEST(RowGateCudaTest, NothingIsLaunchedForNoRowsAndNoColumnsStillGiveGates) {
  using T = TypeParam;
  const MatrixView<T> no_rows(nullptr, 0, 4), no_columns(nullptr, 1, 0);
  const float logit = 0;
  float gate = -1, d_logit = -1;
  row_gate::CudaForward<T> forward = {no_rows, &logit, &gate, no_rows};
  EXPECT_EQ(row_gate::Run(forward, nullptr), cudaSuccess);
  EXPECT_EQ(gate, -1);
  forward.rows = forward.y = no_columns;
  EXPECT_EQ(row_gate::Run(forward, nullptr), cudaSuccess);
  EXPECT_EQ(gate, 0.5f);

  row_gate::CudaBackward<T> backward = {.rows = no_rows,
                                        .gate = &gate,
                                        .weight = nullptr,
                                        .dy = no_rows,
                                        .d_rows = no_rows,
                                        .d_logit = &d_logit,
                                        .dx = no_rows};
  EXPECT_EQ(row_gate::Run(backward, nullptr), cudaSuccess);
  EXPECT_EQ(d_logit, -1);
  backward.rows = backward.dy = backward.d_rows = backward.dx = no_columns;
  EXPECT_EQ(row_gate::Run(backward, nullptr), cudaSuccess);
  EXPECT_EQ(d_logit, 0);
  EXPECT_EQ(
      row_gate::Run(row_gate::CudaWeightGradient<T>{no_columns, &logit, nullptr, {}}, nullptr),
      cudaSuccess);
}

}  // namespace
}  // namespace moe
