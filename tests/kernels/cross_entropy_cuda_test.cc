// kernels/cross_entropy on the simulated GPU: against float64, and the same bits in every layout.
#include "kernels/cross_entropy/cross_entropy_cuda.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "tests/cusim/schedules.h"

namespace moe {
namespace {

using cusim::DeviceMatrix;
using cusim::Layout;

constexpr double kFloatRounding = 0x1p-24;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kRows = 3;

// Targets in the first and last columns and between.
std::vector<int32_t> Targets(int64_t cols) {
  const auto last = static_cast<int32_t>(cols - 1);
  return {0, last, last / 3};
}

template <typename T>
std::vector<float> Compute(MatrixView<const float> logits, const std::vector<int32_t>& target,
                           float scale, MatrixView<T> d_logits) {
  std::vector<float> loss(target.size(), -1.0f);
  EXPECT_EQ(cross_entropy::Run(cross_entropy::CudaCrossEntropy<T>{logits, target.data(), scale,
                                                                  loss.data(), d_logits},
                               nullptr),
            cudaSuccess);
  return loss;
}

template <typename T>
class CrossEntropyCudaTest : public ::testing::Test {};
using Types = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(CrossEntropyCudaTest, Types);

TYPED_TEST(CrossEntropyCudaTest, EqualLogitsByHand) {
  using T = TypeParam;
  const std::vector<float> logits(8, 3.0f);
  std::vector<T> d_logits(8);
  const auto loss = Compute<T>({logits.data(), 2, 4}, {2, 0}, 0.5f, {d_logits.data(), 2, 4});
  EXPECT_EQ(loss, (std::vector<float>{std::log(4.0f), std::log(4.0f)}));
  EXPECT_EQ(std::vector<float>(d_logits.begin(), d_logits.end()),
            (std::vector<float>{0.125f, 0.125f, -0.375f, 0.125f, -0.375f, 0.125f, 0.125f, 0.125f}));
}

// An exponential has 2 roundings, and up to 16 for the difference in its exponent: |x - max| < 16.
// The sum has further 4 * (n / 1024 + 1) additions in a thread, 5 in its warp and 7 of warps. The
// loss, below 24, is log(sum) - (x_target - max): 16 roundings for either term and 24 for their
// difference. A gradient below 1 has the roundings of its exponential, those of the sum and 3.
// BFloat16 rounds once more, by up to 2^-8 of the value.
TYPED_TEST(CrossEntropyCudaTest, MatchesFloat64ForAnyWidthAndSchedule) {
  using T = TypeParam;
  const float scale = 0.25f;
  const double storage = std::is_same_v<T, BFloat16> ? 0x1p-8 : sizeof(T) == 2 ? 0x1p-11 : 0;
  const double underflow = std::is_same_v<T, Float16> ? 0x1p-25 : 0;
  const auto check = [&](int64_t cols, Layout in, Layout out) {
    const auto logits = DeviceMatrix<float>::Random(kRows, cols, in, 1, 2);
    DeviceMatrix<T> d_logits(kRows, cols, out);
    const auto target = Targets(cols);
    const auto loss = Compute<T>(logits.view(), target, scale, d_logits.view());
    const double sum_roundings = 18 + 4 * (static_cast<double>(cols) / 1024 + 1) + 12;
    for (int64_t t = 0; t < kRows; ++t) {
      const float* const x = logits.view().row(t);
      const double max = *std::max_element(x, x + cols), min = *std::min_element(x, x + cols);
      ASSERT_LT(max - min, 16);
      double sum = 0;
      for (int64_t v = 0; v < cols; ++v) sum += std::exp(x[v] - max);
      EXPECT_NEAR(loss[t], std::log(sum) - (x[target[t]] - max),
                  (sum_roundings + 16 + 16 + 24) * kFloatRounding);
      for (int64_t v = 0; v < cols; ++v) {
        const double p = std::exp(x[v] - max) / sum, minus = v == target[t] ? 1 : 0;
        const double expected = scale * (p - minus);
        const double bound = scale * (p * (18 + sum_roundings) + 3 * (p + minus)) * kFloatRounding;
        EXPECT_NEAR(static_cast<float>(d_logits.view()(t, v)), expected,
                    bound + storage * (std::abs(expected) + bound) + underflow)
            << v << " of " << cols;
      }
    }
  };
  cusim::ForSeeds([&] {
    for (const int64_t cols : {1, 4, 37, 1281}) {
      check(cols, cusim::kLayouts[0], cusim::kLayouts[1]);
      check(cols, cusim::kLayouts[3], cusim::kLayouts[4]);
    }
  });
}

// 1290 columns: neighbouring rows without gaps differ in their alignment. Several draws, because
// sums in another order often round alike.
TYPED_TEST(CrossEntropyCudaTest, ARowHasTheSameBitsInAnyLayoutBatchAndSchedule) {
  using T = TypeParam;
  const int64_t cols = 1290;
  const auto target = Targets(cols);
  for (const uint64_t draw : {1, 2, 3, 4}) {
    const auto logits = DeviceMatrix<float>::Random(kRows, cols, cusim::kLayouts[0], draw, 3);
    DeviceMatrix<T> d_logits(kRows, cols, cusim::kLayouts[0]);
    const auto loss = Compute<T>(logits.view(), target, 0.01f, d_logits.view());
    EXPECT_EQ(Compute<T>(logits.view(), target, 0.01f, {}), loss);  // the loss alone
    cusim::ForSeeds([&] {
      for (const auto& [in, out] : {cusim::kLayoutPairs[1], cusim::kLayoutPairs[3]}) {
        const auto same = DeviceMatrix<float>::Random(kRows, cols, in, draw, 3);
        DeviceMatrix<T> got(kRows, cols, out), want(kRows, cols, out);
        for (int64_t t = 0; t < kRows; ++t) {
          std::copy_n(d_logits.view().row(t), cols, want.view().row(t));
        }
        EXPECT_EQ(Compute<T>(same.view(), target, 0.01f, got.view()), loss);
        EXPECT_TRUE(got == want);
      }
    });
    std::vector<T> alone(cols);
    EXPECT_EQ(
        Compute<T>(RowRange(logits.view(), 2, 3), {target[2]}, 0.01f, {alone.data(), 1, cols}),
        std::vector<float>{loss[2]});
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(), d_logits.view().row(2)));
  }
}

