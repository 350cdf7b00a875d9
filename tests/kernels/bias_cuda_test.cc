// kernels/bias on the simulated GPU: the bits of the plain loops.
#include "kernels/bias/bias_cuda.h"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/bias/bias_cpu.h"
#include "tests/cusim/schedules.h"

namespace moe {
namespace {

using cusim::DeviceMatrix;

template <typename T>
class BiasCudaTest : public ::testing::Test {};
using Types = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(BiasCudaTest, Types);

TYPED_TEST(BiasCudaTest, AddsAndSumsByHand) {
  using T = TypeParam;
  std::vector<T> y = {T(1.0f), T(2.0f), T(3.0f), T(4.0f)};
  std::vector<float> bias = {10, 20};
  ASSERT_EQ(bias::CudaAddBias<T>({y.data(), 2, 2}, bias.data(), nullptr), cudaSuccess);
  EXPECT_EQ(std::vector<float>(y.begin(), y.end()), (std::vector<float>{11, 22, 13, 24}));
  const MatrixView<const T> dy(y.data(), 2, 2);
  ASSERT_EQ(bias::CudaBiasGradient<T>(dy, bias.data(), Write::kAdd, nullptr), cudaSuccess);
  EXPECT_EQ(bias, (std::vector<float>{34, 66}));
  ASSERT_EQ(bias::CudaBiasGradient<T>(dy, bias.data(), Write::kOverwrite, nullptr), cudaSuccess);
  EXPECT_EQ(bias, (std::vector<float>{24, 46}));
}

TYPED_TEST(BiasCudaTest, EqualsThePlainLoopsForAnyWidthLayoutAndSchedule) {
  using T = TypeParam;
  const int64_t rows = 19;
  cusim::ForSeeds([&] {
    for (const int64_t cols : {1, 7, 16, 65, 277}) {
      for (const cusim::Layout layout : cusim::kLayouts) {
        const auto before = DeviceMatrix<T>::Random(rows, cols, layout, 1);
        const auto bias = cusim::RandomFloats(cols, 2);
        auto got = before, want = before;
        AddBiasReference<T>(want.view(), bias.data());
        ASSERT_EQ(bias::CudaAddBias<T>(got.view(), bias.data(), nullptr), cudaSuccess);
        EXPECT_TRUE(got == want) << cols;
        for (const Write write : {Write::kOverwrite, Write::kAdd}) {
          auto d_got = bias, d_want = bias;
          BiasGradientReference<T>(before.view(), d_want.data(), write);
          ASSERT_EQ(bias::CudaBiasGradient<T>(before.view(), d_got.data(), write, nullptr),
                    cudaSuccess);
          EXPECT_EQ(d_got, d_want) << cols;
        }
      }
    }
  });
}

TYPED_TEST(BiasCudaTest, NothingToAddLeavesZerosOrTheOldValue) {
  using T = TypeParam;
  std::vector<float> bias = {1, 2, 3};
  EXPECT_EQ(bias::CudaAddBias<T>({nullptr, 0, 3}, bias.data(), nullptr), cudaSuccess);
  EXPECT_EQ(bias::CudaAddBias<T>({nullptr, 3, 0}, nullptr, nullptr), cudaSuccess);
  EXPECT_EQ(bias::CudaBiasGradient<T>({nullptr, 3, 0}, nullptr, Write::kAdd, nullptr), cudaSuccess);
  const MatrixView<const T> none(nullptr, 0, 3);
  EXPECT_EQ(bias::CudaBiasGradient<T>(none, bias.data(), Write::kAdd, nullptr), cudaSuccess);
  EXPECT_EQ(bias, (std::vector<float>{1, 2, 3}));
  EXPECT_EQ(bias::CudaBiasGradient<T>(none, bias.data(), Write::kOverwrite, nullptr), cudaSuccess);
  EXPECT_EQ(bias, (std::vector<float>{0, 0, 0}));
}

}  // namespace
}  // namespace moe
