// kernels/combine on the simulated GPU: the bits of the plain loops.
#include "kernels/combine/combine_cuda.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/combine/combine_cpu.h"
#include "tests/cusim/schedules.h"

namespace moe {
namespace {

using cusim::DeviceMatrix;
using cusim::Layout;

// Tokens with 0, 1, 2 ... slots, some of them dropped, rows in any order.
struct Slots {
  Slots(int64_t tokens, int64_t rows) {
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t k = 0; k < t % 5; ++k) {
        const auto random = Random4({.seed = 9, .item = static_cast<uint64_t>(t * 5 + k)});
        row.push_back(static_cast<int32_t>(random[0] % (rows + 1)) - 1);
      }
      offset.push_back(static_cast<int64_t>(row.size()));
    }
    weight = cusim::RandomFloats(static_cast<int64_t>(row.size()), 10);
  }
  std::vector<int64_t> offset = {0};
  std::vector<int32_t> row;
  std::vector<float> weight;
};

template <typename T>
class CombineCudaTest : public ::testing::Test {};
using Types = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(CombineCudaTest, Types);

TYPED_TEST(CombineCudaTest, SumsByHand) {
  using T = TypeParam;
  // Token 0: slots 0 (row 1) and 1 (dropped); token 1: none; token 2: slot 2 (row 0), 3 (row 1).
  const std::vector<T> rows = {T(1.0f), T(2.0f), T(10.0f), T(20.0f)};
  const std::vector<int64_t> offset = {0, 2, 2, 4};
  const std::vector<int32_t> row = {1, -1, 0, 1};
  const std::vector<float> weight = {0.5f, 9.0f, 2.0f, 0.25f};
  std::vector<T> out(6, T(100.0f));
  combine::CudaCombine<T> sum = {.rows = {rows.data(), 2, 2},
                                 .slot_offset = offset.data(),
                                 .row_of_slot = row.data(),
                                 .weight = weight.data(),
                                 .out = {out.data(), 3, 2},
                                 .write = Write::kAdd};
  const auto floats = [&] {
    return std::vector<float>(out.begin(), out.end());
  };
  ASSERT_EQ(combine::Run(sum, nullptr), cudaSuccess);
  EXPECT_EQ(floats(), (std::vector<float>{105, 110, 100, 100, 104.5f, 109}));
  sum.weight = nullptr;
  sum.write = Write::kOverwrite;
  ASSERT_EQ(combine::Run(sum, nullptr), cudaSuccess);
  EXPECT_EQ(floats(), (std::vector<float>{10, 20, 0, 0, 11, 22}));

  const std::vector<T> dy = {T(1.0f), T(2.0f), T(3.0f), T(4.0f), T(5.0f), T(6.0f)};
  std::vector<float> d_weight(4, -1.0f);
  ASSERT_EQ(combine::Run(combine::CudaWeightGradient<T>{.dy = {dy.data(), 3, 2},
                                                        .rows = sum.rows,
                                                        .slot_offset = offset.data(),
                                                        .row_of_slot = row.data(),
                                                        .d_weight = d_weight.data()},
                         nullptr),
            cudaSuccess);
  EXPECT_EQ(d_weight, (std::vector<float>{50, 0, 17, 170}));
}

TYPED_TEST(CombineCudaTest, EqualsThePlainLoopsForAnyWidthLayoutAndSchedule) {
  using T = TypeParam;
  const int64_t tokens = 13, num_rows = 9;
  const Slots slots(tokens, num_rows);
  const auto check = [&](int64_t hidden, Layout rows_layout, Layout out_layout) {
    const auto rows = DeviceMatrix<T>::Random(num_rows, hidden, rows_layout, 1);
    const auto old = DeviceMatrix<T>::Random(tokens, hidden, out_layout, 2);
    for (const bool weighted : {false, true}) {
      for (const Write write : {Write::kOverwrite, Write::kAdd}) {
        auto got = old, want = old;
        combine::Combine<T> reference = {rows.view(), slots.offset, slots.row,
                                         {},          want.view(),  write};
        combine::CudaCombine<T> sum = {rows.view(), slots.offset.data(), slots.row.data(),
                                       nullptr,     got.view(),          write};
        if (weighted) {
          reference.weight = slots.weight;
          sum.weight = slots.weight.data();
        }
        combine::Reference<T>(reference);
        ASSERT_EQ(combine::Run(sum, nullptr), cudaSuccess);
        EXPECT_TRUE(got == want) << "H=" << hidden << " weighted=" << weighted;
      }
    }
    std::vector<float> got(slots.row.size(), NAN), want(slots.row.size(), NAN);
    combine::Reference<T>(combine::WeightGradient<T>{old.view(), rows.view(), slots.offset,
                                                     slots.row, absl::MakeSpan(want)});
    ASSERT_EQ(
        combine::Run(combine::CudaWeightGradient<T>{old.view(), rows.view(), slots.offset.data(),
                                                    slots.row.data(), got.data()},
                     nullptr),
        cudaSuccess);
    EXPECT_EQ(got, want) << "H=" << hidden;
  };
  cusim::ForSeeds([&] {
    for (const int64_t hidden : {1, 7, 16, 17, 64, 277}) {
      for (const auto& [in, out] : cusim::kLayoutPairs) check(hidden, in, out);
    }
  });
}

// 2^24 + 2^-6 - 2^24, in one partial sum of the dot product: float32 has no room for 2^-6.
TYPED_TEST(CombineCudaTest, WeightGradientSurvivesCancellation) {
  using T = TypeParam;
  std::vector<T> rows(48, T(0.0f)), dy(48, T(1.0f));
  rows[5] = dy[5] = dy[37] = T(4096.0f);
  rows[21] = T(0.015625f);
  rows[37] = T(-4096.0f);
  const std::vector<int64_t> offset = {0, 1};
  const std::vector<int32_t> row = {0};
  float d_weight = 0;
  ASSERT_EQ(combine::Run(
                combine::CudaWeightGradient<T>{
                    {dy.data(), 1, 48}, {rows.data(), 1, 48}, offset.data(), row.data(), &d_weight},
                nullptr),
            cudaSuccess);
  EXPECT_EQ(d_weight, 0.015625f);
}

TYPED_TEST(CombineCudaTest, NothingIsLaunchedForNoTokensAndNoColumnsGiveZeroGradients) {
  using T = TypeParam;
  const std::vector<int64_t> offset = {0, 1};
  const std::vector<int32_t> row = {0};
  const MatrixView<T> no_tokens(nullptr, 0, 4), no_columns(nullptr, 1, 0);
  combine::CudaCombine<T> sum = {no_tokens, offset.data(), row.data(), nullptr, no_tokens, {}};
  EXPECT_EQ(combine::Run(sum, nullptr), cudaSuccess);
  sum.rows = sum.out = no_columns;
  EXPECT_EQ(combine::Run(sum, nullptr), cudaSuccess);
  float d_weight = -1;
  combine::CudaWeightGradient<T> gradient = {no_tokens, no_tokens, offset.data(), row.data(),
                                             &d_weight};
  EXPECT_EQ(combine::Run(gradient, nullptr), cudaSuccess);
  EXPECT_EQ(d_weight, -1);
  gradient.dy = gradient.rows = no_columns;
  EXPECT_EQ(combine::Run(gradient, nullptr), cudaSuccess);
  EXPECT_EQ(d_weight, 0);
}

}  // namespace
}  // namespace moe
