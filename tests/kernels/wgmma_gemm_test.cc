// The grouped product for Hopper GPUs, called directly.
#include <cmath>
#include <cstddef>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/base/cuda_devices.h"
#include "kernels/base/cuda_status.h"
#include "kernels/base/dtype.h"
#include "kernels/grouped_gemm/grouped_gemm_cuda.h"
#include "tests/kernels/device_memory.h"
#if defined(MOE_TEST_SCHEDULES)
#include "tests/cusim/fake_streams.h"
#endif

namespace moe::gemm {
namespace {

using testing::DeviceArray;
using testing::TestDevice;

template <typename T>
class WgmmaGemmTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto devices = CudaDevices();
    if (!devices.ok() || !devices->front().usable.ok() || devices->front().major != 9) {
      GTEST_SKIP() << "no Hopper GPU";
    }
    device_ = std::make_unique<TestDevice>(Device{DeviceKind::kCuda, 0});
  }
  std::unique_ptr<TestDevice> device_;
};
using Types = ::testing::Types<BFloat16, Float16>;
TYPED_TEST_SUITE(WgmmaGemmTest, Types);

struct Shape {
  std::vector<int64_t> offsets;
  int64_t cols, depth;
  Layout layout = Layout::kTransposed;
};

template <typename T>
T Value(int64_t i, int64_t period) {
  return T(static_cast<float>(i * 7919 % period - period / 2) / 64);
}

// Rows beyond the last group keep -77. `weights` of each group, or the first one's for all.
template <typename T>
std::vector<T> Run(const TestDevice& device, const Shape& shape, bool one_weight = false) {
  constexpr int64_t kSpare = 3;  // rows that no group has
  const auto& [offsets, cols, depth, layout] = shape;
  const auto groups = static_cast<int64_t>(offsets.size()) - 1;
  const int64_t rows = offsets.back() + kSpare, each = cols * depth;
  std::vector<T> in(size_t(rows * depth)), weight(size_t(groups * each));
  for (size_t i = 0; i < in.size(); ++i) in[i] = Value<T>(static_cast<int64_t>(i), 127);
  for (size_t i = 0; i < weight.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    weight[i] = Value<T>(one_weight ? at % each : at, 61);
  }
  const auto in_there = device.Copy(in), weight_there = device.Copy(weight);
  const auto offsets_there = device.Copy(offsets);
  const auto out = device.Copy(std::vector<T>(size_t(rows * cols), T(-77.0f)));
  const bool plain = layout == Layout::kPlain;
  const CudaGroupedGemm<T> gemm = {.in = in_there.view(rows, depth, depth),
                                   .offsets = offsets_there.span().data(),
                                   .weight = {plain ? weight_there.view(depth, cols, cols)
                                                    : weight_there.view(cols, depth, depth),
                                              groups, each},
                                   .weight_layout = layout,
                                   .out = out.view(rows, cols, cols)};
  EXPECT_TRUE(TakesWgmma(gemm));
  const absl::Status launched = device.stream().Launch([&](void* stream) {
    return CudaStatus(RunWgmma(gemm, static_cast<cudaStream_t>(stream)), "RunWgmma");
  });
  EXPECT_TRUE(launched.ok()) << launched;
  std::vector<T> got = device.Read(out);
  if (got.size() != size_t(rows * cols)) return {};

  // Each addition errs by at most 2^-23 of the magnitudes, a result of 8 bits by 2^-8 of itself.
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t row = offsets[size_t(g)]; row < offsets[size_t(g + 1)]; ++row) {
      for (int64_t col = 0; col < cols; ++col) {
        double sum = 0, magnitudes = 0;
        for (int64_t k = 0; k < depth; ++k) {
          const int64_t at = g * each + (plain ? k * cols + col : col * depth + k);
          const double term = double{static_cast<float>(in[size_t(row * depth + k)])} *
                              static_cast<float>(weight[size_t(at)]);
          sum += term;
          magnitudes += std::abs(term);
        }
        const double bound =
            std::ldexp(double(depth + 1) * magnitudes, -23) + std::ldexp(std::abs(sum), -8);
        EXPECT_NEAR(static_cast<float>(got[size_t(row * cols + col)]), sum, bound)
            << "group " << g << " row " << row << " column " << col;
        if (::testing::Test::HasFailure()) return got;
      }
    }
  }
  for (int64_t i = offsets.back() * cols; i < rows * cols; ++i) {
    EXPECT_EQ(got[size_t(i)], T(-77.0f));
  }
  return got;
}

