// kernels/product on the simulated GPU: the bits of the plain loops.
#include "kernels/product/product_cuda.h"

#include <cstdint>
#include <utility>

#include <gtest/gtest.h>

#include "tests/cusim/schedules.h"

namespace moe {
namespace {

using cusim::DeviceMatrix;
using cusim::Layout;

template <typename Pair>
class ProductCudaTest : public ::testing::Test {};
// Of the result and of its first factor.
using Types = ::testing::Types<std::pair<float, float>, std::pair<BFloat16, BFloat16>,
                               std::pair<BFloat16, float>>;
TYPED_TEST_SUITE(ProductCudaTest, Types);

// (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24, of which a fused multiply-add would keep the last.
TEST(ProductCudaByHandTest, ProductsAreRoundedBeforeTheyAreAdded) {
  const float a[] = {1 + 0x1p-12f, 3}, b[] = {1 + 0x1p-12f, -2};
  float out[] = {-1 - 0x1p-11f, 0.5f};
  product::CudaProduct<float, float> add = {{a, 1, 2}, {b, 1, 2}, {out, 1, 2}, Write::kAdd};
  ASSERT_EQ(product::Run(add, nullptr), cudaSuccess);
  EXPECT_EQ(out[0], 0);
  EXPECT_EQ(out[1], -5.5f);
  add.write = Write::kOverwrite;
  ASSERT_EQ(product::Run(add, nullptr), cudaSuccess);
  EXPECT_EQ(out[0], 1 + 0x1p-11f);
  EXPECT_EQ(out[1], -6);
}

TYPED_TEST(ProductCudaTest, EqualsThePlainLoopForAnyWidthLayoutAndSchedule) {
  using T = typename TypeParam::first_type;
  using U = typename TypeParam::second_type;
  constexpr int64_t kRows = 13;
  const auto check = [](int64_t cols, Layout of_a, Layout of_b, Layout of_out) {
    const auto a = DeviceMatrix<U>::Random(kRows, cols, of_a, 1);
    const auto b = DeviceMatrix<float>::Random(kRows, cols, of_b, 2);
    for (const Write write : {Write::kOverwrite, Write::kAdd}) {
      auto got = DeviceMatrix<T>::Random(kRows, cols, of_out, 3), want = got;
      for (int64_t t = 0; t < kRows; ++t) {
        for (int64_t h = 0; h < cols; ++h) {
          const float product = static_cast<float>(a.view()(t, h)) * b.view()(t, h);
          T& element = want.view()(t, h);
          element = T(write == Write::kAdd ? static_cast<float>(element) + product : product);
        }
      }
      ASSERT_EQ(
          product::Run(product::CudaProduct<T, U>{a.view(), b.view(), got.view(), write}, nullptr),
          cudaSuccess);
      EXPECT_TRUE(got == want) << "H=" << cols;
    }
  };
  cusim::ForSeeds([&] {
    for (const int64_t cols : {1, 7, 16, 37, 277}) {
      for (const auto& [most, one] : cusim::kLayoutPairs) {
        check(cols, one, most, most);
        check(cols, most, one, most);
        check(cols, most, most, one);
      }
    }
  });
}

TYPED_TEST(ProductCudaTest, NothingIsLaunchedForNoElements) {
  using T = typename TypeParam::first_type;
  using U = typename TypeParam::second_type;
  product::CudaProduct<T, U> product = {{nullptr, 0, 4}, {nullptr, 0, 4}, {nullptr, 0, 4}, {}};
  EXPECT_EQ(product::Run(product, nullptr), cudaSuccess);
  product = {{nullptr, 4, 0}, {nullptr, 4, 0}, {nullptr, 4, 0}, {}};
  EXPECT_EQ(product::Run(product, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace moe
