// kernels/embedding on the simulated GPU: the bits of the CPU path.
#include "kernels/embedding/embedding_cuda.h"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/embedding/embedding.h"
#include "tests/cusim/schedules.h"
#include "tests/kernels/op_test.h"

namespace moe {
namespace {

using cusim::DeviceMatrix;
using cusim::Layout;

// Half of the tokens name one row, the others any.
std::vector<int32_t> RandomIds(int64_t tokens, int32_t vocabulary) {
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < tokens; ++t) {
    const auto random = Random4({.seed = 3, .item = static_cast<uint64_t>(t)});
    const auto id = static_cast<int32_t>(random[0] % static_cast<uint32_t>(vocabulary));
    ids.push_back(random[1] % 2 == 0 ? vocabulary / 2 : id);
  }
  return ids;
}

template <typename T>
class EmbeddingCudaTest : public ::testing::Test {};
using Types = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(EmbeddingCudaTest, Types);

TYPED_TEST(EmbeddingCudaTest, AddsTheRowsOfATokenByHand) {
  using T = TypeParam;
  const std::vector<int32_t> ids = {2, 0, 2, -1, 3};  // the last two name no row
  std::vector<T> dx;
  for (int t = 1; t <= 5; ++t) {
    dx.push_back(T(static_cast<float>(t)));
    dx.push_back(T(static_cast<float>(10 * t)));
  }
  std::vector<float> table(6, 7.0f);
  embedding::CudaBackward<T> backward = {
      ids.data(), {dx.data(), 5, 2}, {table.data(), 3, 2}, Write::kOverwrite};
  ASSERT_EQ(embedding::Run(backward, nullptr), cudaSuccess);
  EXPECT_EQ(table, (std::vector<float>{2, 20, 0, 0, 4, 40}));
  backward.write = Write::kAdd;
  ASSERT_EQ(embedding::Run(backward, nullptr), cudaSuccess);
  EXPECT_EQ(table, (std::vector<float>{4, 40, 0, 0, 8, 80}));
}

// Sums of many terms: another order has other bits.
TYPED_TEST(EmbeddingCudaTest, HasTheBitsOfTheCpuForAnyShapeLayoutAndSchedule) {
  using T = TypeParam;
  const auto check = [&](int64_t tokens, int32_t vocabulary, int64_t cols, Layout in, Layout out) {
    const auto ids = RandomIds(tokens, vocabulary);
    const auto dx = DeviceMatrix<T>::Random(tokens, cols, in, 1);
    for (const Write write : {Write::kOverwrite, Write::kAdd}) {
      auto got = DeviceMatrix<float>::Random(vocabulary, cols, out, 2), want = got;
      testing::TestStream stream;
      ASSERT_TRUE(EmbeddingBackward<T>(ids, dx.view(), want.view(), write, *stream).ok());
      ASSERT_EQ(embedding::Run(embedding::CudaBackward<T>{ids.data(), dx.view(), got.view(), write},
                               nullptr),
                cudaSuccess);
      EXPECT_TRUE(got == want) << tokens << " tokens, " << vocabulary << " x " << cols;
    }
  };
  cusim::ForSeeds([&] {
    for (const auto& [in, out] : cusim::kLayoutPairs) {
      check(40, 5, 37, in, out);
      check(300, 67, 16, in, out);  // three blocks of rows, two warps' ids
    }
    check(2500, 33, 4, cusim::kLayouts[0], cusim::kLayouts[0]);  // more ids than a block holds
  });
}

TYPED_TEST(EmbeddingCudaTest, NoTokensGiveZerosAndAnEmptyTableIsNotLaunched) {
  using T = TypeParam;
  std::vector<float> table = {1, 2};
  embedding::CudaBackward<T> backward = {
      nullptr, {nullptr, 0, 2}, {table.data(), 1, 2}, Write::kAdd};
  EXPECT_EQ(embedding::Run(backward, nullptr), cudaSuccess);
  EXPECT_EQ(table, (std::vector<float>{1, 2}));
  backward.write = Write::kOverwrite;
  EXPECT_EQ(embedding::Run(backward, nullptr), cudaSuccess);
  EXPECT_EQ(table, (std::vector<float>{0, 0}));
  backward.d_table = {nullptr, 0, 2};
  EXPECT_EQ(embedding::Run(backward, nullptr), cudaSuccess);
  backward.d_table = {nullptr, 1, 0};
  EXPECT_EQ(embedding::Run(backward, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace moe