TEST(CrossEntropyCudaBFloat16Test, GradientIsTheFloat32OneRoundedOnce) {
  for (const int64_t cols : {37, 1281}) {
    const auto logits = DeviceMatrix<float>::Random(kRows, cols, {}, 4, 2);
    DeviceMatrix<float> d_logits(kRows, cols, {});
    DeviceMatrix<BFloat16> d_logits16(kRows, cols, {});
    const auto loss = Compute<float>(logits.view(), Targets(cols), 0.25f, d_logits.view());
    EXPECT_EQ(Compute<BFloat16>(logits.view(), Targets(cols), 0.25f, d_logits16.view()), loss);
    for (int64_t t = 0; t < kRows; ++t) {
      for (int64_t v = 0; v < cols; ++v) {
        EXPECT_EQ(d_logits16.view()(t, v), BFloat16(d_logits.view()(t, v)));
      }
    }
  }
}

TEST(CrossEntropyCudaFloat32Test, GradientsMayOverwriteTheLogits) {
  cusim::ForSeeds([&] {
    for (const Layout layout : {cusim::kLayouts[1], cusim::kLayouts[3]}) {
      const int64_t cols = 1281;
      auto logits = DeviceMatrix<float>::Random(kRows, cols, layout, 3, 2);
      DeviceMatrix<float> d_logits(kRows, cols, layout);
      const auto loss = Compute<float>(logits.view(), Targets(cols), 0.25f, d_logits.view());
      EXPECT_EQ(Compute<float>(logits.view(), Targets(cols), 0.25f, logits.view()), loss);
      EXPECT_TRUE(logits == d_logits);
    }
  });
}

TYPED_TEST(CrossEntropyCudaTest, LargeLogitsDoNotOverflowAndNonFiniteOnesShow) {
  using T = TypeParam;
  for (const int64_t at : {0, 16, 18}) {  // groups and tail
    std::vector<float> logits(19);
    std::vector<T> d_logits(19);
    const auto compute = [&] {
      return Compute<T>({logits.data(), 1, 19}, {1}, 1.0f, {d_logits.data(), 1, 19})[0];
    };
    logits[at] = 1e30f;
    EXPECT_EQ(compute(), 1e30f);
    EXPECT_EQ(static_cast<float>(d_logits[at]), 1);
    EXPECT_EQ(static_cast<float>(d_logits[1]), -1);
    for (const float bad : {kNaN, kInfinity}) {
      logits[at] = bad;
      EXPECT_FALSE(std::isfinite(compute())) << bad;
      EXPECT_TRUE(std::isnan(static_cast<float>(d_logits[1]))) << bad;
    }
  }
}

// Next to the row in memory stands what a read or write out of bounds would reach.
TYPED_TEST(CrossEntropyCudaTest, ATargetOutOfRangeMakesItsOwnRowNaN) {
  using T = TypeParam;
  for (const int32_t bad : {-1, 5, INT32_MIN, INT32_MAX}) {
    const auto logits = DeviceMatrix<float>::Random(3, 5, {0, 3}, 5);
    DeviceMatrix<T> got(3, 5, {0, 3}), want = got;
    const auto expected = Compute<T>(logits.view(), {1, 0, 4}, 1.0f, want.view());
    const auto loss = Compute<T>(logits.view(), {1, bad, 4}, 1.0f, got.view());
    EXPECT_TRUE(std::isnan(loss[1])) << bad;
    EXPECT_EQ(loss[0], expected[0]);
    EXPECT_EQ(loss[2], expected[2]);
    for (int64_t v = 0; v < 5; ++v) {
      EXPECT_TRUE(std::isnan(static_cast<float>(got.view()(1, v)))) << bad;
      want.view()(1, v) = got.view()(1, v) = T(0.0f);  // NaNs do not compare
    }
    EXPECT_TRUE(got == want) << bad;
  }
}

TYPED_TEST(CrossEntropyCudaTest, NothingIsLaunchedForNoRowsAndNoColumnsGiveNaN) {
  using T = TypeParam;
  EXPECT_TRUE(Compute<T>({nullptr, 0, 4}, {}, 1.0f, {nullptr, 0, 4}).empty());
  EXPECT_TRUE(std::isnan(Compute<T>({nullptr, 1, 0}, {0}, 1.0f, {nullptr, 1, 0})[0]));
}

}  // namespace
}  // namespace moe
