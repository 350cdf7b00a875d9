// kernels/attention/rotary.cc on the simulated GPU: the bits of the CPU path.
#include "kernels/attention/rotary_cuda.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/attention/attention.h"
#include "tests/cusim/schedules.h"
#include "tests/kernels/op_test.h"

namespace moe {
namespace {

using cusim::DeviceMatrix;
using cusim::Layout;

constexpr float kBase = 10000.0f;

// cos and sin of position * base^(-2d/D): [positions, D/2].
struct Table {
  Table(int64_t positions, int64_t half) {
    for (int64_t t = 0; t < positions; ++t) {
      for (int64_t d = 0; d < half; ++d) {
        const double angle = static_cast<double>(t) *
                             std::pow(static_cast<double>(kBase), -double(d) / double(half));
        cosine.push_back(static_cast<float>(std::cos(angle)));
        sine.push_back(static_cast<float>(std::sin(angle)));
      }
    }
  }
  std::vector<float> cosine, sine;
};

template <typename T>
class RotaryCudaTest : public ::testing::Test {};
using Types = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(RotaryCudaTest, Types);

// Quarter turns: position 1 turns (a, b) to (-b, a), or back to (b, -a).
TYPED_TEST(RotaryCudaTest, TurnsPairsByThePositionInTheirSequence) {
  using T = TypeParam;
  const std::vector<int64_t> offsets = {0, 2, 2, 3};
  const std::vector<float> cosine = {1, 1, 0, 0}, sine = {0, 0, 1, 1};
  const auto rotate = [&](float direction) {
    std::vector<T> x;
    for (int i = 0; i < 12; ++i) x.push_back(T(static_cast<float>(1 + i % 4)));
    const auto error = attention::Run(attention::CudaRotary<T>{.x = {x.data(), 3, 4},
                                                               .heads = 1,
                                                               .sequence_offsets = offsets.data(),
                                                               .sequences = 3,
                                                               .cosine = cosine.data(),
                                                               .sine = sine.data(),
                                                               .direction = direction},
                                      nullptr);
    EXPECT_EQ(error, cudaSuccess);
    return std::vector<float>(x.begin(), x.end());
  };
  EXPECT_EQ(rotate(1), (std::vector<float>{1, 2, 3, 4, -3, -4, 1, 2, 1, 2, 3, 4}));
  EXPECT_EQ(rotate(-1), (std::vector<float>{1, 2, 3, 4, 3, 4, -1, -2, 1, 2, 3, 4}));
}

TYPED_TEST(RotaryCudaTest, HasTheBitsOfTheCpuForAnyHeadSizeLayoutAndSchedule) {
  using T = TypeParam;
  const std::vector<int64_t> offsets = {0, 1, 1, 9, 22, 22};
  const auto check = [&](int heads, int64_t depth, Layout layout) {
    const Table table(13, depth / 2);
    for (const auto direction : {RotaryDirection::kForward, RotaryDirection::kBackward}) {
      auto got = DeviceMatrix<T>::Random(22, heads * depth, layout, 1), want = got;
      testing::TestStream stream;
      Workspace workspace;
      ASSERT_TRUE(ApplyRotary<T>({.heads = heads, .sequence_offsets = offsets}, kBase, direction,
                                 want.view(), workspace, *stream)
                      .ok());
      ASSERT_EQ(attention::Run(attention::CudaRotary<T>{.x = got.view(),
                                                        .heads = heads,
                                                        .sequence_offsets = offsets.data(),
                                                        .sequences = 5,
                                                        .cosine = table.cosine.data(),
                                                        .sine = table.sine.data(),
                                                        .direction = static_cast<float>(direction)},
                               nullptr),
                cudaSuccess);
      EXPECT_TRUE(got == want) << heads << " heads of " << depth;
    }
  };
  cusim::ForSeeds([&] {
    for (const int64_t depth : {2, 6, 16, 24, 128}) {
      for (const Layout layout : cusim::kLayouts) check(3, depth, layout);
    }
  });
}

TYPED_TEST(RotaryCudaTest, NothingIsLaunchedForNoRows) {
  using T = TypeParam;
  const std::vector<int64_t> offsets = {0};
  EXPECT_EQ(attention::Run(attention::CudaRotary<T>{.x = {nullptr, 0, 4},
                                                    .heads = 2,
                                                    .sequence_offsets = offsets.data(),
                                                    .sequences = 0,
                                                    .cosine = nullptr,
                                                    .sine = nullptr,
                                                    .direction = 1},
                           nullptr),
            cudaSuccess);
}

}  // namespace
}  // namespace moe
