// Matrix products on every device of this build, and by cuBLAS where it is. This project's kernels
// have the specification's bits in float32; the others are within a bound. The kernels' own test,
// grouped_gemm_cuda_test.cc, has shapes, layouts and schedules.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/grouped_gemm/gemm_cublas.h"
#include "kernels/grouped_gemm/gemm_problem.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "tests/kernels/device_memory.h"
#include "tests/kernels/gemm_matrix.h"

namespace moe {
namespace {

using gemm::Layout;
using testing::DeviceMatrix;
using testing::TestDevice;
using testing::TestDevices;

// A device, and what multiplies there.
struct Path {
  std::unique_ptr<TestDevice> device;
  std::unique_ptr<Cublas> cublas;
  GemmOptions options;

  bool HasBitsOfFloat() const { return cublas == nullptr; }
  ::testing::Message name() const {
    return ::testing::Message() << device->name() << (cublas == nullptr ? "" : ", cuBLAS");
  }
};

std::vector<Path> Paths() {
  std::vector<Path> paths;
  for (auto& device : TestDevices()) paths.push_back({.device = std::move(device)});
  const Device last = paths.back().device->stream().device();
  if (auto cublas = MakeCublas(GroupedGemmKernel::kCublas, RowBits::kMayDependOnCount, last);
      cublas.ok()) {
    const GemmOptions options = {GroupedGemmKernel::kCublas, cublas->get()};
    paths.push_back({std::make_unique<TestDevice>(last), *std::move(cublas), options});
  }
  return paths;
}

// Each addition errs by at most 2^-23 of a partial sum (grouped_gemm_cuda.h; where sums are
// rounded to nearest, and products too, by half of that each); a result in bfloat16, of 8 bits, by
// 2^-8 of itself, one in float16, of 11, by 2^-11, below the normal numbers by 2^-25.
template <typename T, typename TOut>
void ExpectInBound(const gemm::Problem<T, TOut>& problem, const Matrix<TOut>& got) {
  const auto& [a, b, old, a_layout, b_layout, write, tree, exact] = problem;
  for (int64_t i = 0; i < got.rows(); ++i) {
    for (int64_t j = 0; j < got.cols(); ++j) {
      double sum = write == Write::kAdd ? double{static_cast<float>(old(i, j))} : 0.0;
      double magnitudes = std::abs(sum);
      for (int64_t k = 0; k < problem.depth(); ++k) {
        const double term =
            double{static_cast<float>(a_layout == Layout::kPlain ? a(i, k) : a(k, i))} *
            double{static_cast<float>(b_layout == Layout::kPlain ? b(k, j) : b(j, k))};
        sum += term;
        magnitudes += std::abs(term);
      }
      const double bound = std::ldexp(static_cast<double>(problem.depth() + 1), -23) * magnitudes;
      constexpr bool kHalf = std::is_same_v<TOut, Float16>;
      const double most = std::abs(sum) + bound;
      if (kHalf && most > 65504) {  // beyond the largest number, or close
        ASSERT_GE(std::abs(got(i, j)), 65472) << i << " " << j;
        continue;
      }
      const double rounding = std::is_same_v<TOut, float> ? 0.0
                              : kHalf                     ? std::ldexp(most, -11) + 0x1p-25
                                                          : std::ldexp(most, -8);
      ASSERT_NEAR(got(i, j), sum, bound + rounding) << i << " " << j;
    }
  }
}

// `got` is what became of the output, which was `old`.
template <typename T, typename TOut>
void ExpectProduct(const Path& path, gemm::Problem<T, TOut> problem, const Matrix<TOut>& old,
                   Matrix<TOut> got) {
  Matrix<TOut> want = old;
  problem.c = want.view();
  if (std::is_same_v<T, float> && path.HasBitsOfFloat()) {
    gemm::Reference<T, TOut>(problem);
  } else {
    ExpectInBound(problem, got);
    for (int64_t r = 0; r < got.rows(); ++r) {
      std::copy_n(got.view().row(r), got.cols(), want.view().row(r));
    }
  }
  EXPECT_TRUE(SameBits(got, want)) << "elements, those beside the rows included";
}

// Rows [begin, end) without what is beside them.
template <typename T>
Matrix<T> RowsOf(const Matrix<T>& all, int64_t begin, int64_t end) {
  Matrix<T> rows(end - begin, all.cols(), all.layout());
  for (int64_t r = begin; r < end; ++r) {
    std::copy_n(all.view().row(r), all.cols(), rows.view().row(r - begin));
  }
  return rows;
}

template <typename T>
class DeviceGemmTest : public ::testing::Test {};
using Types = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(DeviceGemmTest, Types);

// Groups that are empty, at either end and between, and one that ends inside a tile.
TYPED_TEST(DeviceGemmTest, GroupedProducts) {
  using T = TypeParam;
  const Groups<T> groups({0, 5, 0, 71, 1, 0}, 21, 40);
  const int64_t count = static_cast<int64_t>(groups.weight.size()), total = groups.total();
  const auto x = Mixed<T>(total, 40, 3, 1), dy = Mixed<T>(total, 21, 2, 2);
  const auto old_y = Mixed<T>(total, 21, 1, 3), old_dx = Mixed<T>(total, 40, 0, 4);
  for (const Path& path : Paths()) {
    const auto& device = path.device;
    SCOPED_TRACE(path.name());
    Workspace workspace(device->memory());
    std::vector<DeviceMatrix<T>> weight;
    std::vector<MatrixView<const T>> views;
    for (const Matrix<T>& w : groups.weight) weight.push_back(device->Copy(w));
    for (const DeviceMatrix<T>& w : weight) views.push_back(w.view());
    const auto x_there = device->Copy(x), dy_there = device->Copy(dy);
    const auto y = device->Copy(old_y), dx = device->Copy(old_dx);
    std::vector<int64_t> offsets = groups.offsets;
    ASSERT_TRUE(GroupedGemm<T>(x_there.view(), offsets, views, y.view(), workspace,
                               device->stream(), path.options)
                    .ok());
    ASSERT_TRUE(GroupedGemmInputGradient<T>(dy_there.view(), offsets, views, dx.view(), workspace,
                                            device->stream(), path.options)
                    .ok());
    // Host memory that the calls have read.
    std::fill(offsets.begin(), offsets.end(), -1);
    std::fill(views.begin(), views.end(), MatrixView<const T>());
    const Matrix<T> got_y = device->Read(y), got_dx = device->Read(dx);
    EXPECT_TRUE(got_y.edges_intact() && got_dx.edges_intact());
    for (int64_t g = 0; g < count; ++g) {
      SCOPED_TRACE(g);
      const int64_t begin = groups.offsets[g], end = groups.offsets[g + 1];
      const auto weight_view = groups.weight[g].view();
      ExpectProduct<T, T>(path,
                          {.a = RowRange(x.view(), begin, end),
                           .b = weight_view,
                           .c = {},
                           .b_layout = Layout::kTransposed},
                          RowsOf(old_y, begin, end), RowsOf(got_y, begin, end));
      ExpectProduct<T, T>(path, {.a = RowRange(dy.view(), begin, end), .b = weight_view, .c = {}},
                          RowsOf(old_dx, begin, end), RowsOf(got_dx, begin, end));
    }
  }
}

// No rows: kOverwrite writes zeros, kAdd leaves what was there.
TYPED_TEST(DeviceGemmTest, WeightGradient) {
  using T = TypeParam;
  for (const int64_t rows : {0, 1, 70}) {
    const auto dy = Mixed<T>(rows, 21, 3, 1), x = Mixed<T>(rows, 40, 1, 2);
    const auto old = Mixed<float>(21, 40, 2, 3);
    for (const Write write : {Write::kOverwrite, Write::kAdd}) {
      for (const Path& path : Paths()) {
        const auto& device = path.device;
        SCOPED_TRACE(path.name() << ", " << rows << " rows");
        Workspace workspace(device->memory());
        const auto dy_there = device->Copy(dy), x_there = device->Copy(x);
        const auto dw = device->Copy(old);
        ASSERT_TRUE(GemmWeightGradient<T>(dy_there.view(), x_there.view(), dw.view(), write,
                                          workspace, device->stream(), path.options)
                        .ok());
        ExpectProduct<T, float>(path,
                                {.a = dy.view(),
                                 .b = x.view(),
                                 .c = {},
                                 .a_layout = Layout::kTransposed,
                                 .write = write},
                                old, device->Read(dw));
      }
    }
  }
}

// One group, and its outputs in float32.
template <typename T, typename TOut>
void CheckDense(int64_t rows, int64_t in, int64_t out) {
  const auto x = Mixed<T>(rows, in, 3, 1), dy = Mixed<T>(rows, out, 2, 2);
  const auto weight = Mixed<T>(out, in, 1, 3);
  const auto old_y = Mixed<TOut>(rows, out, 1, 4);
  const auto old_dx = Mixed<TOut>(rows, in, 2, 5);
  for (const Path& path : Paths()) {
    const auto& device = path.device;
    SCOPED_TRACE(path.name() << ", " << rows << " rows, " << in << " to " << out);
    Workspace workspace(device->memory());
    const auto x_there = device->Copy(x), dy_there = device->Copy(dy), w = device->Copy(weight);
    const auto y = device->Copy(old_y), dx = device->Copy(old_dx);
    ASSERT_TRUE((Gemm<T, TOut>(x_there.view(), w.view(), y.view(), workspace, device->stream(),
                               path.options))
                    .ok());
    ASSERT_TRUE((GemmInputGradient<T, TOut>(dy_there.view(), w.view(), dx.view(), workspace,
                                            device->stream(), path.options))
                    .ok());
    ExpectProduct<T, TOut>(
        path, {.a = x.view(), .b = weight.view(), .c = {}, .b_layout = Layout::kTransposed}, old_y,
        device->Read(y));
    ExpectProduct<T, TOut>(path, {.a = dy.view(), .b = weight.view(), .c = {}}, old_dx,
                           device->Read(dx));
  }
}

TYPED_TEST(DeviceGemmTest, DenseProducts) {
  using T = TypeParam;
  CheckDense<T, T>(70, 40, 21);
  CheckDense<T, float>(70, 40, 21);
  CheckDense<T, float>(0, 40, 21);
  CheckDense<T, T>(3, 0, 5);  // y without terms is zero, dx has no elements
  CheckDense<T, float>(3, 5, 0);
}

TYPED_TEST(DeviceGemmTest, NoGroupsAndNoRows) {
  using T = TypeParam;
  for (const Path& path : Paths()) {
    const auto& device = path.device;
    Workspace workspace(device->memory());
    const MatrixView<const T> none(nullptr, 0, 40);
    EXPECT_TRUE(
        GroupedGemm<T>(none, {0}, {}, {nullptr, 0, 21}, workspace, device->stream(), path.options)
            .ok());
    const auto w = device->Copy(Mixed<T>(21, 40, 0, 1));
    const std::vector<MatrixView<const T>> views = {w.view(), w.view()};
    EXPECT_TRUE(GroupedGemm<T>(none, {0, 0, 0}, views, {nullptr, 0, 21}, workspace,
                               device->stream(), path.options)
                    .ok());
    EXPECT_TRUE(device->stream().Synchronize().ok());
  }
}

}  // namespace
}  // namespace moe
