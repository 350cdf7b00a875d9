// What the tests of matrix products on devices share.
#ifndef MOE_TESTS_KERNELS_DEVICE_GEMM_H_
#define MOE_TESTS_KERNELS_DEVICE_GEMM_H_

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
#include "tests/kernels/device_memory.h"
#include "tests/kernels/gemm_matrix.h"

namespace moe {

// A device, and what multiplies there.
struct Path {
  std::unique_ptr<testing::TestDevice> device;
  std::unique_ptr<Cublas> cublas;
  GemmOptions options;

  bool HasBitsOfFloat() const { return cublas == nullptr; }
  ::testing::Message name() const {
    return ::testing::Message() << device->name() << (cublas == nullptr ? "" : ", cuBLAS");
  }
};

inline std::vector<Path> Paths() {
  std::vector<Path> paths;
  for (auto& device : testing::TestDevices()) paths.push_back({.device = std::move(device)});
  const Device last = paths.back().device->stream().device();
  if (auto cublas = MakeCublas(GroupedGemmKernel::kCublas, RowBits::kMayDependOnCount, last);
      cublas.ok()) {
    const GemmOptions options = {GroupedGemmKernel::kCublas, cublas->get()};
    paths.push_back({std::make_unique<testing::TestDevice>(last), *std::move(cublas), options});
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
            double{static_cast<float>(a_layout == gemm::Layout::kPlain ? a(i, k) : a(k, i))} *
            double{static_cast<float>(b_layout == gemm::Layout::kPlain ? b(k, j) : b(j, k))};
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

// Layouts of the two inputs and of the output. Where all rows begin at multiples of 16 bytes copies
// are asynchronous on CUDA.
struct Layouts {
  testing::MatrixLayout in, weight, out;
};
inline constexpr Layouts kAligned = {testing::kLayouts[0], testing::kLayouts[1],
                                     testing::kLayouts[0]};

}  // namespace moe

#endif  // MOE_TESTS_KERNELS_DEVICE_GEMM_H_
