// The two CUDA paths of grouped products, and how their results are checked.
#ifndef MOE_TESTS_KERNELS_GROUPED_GEMM_CUDA_CHECK_H_
#define MOE_TESTS_KERNELS_GROUPED_GEMM_CUDA_CHECK_H_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/grouped_gemm/grouped_gemm_cuda.h"
#include "tests/cusim/schedules.h"

namespace moe {

using Matrix32 = cusim::DeviceMatrix<float>;

// A path runs a problem with float32 output, and checks c, which held `old` before.

// 16-bit types on tensor cores, against sums in float64.
template <typename Type>
struct Mma {
  using T = Type;
  template <typename Problem>
  static cudaError_t Run(const Problem& problem) {
    return gemm::RunMma(problem, nullptr);
  }

  // Products of two 16-bit numbers are exact. Each addition errs by at most 2^-23 of a partial sum
  // (tensor cores may cut off where IEEE 754 would round), and no partial sum exceeds the sum of
  // magnitudes by more than what was added to it in error: one term more covers that.
  static void Expect(const gemm::Problem<T, float>& problem, MatrixView<float> old) {
    const auto& [a, b, c, a_layout, b_layout, write, exact] = problem;
    for (int64_t i = 0; i < c.rows(); ++i) {
      for (int64_t j = 0; j < c.cols(); ++j) {
        double sum = write == Write::kAdd ? static_cast<double>(old(i, j)) : 0.0;
        double magnitudes = std::abs(sum);
        for (int64_t k = 0; k < problem.depth(); ++k) {
          const auto x = a_layout == gemm::Layout::kPlain ? a(i, k) : a(k, i);
          const auto y = b_layout == gemm::Layout::kPlain ? b(k, j) : b(j, k);
          const double term = double{static_cast<float>(x)} * double{static_cast<float>(y)};
          sum += term;
          magnitudes += std::abs(term);
        }
        const double additions = static_cast<double>(problem.depth() + 1);
        ASSERT_NEAR(c(i, j), sum, std::ldexp(additions, -23) * magnitudes) << i << " " << j;
      }
    }
  }
};

// Float32, against the specification bit by bit.
struct Fma {
  using T = float;
  template <typename Problem>
  static cudaError_t Run(const Problem& problem) {
    return gemm::RunFma(problem, nullptr);
  }

