// kernels/norm on the simulated GPU: the bits of the contract, in plain loops.
#include "kernels/norm/rms_norm_cuda.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "tests/cusim/schedules.h"

namespace moe {
namespace {

using cusim::DeviceMatrix;
using cusim::Layout;

constexpr float kEpsilon = 1e-5f;

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
void ForwardReference(const rms_norm::CudaForward<T>& f) {
  for (int64_t t = 0; t < f.x.rows(); ++t) {
    const auto x = [&](int64_t h) {
      return static_cast<float>(f.x(t, h));
    };
    const auto n = static_cast<float>(f.x.cols());
    f.rstd[t] = 1.0f / std::sqrt(FixedDotInPlainLoops(f.x.cols(), x, x) / n + f.epsilon);
    for (int64_t h = 0; h < f.x.cols(); ++h) f.y(t, h) = T(x(h) * f.rstd[t] * f.weight[h]);
  }
}

template <typename T>
void BackwardReference(const rms_norm::CudaBackward<T>& b) {
  std::vector<float> sum(b.x.cols());
  for (int64_t t = 0; t < b.x.rows(); ++t) {
    const auto x = [&](int64_t h) {
      return static_cast<float>(b.x(t, h));
    };
    const auto scaled = [&](int64_t h) {
      return static_cast<float>(b.dy(t, h)) * b.weight[h];
    };
    const float dot = FixedDotInPlainLoops(b.x.cols(), scaled, x);
    const float slope = b.rstd[t] * b.rstd[t] * (dot / static_cast<float>(b.x.cols()));
    for (int64_t h = 0; h < b.x.cols(); ++h) {
      const float gradient = b.rstd[t] * std::fma(-x(h), slope, scaled(h));
      const float old = b.write_dx == Write::kAdd ? static_cast<float>(b.dx(t, h)) : 0.0f;
      sum[h] = std::fma(static_cast<float>(b.dy(t, h)) * x(h), b.rstd[t], sum[h]);
      b.dx(t, h) = T(b.write_dx == Write::kAdd ? old + gradient : gradient);
    }
  }
  for (int64_t h = 0; h < b.x.cols(); ++h) {
    b.d_weight[h] = b.write_d_weight == Write::kAdd ? b.d_weight[h] + sum[h] : sum[h];
  }
}

template <typename T>
class RmsNormCudaTest : public ::testing::Test {};
using Types = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(RmsNormCudaTest, Types);

// rms of (3, 4) is sqrt(12.5); weights 2 and 10.
TYPED_TEST(RmsNormCudaTest, NormalisesARowByHand) {
  using T = TypeParam;
  const std::vector<T> x = {T(3.0f), T(4.0f)};
  const std::vector<float> weight = {2, 10};
  std::vector<T> y(2);
  float rstd = 0;
  ASSERT_EQ(
      rms_norm::Run(
          rms_norm::CudaForward<T>{{x.data(), 1, 2}, weight.data(), 0.0f, {y.data(), 1, 2}, &rstd},
          nullptr),
      cudaSuccess);
  const double expected = 1 / std::sqrt(12.5);
  EXPECT_NEAR(rstd, expected, 1e-7);
  const double rounding = std::is_same_v<T, BFloat16> ? 0x1p-8 : sizeof(T) == 2 ? 0x1p-11 : 0x1p-22;
  EXPECT_NEAR(static_cast<float>(y[0]), 6 * expected, rounding * 6 * expected);
  EXPECT_NEAR(static_cast<float>(y[1]), 40 * expected, rounding * 40 * expected);
}

TYPED_TEST(RmsNormCudaTest, HasTheBitsOfTheContractForAnyWidthLayoutAndSchedule) {
  using T = TypeParam;
  const int64_t rows = 19;
  const auto check = [&](int64_t cols, Layout in, Layout out) {
    const auto x = DeviceMatrix<T>::Random(rows, cols, in, 1, 2);
    const auto dy = DeviceMatrix<T>::Random(rows, cols, out, 2);
    const auto weight = cusim::RandomFloats(cols, 3), d_old = cusim::RandomFloats(cols, 4);
    DeviceMatrix<T> y_got(rows, cols, out), y_want = y_got;
    std::vector<float> rstd(rows), rstd_want(rows);
    ForwardReference<T>({x.view(), weight.data(), kEpsilon, y_want.view(), rstd_want.data()});
    ASSERT_EQ(rms_norm::Run(rms_norm::CudaForward<T>{x.view(), weight.data(), kEpsilon,
                                                     y_got.view(), rstd.data()},
                            nullptr),
              cudaSuccess);
    EXPECT_EQ(rstd, rstd_want) << cols;
    EXPECT_TRUE(y_got == y_want) << cols;
    for (const Write write : {Write::kOverwrite, Write::kAdd}) {
      auto dx_got = DeviceMatrix<T>::Random(rows, cols, in, 5), dx_want = dx_got;
      auto d_got = d_old, d_want = d_old;
      rms_norm::CudaBackward<T> backward = {.x = x.view(),
                                            .weight = weight.data(),
                                            .rstd = rstd.data(),
                                            .dy = dy.view(),
                                            .dx = dx_got.view(),
                                            .write_dx = write,
                                            .d_weight = d_got.data(),
                                            .write_d_weight = write};
      ASSERT_EQ(rms_norm::Run(backward, nullptr), cudaSuccess);
      backward.dx = dx_want.view();
      backward.d_weight = d_want.data();
      BackwardReference(backward);
      EXPECT_TRUE(dx_got == dx_want) << cols;
      EXPECT_EQ(d_got, d_want) << cols;
    }
  };
  cusim::ForSeeds([&] {
    for (const int64_t cols : {1, 15, 16, 17, 64, 277}) {
      for (const auto& [in, out] : cusim::kLayoutPairs) check(cols, in, out);
    }
  });
}

TYPED_TEST(RmsNormCudaTest, AddsRowsInPlaceAndRoundsOnce) {
  using T = TypeParam;
  cusim::ForSeeds([&] {
    for (const int64_t cols : {1, 16, 37, 277}) {
      for (const Layout layout : cusim::kLayouts) {
        const auto a = DeviceMatrix<T>::Random(5, cols, layout, 1);
        const auto b = DeviceMatrix<T>::Random(5, cols, cusim::kLayouts[0], 2);
        auto got = a, want = a;
        for (int64_t r = 0; r < 5; ++r) {
          for (int64_t c = 0; c < cols; ++c) {
            want.view()(r, c) =
                T(static_cast<float>(a.view()(r, c)) + static_cast<float>(b.view()(r, c)));
          }
        }
        ASSERT_EQ(rms_norm::CudaAddRows<T>(got.view(), b.view(), got.view(), nullptr), cudaSuccess);
        EXPECT_TRUE(got == want) << cols;
      }
    }
  });
}

TYPED_TEST(RmsNormCudaTest, NoRowsGiveAZeroWeightGradientAndNothingElseIsLaunched) {
  using T = TypeParam;
  const MatrixView<T> none(nullptr, 0, 3), flat(nullptr, 3, 0);
  std::vector<float> d_weight = {1, 2, 3};
  const auto backward = [&](MatrixView<T> m, Write write) {
    return rms_norm::Run(rms_norm::CudaBackward<T>{.x = m,
                                                   .weight = d_weight.data(),
                                                   .rstd = nullptr,
                                                   .dy = m,
                                                   .dx = m,
                                                   .write_dx = write,
                                                   .d_weight = d_weight.data(),
                                                   .write_d_weight = write},
                         nullptr);
  };
  EXPECT_EQ(backward(flat, Write::kOverwrite), cudaSuccess);
  EXPECT_EQ(backward(none, Write::kAdd), cudaSuccess);
  EXPECT_EQ(d_weight, (std::vector<float>{1, 2, 3}));
  EXPECT_EQ(backward(none, Write::kOverwrite), cudaSuccess);
  EXPECT_EQ(d_weight, (std::vector<float>{0, 0, 0}));
  EXPECT_EQ(rms_norm::CudaAddRows<T>(none, none, none, nullptr), cudaSuccess);
  EXPECT_EQ(rms_norm::CudaAddRows<T>(flat, flat, flat, nullptr), cudaSuccess);
  EXPECT_EQ(
      rms_norm::Run(rms_norm::CudaForward<T>{none, nullptr, kEpsilon, none, nullptr}, nullptr),
      cudaSuccess);
}

}  // namespace
}  // namespace moe