// Every width, two tiles of rows, tails of rows, columns and depth, groups without rows.
TYPED_TEST(WgmmaGemmTest, GroupsOfEveryWidthAreWithinTheBound) {
  for (const Layout layout : {Layout::kTransposed, Layout::kPlain}) {
    SCOPED_TRACE(layout == Layout::kPlain ? "plain" : "transposed");
    testing::ForSchedules([&] {
      Run<TypeParam>(*this->device_, {{0, 0, 1, 18, 18, 58}, 200, 136, layout});
    });
    Run<TypeParam>(*this->device_, {{0, 16, 116, 266}, 72, 72, layout});
  }
}

TYPED_TEST(WgmmaGemmTest, ARowsBitsDependNeitherOnItsGroupNorOnOthers) {
  const auto& device = *this->device_;
  const auto whole = Run<TypeParam>(device, {{0, 270}, 24, 200}, true);
  EXPECT_EQ(Run<TypeParam>(device, {{0, 1, 20, 80, 80, 270}, 24, 200}, true), whole);
}

// More stages than there are, columns that no pair fits.
TYPED_TEST(WgmmaGemmTest, DeepProductsGoRoundTheStages) {
  Run<TypeParam>(*this->device_, {{0, 5}, 33, 64 * 9 + 8});
}

#if defined(MOE_TEST_SCHEDULES)
// By what does not change from step to step: a row's bits must not depend on how many there are.
TYPED_TEST(WgmmaGemmTest, IsChosenByDeviceAlignmentAndDepth) {
  using T = TypeParam;
  alignas(16) T memory[16] = {};
  const auto takes = [&](MatrixView<const T> in, MatrixView<const T> weight, int64_t distance) {
    return TakesWgmma<T>({.in = in, .weight = {weight, 2, distance}});
  };
  const MatrixView<const T> aligned(memory, 3, 7, 8);
  EXPECT_TRUE(takes(aligned, aligned, 64));
  EXPECT_TRUE(takes({memory + 8, 1000, 7, 16}, {memory + 8, 5, 7, 8}, 8));
  EXPECT_TRUE(takes({memory, 0, 7, 8}, aligned, 64));
  EXPECT_FALSE(takes({memory, 3, 0, 8}, {memory, 3, 0, 8}, 64));
  EXPECT_FALSE(takes({memory + 1, 3, 7, 8}, aligned, 64));
  EXPECT_FALSE(takes({memory, 3, 7, 9}, aligned, 64));
  EXPECT_FALSE(takes(aligned, {memory + 1, 3, 7, 8}, 64));
  EXPECT_FALSE(takes(aligned, {memory, 3, 7, 9}, 64));
  for (const int64_t distance : {63, 0, -64}) EXPECT_FALSE(takes(aligned, aligned, distance));
  EXPECT_FALSE(takes(aligned, {memory, 3, 7, 16}, 8));  // side by side
  EXPECT_TRUE(TakesWgmma<T>({.in = aligned, .weight = {aligned, 1}}));
  const cusim::ScopedMachine machine({.major = 8});
  EXPECT_FALSE(takes(aligned, aligned, 64));
}

// Its copies have coordinates of 32 bits.
TYPED_TEST(WgmmaGemmTest, RefusesTwoToThe31RowsColumnsOrTerms) {
  using T = TypeParam;
  const auto refuses = [](int64_t rows, int64_t cols, int64_t depth) {
    alignas(16) static T memory[1];
    return RunWgmma<T>({.in = {memory, rows, depth, depth},
                        .weight = {{memory, cols, depth, depth}, 1},
                        .out = {memory, rows, cols, cols}},
                       nullptr) == cudaErrorInvalidValue;
  };
  constexpr int64_t kMany = int64_t{1} << 31;
  EXPECT_TRUE(refuses(kMany, 8, 8));
  EXPECT_TRUE(refuses(8, kMany, 8));
  EXPECT_TRUE(refuses(8, 8, kMany));
}
#endif

}  // namespace
}  // namespace moe::gemm