  static void Expect(const gemm::Problem<T, float>& problem, MatrixView<float> old) {
    const auto& [a, b, c, a_layout, b_layout, write, exact] = problem;
    Matrix32 want(c.rows(), c.cols(), {});
    for (int64_t i = 0; i < c.rows(); ++i) std::copy_n(old.row(i), c.cols(), want.view().row(i));
    gemm::Reference<float, float>({a, b, want.view(), a_layout, b_layout, write});
    for (int64_t i = 0; i < c.rows(); ++i) {
      for (int64_t j = 0; j < c.cols(); ++j) {
        ASSERT_EQ(std::bit_cast<uint32_t>(c(i, j)), std::bit_cast<uint32_t>(want.view()(i, j)))
            << i << " " << j;
      }
    }
  }
};

// Rows of groups, cut out of one buffer, and a matrix for each group.
struct Groups {
  // `spare`: rows after the last group.
  Groups(std::initializer_list<int64_t> rows, int64_t spare = 0) {
    for (const int64_t r : rows) offsets.push_back(offsets.back() + r);
    total = offsets.back() + spare;
  }
  int64_t count() const { return static_cast<int64_t>(offsets.size()) - 1; }
  template <typename U>
  MatrixView<U> Rows(MatrixView<U> all, int64_t g) const {
    return RowRange(all, offsets[g], offsets[g + 1]);
  }
  std::vector<int64_t> offsets = {0};
  int64_t total = 0;
};

template <typename T>
std::vector<cusim::DeviceMatrix<T>> RandomMatrices(int64_t count, int64_t rows, int64_t cols,
                                                   cusim::Layout layout, uint64_t seed) {
  std::vector<cusim::DeviceMatrix<T>> matrices;
  for (int64_t g = 0; g < count; ++g) {
    matrices.push_back(cusim::DeviceMatrix<T>::Random(rows, cols, layout, seed + g));
  }
  return matrices;
}

template <typename View, typename T>
std::vector<View> ViewsOf(std::vector<cusim::DeviceMatrix<T>>& matrices) {
  std::vector<View> views;
  for (auto& matrix : matrices) views.push_back(matrix.view());
  return views;
}

// Layouts of the two inputs and of the output.
struct Layouts {
  cusim::Layout in, weight, out;
};
inline constexpr Layouts kAligned = {cusim::kLayouts[0], cusim::kLayouts[1], cusim::kLayouts[0]};

// y = x w^T and dx = dy w of all groups.
template <typename Path>
void CheckProducts(const Groups& groups, int64_t depth, int64_t cols, const Layouts& layouts) {
  using T = typename Path::T;
  SCOPED_TRACE(::testing::Message() << groups.total << " rows, depth " << depth << ", " << cols);
  for (const auto layout : {gemm::Layout::kTransposed, gemm::Layout::kPlain}) {
    const bool transposed = layout == gemm::Layout::kTransposed;
    const auto in = cusim::DeviceMatrix<T>::Random(groups.total, depth, layouts.in, 1);
    auto weights = RandomMatrices<T>(groups.count(), transposed ? cols : depth,
                                     transposed ? depth : cols, layouts.weight, 100);
    const auto views = ViewsOf<MatrixView<const T>>(weights);
    auto old = Matrix32::Random(groups.total, cols, layouts.out, 2);
    auto out = old;
    ASSERT_EQ(Path::Run(gemm::CudaGroupedGemm<T, float>{in.view(), groups.offsets.data(), views,
                                                        layout, out.view()}),
              cudaSuccess);
    for (int64_t g = 0; g < groups.count(); ++g) {
      SCOPED_TRACE(g);
      const auto result = groups.Rows(out.view(), g), before = groups.Rows(old.view(), g);
      Path::Expect({groups.Rows(in.view(), g), views[g], result, gemm::Layout::kPlain, layout,
                    Write::kOverwrite},
                   before);
      for (int64_t r = 0; r < result.rows(); ++r) {
        std::copy_n(result.row(r), cols, before.row(r));
      }
    }
    EXPECT_TRUE(out == old) << "something was written beside the rows of groups";
  }
}

// dw (+)= dy^T x of all groups.
template <typename Path>
void CheckWeightGradients(const Groups& groups, int64_t out, int64_t in, const Layouts& layouts) {
  using T = typename Path::T;
  SCOPED_TRACE(::testing::Message() << groups.total << " rows, dw " << out << " x " << in);
  const auto dy = cusim::DeviceMatrix<T>::Random(groups.total, out, layouts.in, 1);
  const auto x = cusim::DeviceMatrix<T>::Random(groups.total, in, layouts.weight, 2);
  for (const Write write : {Write::kOverwrite, Write::kAdd}) {
    auto old = RandomMatrices<float>(groups.count(), out, in, layouts.out, 200);
    auto dw = old;
    const auto views = ViewsOf<MatrixView<float>>(dw);
    ASSERT_EQ(Path::Run(gemm::CudaGroupedWeightGradient<T>{dy.view(), x.view(),
                                                           groups.offsets.data(), views, write}),
              cudaSuccess);
    for (int64_t g = 0; g < groups.count(); ++g) {
      SCOPED_TRACE(g);
      Path::Expect({groups.Rows(dy.view(), g), groups.Rows(x.view(), g), views[g],
                    gemm::Layout::kTransposed, gemm::Layout::kPlain, write},
                   old[g].view());
      for (int64_t r = 0; r < out; ++r) {
        std::copy_n(views[g].row(r), in, old[g].view().row(r));
      }
      EXPECT_TRUE(dw[g] == old[g]) << "something was written beside the matrix";
    }
  }
}

}  // namespace moe

#endif  // MOE_TESTS_KERNELS_GROUPED_GEMM_CUDA_CHECK_H_
