// kernels/partial_sum on the simulated GPU: the bits of the CPU's sums.
#include "kernels/partial_sum/partial_sum_cuda.h"

#include <cmath>
#include <cstdint>

#include <gtest/gtest.h>

#include "kernels/partial_sum/partial_sum_cpu.h"
#include "tests/cusim/schedules.h"

namespace moe {
namespace {

using cusim::DeviceMatrix;
using cusim::Layout;

TEST(PartialSumCudaTest, AddsTheTerms) {
  const float partial[] = {1, 0x1p-24f, -0.0f};
  float acc[] = {2, 1, -0.0f};
  ASSERT_EQ(partial_sum::Run(partial, acc, 3, nullptr), cudaSuccess);
  EXPECT_EQ(acc[0], 3);
  EXPECT_EQ(acc[1], 1);
  EXPECT_TRUE(acc[2] == 0 && std::signbit(acc[2]));
}

TEST(PartialSumCudaTest, IntegersWrapAround) {
  const uint64_t partial[] = {UINT64_MAX, INT64_MAX};
  uint64_t acc[] = {3, 1};
  ASSERT_EQ(partial_sum::Run(partial, acc, 2, nullptr), cudaSuccess);
  EXPECT_EQ(acc[0], 2);
  EXPECT_EQ(static_cast<int64_t>(acc[1]), INT64_MIN);
}

DeviceMatrix<float> Random(float, int64_t n, Layout layout, uint64_t seed) {
  return DeviceMatrix<float>::Random(1, n, layout, seed);
}
DeviceMatrix<uint64_t> Random(uint64_t, int64_t n, Layout layout, uint64_t seed) {
  DeviceMatrix<uint64_t> x(1, n, layout);
  for (int64_t i = 0; i < n; ++i) {
    const auto random = Random4({.seed = seed, .item = static_cast<uint64_t>(i)});
    x.view()(0, i) = uint64_t{random[0]} << 32 | random[1];
  }
  return x;
}

template <typename T>
class PartialSumCudaTypedTest : public ::testing::Test {};
using Types = ::testing::Types<float, uint64_t>;
TYPED_TEST_SUITE(PartialSumCudaTypedTest, Types);

TYPED_TEST(PartialSumCudaTypedTest, EqualsTheCpuForAnyLengthLayoutAndSchedule) {
  const auto check = [](int64_t n, Layout of_partial, Layout of_acc) {
    const auto partial = Random(TypeParam(), n, of_partial, 1);
    auto got = Random(TypeParam(), n, of_acc, 2), want = got;
    AddPartialRange(partial.view().data(), want.view().data(), n);
    ASSERT_EQ(partial_sum::Run(partial.view().data(), got.view().data(), n, nullptr), cudaSuccess);
    EXPECT_TRUE(got == want) << n;
  };
  cusim::ForSeeds([&] {
    for (const int64_t n : {1, 3, 4, 333, 2051}) {
      for (const auto& [most, one] : cusim::kLayoutPairs) {
        check(n, most, one);
        check(n, one, one);
      }
    }
  });
}

TYPED_TEST(PartialSumCudaTypedTest, NothingIsLaunchedForNoElements) {
  EXPECT_EQ(partial_sum::Run<TypeParam>(nullptr, nullptr, 0, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace moe
