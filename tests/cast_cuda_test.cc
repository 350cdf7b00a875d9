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

// Bit patterns from all over the range, every third halfway between two of BFloat16; there and back.
TEST(CastCudaTest, EqualsTheScalarConversionForAnyLengthLayoutAndSchedule) {
  const auto check = [](int64_t n, Layout wide, Layout narrow) {
    DeviceMatrix<float> in(1, n, wide), back(1, n, wide), copy(1, n, narrow);
    DeviceMatrix<BFloat16> got(1, n, narrow), want(1, n, narrow);
    for (int64_t i = 0; i < n; ++i) {
      uint32_t bits = Random4({.seed = 1, .item = static_cast<uint64_t>(i)})[0];
      if (i % 3 == 0) bits = (bits & 0xffff0000u) | 0x8000u;
      in.view()(0, i) = std::bit_cast<float>(bits);
      want.view()(0, i) = BFloat16(in.view()(0, i));
    }
    ASSERT_EQ(cast::Run<float>(in.view().data(), got.view().data(), n, nullptr), cudaSuccess);
    EXPECT_TRUE(got == want) << n;
    ASSERT_EQ(cast::Run<BFloat16>(got.view().data(), back.view().data(), n, nullptr), cudaSuccess);
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

TEST(CastCudaTest, NothingIsLaunchedForNoElements) {
  EXPECT_EQ(cast::Run<float>(nullptr, static_cast<BFloat16*>(nullptr), 0, nullptr), cudaSuccess);
  EXPECT_EQ(cast::Run<BFloat16>(nullptr, static_cast<float*>(nullptr), 0, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace moe
