// kernels/cast on the simulated GPU: the bits of the scalar conversion.
#include "kernels/cast/cast_cuda.h"

#include <bit>
#include <cstdint>

#include <gtest/gtest.h>

#include "tests/cusim/schedules.h"

namespace moe {
namespace {

using cusim::DeviceMatrix;
using cusim::Layout;

// NaNs of all payloads are among the values, so bits are compared.
uint32_t BitsOf(float x) {
  return std::bit_cast<uint32_t>(x);
}

template <typename T>
class CastCudaTest : public ::testing::Test {};
using Types = ::testing::Types<BFloat16, Float16>;
TYPED_TEST_SUITE(CastCudaTest, Types);

// Bit patterns from all over the range, every third halfway between two of T; there and back.
TYPED_TEST(CastCudaTest, EqualsTheScalarConversionForAnyLengthLayoutAndSchedule) {
  using T = TypeParam;
  const auto check = [](int64_t n, Layout wide, Layout narrow) {
    DeviceMatrix<float> in(1, n, wide), back(1, n, wide), copy(1, n, narrow);
    DeviceMatrix<T> got(1, n, narrow), want(1, n, narrow);
    for (int64_t i = 0; i < n; ++i) {
      uint32_t bits = Random4({.seed = 1, .item = static_cast<uint64_t>(i)})[0];
      if (i % 3 == 0) {
        constexpr int kCut = std::is_same_v<T, BFloat16> ? 16 : 13;  // bits that rounding takes
        bits = (bits >> kCut << kCut) | 1u << (kCut - 1);
      }
      in.view()(0, i) = std::bit_cast<float>(bits);
      want.view()(0, i) = T(in.view()(0, i));
    }
    ASSERT_EQ(cast::Run<float>(in.view().data(), got.view().data(), n, nullptr), cudaSuccess);
    EXPECT_TRUE(got == want) << n;
    ASSERT_EQ(cast::Run<T>(got.view().data(), back.view().data(), n, nullptr), cudaSuccess);
    ASSERT_EQ(cast::Run<float>(in.view().data(), copy.view().data(), n, nullptr), cudaSuccess);
    for (int64_t i = 0; i < n; ++i) {
      EXPECT_EQ(BitsOf(back.view()(0, i)), BitsOf(static_cast<float>(want.view()(0, i)))) << n;
      EXPECT_EQ(BitsOf(copy.view()(0, i)), BitsOf(in.view()(0, i))) << n;
    }
  };
  cusim::ForSeeds([&] {
    for (const auto& [wide, narrow] : cusim::kLayoutPairs) {
      for (const int64_t n : {1, 7, 8, 9, 333, 4101}) check(n, wide, narrow);
    }
  });
}

TYPED_TEST(CastCudaTest, NothingIsLaunchedForNoElements) {
  using T = TypeParam;
  EXPECT_EQ(cast::Run<float>(nullptr, static_cast<T*>(nullptr), 0, nullptr), cudaSuccess);
  EXPECT_EQ(cast::Run<T>(nullptr, static_cast<float*>(nullptr), 0, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace moe
