// kernels/permute on the simulated GPU: the bits of the plain loops.
#include "kernels/permute/permute_cuda.h"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/permute/permute_cpu.h"
#include "tests/cusim/schedules.h"

namespace moe {
namespace {

using cusim::DeviceMatrix;
using cusim::Layout;

template <typename T>
class PermuteCudaTest : public ::testing::Test {};
using Types = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(PermuteCudaTest, Types);

TYPED_TEST(PermuteCudaTest, GathersByHand) {
  using T = TypeParam;
  const std::vector<T> in = {T(10.0f), T(11.0f), T(20.0f), T(21.0f), T(30.0f), T(31.0f)};
  std::vector<T> out(8, T(-1.0f));
  const std::vector<int32_t> row = {2, -1, 0, 2};
  const std::vector<float> scale = {0.5f, 3.0f, 2.0f, -1.0f};
  permute::CudaGather<T> gather = {
      .in = {in.data(), 3, 2}, .source_row = row.data(), .out = {out.data(), 4, 2}};
  const auto floats = [&] {
    return std::vector<float>(out.begin(), out.end());
  };
  ASSERT_EQ(permute::Run(gather, nullptr), cudaSuccess);
  EXPECT_EQ(floats(), (std::vector<float>{30, 31, 0, 0, 10, 11, 30, 31}));
  gather.scale = scale.data();
  ASSERT_EQ(permute::Run(gather, nullptr), cudaSuccess);
  EXPECT_EQ(floats(), (std::vector<float>{15, 15.5f, 0, 0, 20, 22, -30, -31}));
}

// Widths around 16 bytes and around what a warp takes at a time, in every pair of layouts.
TYPED_TEST(PermuteCudaTest, EqualsThePlainLoopsForAnyWidthLayoutAndSchedule) {
  using T = TypeParam;
  const int64_t rows_in = 7, rows_out = 19;
  std::vector<int32_t> row(rows_out), view(rows_out);
  for (int64_t i = 0; i < rows_out; ++i) {
    const auto random = Random4({.seed = 3, .item = static_cast<uint64_t>(i)});
    row[i] = static_cast<int32_t>(random[0] % (rows_in + 1)) - 1;
    view[i] = static_cast<int32_t>(random[1] % 2);
  }
  const auto scale = cusim::RandomFloats(rows_out, 4);
  const auto check = [&](int64_t hidden, Layout in_layout, Layout out_layout) {
    const auto in = DeviceMatrix<T>::Random(rows_in, hidden, in_layout, 1);
    const auto other = DeviceMatrix<T>::Random(rows_in, hidden, out_layout, 2);
    const std::vector<MatrixView<const T>> both = {in.view(), other.view()};
    for (const bool many : {false, true}) {
      for (const bool scaled : {false, true}) {
        DeviceMatrix<T> got(rows_out, hidden, out_layout), want = got;
        permute::Gather<T> reference = {
            .in = {both.data(), many ? 2u : 1u}, .source_row = row, .out = want.view()};
        if (many) reference.source_view = view;
        if (scaled) reference.scale = scale;
        permute::Reference<T>(reference);
        const float* const factor = scaled ? scale.data() : nullptr;
        const permute::CudaGather<T> gather = {in.view(), row.data(), factor, got.view()};
        const permute::CudaGatherOfMany<T> of_many = {both.data(), 2,      view.data(),
                                                      row.data(),  factor, got.view()};
        ASSERT_EQ(many ? permute::Run(of_many, nullptr) : permute::Run(gather, nullptr),
                  cudaSuccess);
        EXPECT_TRUE(got == want) << "H=" << hidden << " many=" << many << " scaled=" << scaled;
      }
    }
  };
  cusim::ForSeeds([&] {
    for (const int64_t hidden : {1, 3, 8, 17, 64, 277}) {
      for (const auto& [in, out] : cusim::kLayoutPairs) check(hidden, in, out);
    }
  });
}

// One, two and three launches; a row's only column tells its view, and zero rows name views that
// are not there.
TYPED_TEST(PermuteCudaTest, GathersFromAnyNumberOfViews) {
  using T = TypeParam;
  for (const int views : {1, 64, 65, 128, 131}) {
    std::vector<T> in;
    std::vector<MatrixView<const T>> of;
    for (int v = 0; v < views; ++v) in.push_back(T(static_cast<float>(v)));
    for (const T& value : in) of.emplace_back(&value, 1, 1);
    std::vector<int32_t> view, row;
    std::vector<float> want;
    for (int i = 0; i < 2 * views; ++i) {
      const bool zero = i % 5 == 4;
      const int v = i * 37 % views;
      row.push_back(zero ? -1 : 0);
      view.push_back(zero ? 1 << 20 : v);
      want.push_back(zero ? 0 : static_cast<float>(v));
    }
    std::vector<T> out(want.size(), T(-1.0f));
    ASSERT_EQ(permute::Run(permute::CudaGatherOfMany<T>{.views = of.data(),
                                                        .view_count = views,
                                                        .source_view = view.data(),
                                                        .source_row = row.data(),
                                                        .out = {out.data(), 2 * views, 1}},
                           nullptr),
              cudaSuccess);
    EXPECT_EQ(std::vector<float>(out.begin(), out.end()), want) << views;
  }
}

// A launch without blocks would be an error.
TYPED_TEST(PermuteCudaTest, NothingIsLaunchedForNoRowsOrNoColumns) {
  using T = TypeParam;
  const std::vector<int32_t> row = {0, -1};
  EXPECT_EQ(
      permute::Run<T>(
          permute::CudaGather<T>{.in = {nullptr, 0, 4}, .source_row = {}, .out = {nullptr, 0, 4}},
          nullptr),
      cudaSuccess);
  EXPECT_EQ(permute::Run<T>(
                permute::CudaGather<T>{
                    .in = {nullptr, 1, 0}, .source_row = row.data(), .out = {nullptr, 2, 0}},
                nullptr),
            cudaSuccess);
  const MatrixView<const T> none = {nullptr, 0, 4};
  EXPECT_EQ(permute::Run(permute::CudaGatherOfMany<T>{.views = &none,
                                                      .view_count = 1,
                                                      .source_view = nullptr,
                                                      .source_row = nullptr,
                                                      .out = {nullptr, 0, 4}},
                         nullptr),
            cudaSuccess);
}

}  // namespace
}  // namespace moe
