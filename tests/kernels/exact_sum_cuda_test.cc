// kernels/exact_sum on the simulated GPU: the bits of the CPU's sums.
#include "kernels/exact_sum/exact_sum_cuda.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/exact_sum/exact_sum_cpu.h"
#include "tests/cusim/schedules.h"

namespace moe {
namespace {

using cusim::DeviceMatrix;
using cusim::Layout;
using Floats = DeviceMatrix<float>;
using Integers = DeviceMatrix<int64_t>;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// An array of n elements, its first one at `layout.offset` after a multiple of 16 bytes.
Integers Zeros(int64_t n, Layout layout) {
  Integers x(1, n, layout);
  std::fill_n(x.view().data(), n, 0);
  return x;
}

// One call; `sum` and `non_finite` grow.
void Accumulate(const float* partial, int unit_log2, int64_t limit, int64_t* sum, int64_t n,
                int64_t& non_finite, Write write = Write::kAdd) {
  ASSERT_EQ(exact_sum::Run(exact_sum::CudaAccumulate{.partial = partial,
                                                     .inverse_unit = std::ldexp(1.0, -unit_log2),
                                                     .limit = limit,
                                                     .sum = sum,
                                                     .write = write,
                                                     .non_finite = &non_finite,
                                                     .n = n},
                           nullptr),
            cudaSuccess);
}

TEST(ExactAccumulateCudaTest, RoundsToTheGridTiesToEven) {
  const std::vector<float> x = {0.5f, 1.5f, 2.5f, -0.5f, -1.5f, 0.75f, 3.0f, -0.0f, 1e-30f};
  const auto n = static_cast<int64_t>(x.size());
  std::vector<int64_t> sum(x.size());
  int64_t non_finite = 0;
  Accumulate(x.data(), 0, INT64_MAX, sum.data(), n, non_finite);
  EXPECT_EQ(sum, (std::vector<int64_t>{0, 2, 2, 0, -2, 1, 3, 0, 0}));
  Accumulate(x.data(), -1, INT64_MAX / 2, sum.data(), n, non_finite);
  EXPECT_EQ(sum, (std::vector<int64_t>{1, 5, 7, -1, -5, 3, 9, 0, 0}));
  EXPECT_EQ(non_finite, 0);
}

// Magnitudes from far below the unit to far above the limit, in every place of a vector.
TEST(ExactAccumulateCudaTest, EqualsTheCpuForAnyMagnitudeGridLayoutAndSchedule) {
  const auto check = [](int unit_log2, int64_t terms, int64_t n, Layout in, Layout out) {
    auto x = Floats::Random(1, n, in, 1);
    for (int64_t i = 0; i < n; ++i) {
      float& value = x.view()(0, i);
      value = std::ldexp(value, static_cast<int>(i % 81) - 70 - unit_log2);
    }
    auto got = Zeros(n, out), want = Zeros(n, out);
    int64_t non_finite = 3, non_finite_want = 3;
    for (const Write write : {Write::kAdd, Write::kAdd, Write::kOverwrite}) {
      Accumulate(x.view().data(), unit_log2, INT64_MAX / terms, got.view().data(), n, non_finite,
                 write);
      non_finite_want += ExactAccumulateRange(
          x.view().data(), std::ldexp(1.0, -unit_log2), INT64_MAX / terms,
          write == Write::kAdd ? SumWrite::kAdd : SumWrite::kOverwrite, want.view().data(), n);
    }
    EXPECT_TRUE(got == want) << unit_log2 << " " << terms << " " << n;
    EXPECT_EQ(non_finite, non_finite_want) << unit_log2 << " " << terms << " " << n;
  };
  cusim::ForSeeds([&] {
    for (const auto& [in, out] : cusim::kLayoutPairs) {
      for (const int64_t n : {1, 7, 333, 2051}) check(-50, 4096, n, in, out);
      check(-34, 2, 333, in, out);
      check(0, int64_t{1} << 40, 333, in, out);
    }
  });
}

TEST(ExactAccumulateCudaTest, NonFiniteElementsCountAndAddNothing) {
  for (const int64_t at : {0, 5, 16, 18}) {
    for (const float bad : {kNaN, -kNaN, kInfinity, -kInfinity, 3e38f, 8192.0f}) {
      std::vector<float> x(19, 0.5f);
      x[at] = bad;
      std::vector<int64_t> sum(19);
      int64_t non_finite = 4;
      Accumulate(x.data(), -50, INT64_MAX, sum.data(), 19, non_finite);
      EXPECT_EQ(non_finite, 5) << bad;
      for (int64_t i = 0; i < 19; ++i) EXPECT_EQ(sum[i], i == at ? 0 : int64_t{1} << 49);
    }
  }
}

// All threads of three blocks count at once.
TEST(ExactAccumulateCudaTest, CountsFromAllBlocksAddUp) {
  cusim::ForSeeds([] {
    const std::vector<float> x(2051, kNaN);
    std::vector<int64_t> sum(2051);
    int64_t non_finite = 0;
    Accumulate(x.data(), -50, INT64_MAX, sum.data(), 2051, non_finite);
    EXPECT_EQ(non_finite, 2051);
    EXPECT_EQ(sum, std::vector<int64_t>(2051));
  });
}

// The largest value the grid takes, of either sign; the next larger float is refused.
TEST(ExactAccumulateCudaTest, TakesTermsUpToTheLimit) {
  for (const int64_t terms : {1, 2, 1024}) {
    // The largest float32 below 2^63 / terms: terms are powers of two.
    const float above = std::ldexp(1.0f, 13) / static_cast<float>(terms);
    const float edge = std::nextafter(above, 0.0f);
    const auto q = static_cast<int64_t>(std::ldexp(static_cast<double>(edge), 50));
    const std::vector<float> x = {edge, -edge, above, -above};
    std::vector<int64_t> sum(4);
    int64_t non_finite = 0;
    Accumulate(x.data(), -50, INT64_MAX / terms, sum.data(), 4, non_finite);
    EXPECT_EQ(sum, (std::vector<int64_t>{q, -q, 0, 0})) << terms;
    EXPECT_EQ(non_finite, 2) << terms;
  }
}

// Integers of all magnitudes, the extremes among them.
Integers RandomIntegers(int64_t n, Layout layout, uint64_t seed) {
  auto x = Zeros(n, layout);
  for (int64_t i = 0; i < n; ++i) {
    const auto random = Random4({.seed = seed, .item = static_cast<uint64_t>(i)});
    const auto bits = static_cast<int64_t>(uint64_t{random[0]} << 32 | random[1]);
    x.view()(0, i) = bits >> random[2] % 63;
  }
  x.view()(0, 0) = INT64_MAX;
  x.view()(0, n / 2) = INT64_MIN;
  return x;
}

// Factors that give normal, subnormal and infinite float32, and one that is no power of two.
TEST(ExactToFloatCudaTest, EqualsTheCpuForAnyFactorLayoutAndSchedule) {
  cusim::ForSeeds([] {
    for (const auto& [in, out] : cusim::kLayoutPairs) {
      for (const int64_t n : {1, 4, 333, 1029}) {
        const auto sum = RandomIntegers(n, in, 3);
        for (const double factor : {0x1p-50, 0x1p-190, 0x1p70, 0.3e-12}) {
          Floats got(1, n, out), want(1, n, out);
          ExactToFloatRange(sum.view().data(), factor, want.view().data(), n);
          ASSERT_EQ(
              exact_sum::Run(
                  exact_sum::CudaToFloat{sum.view().data(), factor, got.view().data(), n}, nullptr),
              cudaSuccess);
          EXPECT_TRUE(got == want) << n << " " << factor;
        }
      }
    }
  });
}

TEST(ScaleCudaTest, MultipliesAndAddsInAnyLayoutAndSchedule) {
  cusim::ForSeeds([] {
    for (const auto& [in, out] : cusim::kLayoutPairs) {
      for (const int64_t n : {1, 4, 333, 1029}) {
        const auto x = Floats::Random(1, n, in, 5);
        Floats got(1, n, out), want(1, n, out);
        for (int64_t i = 0; i < n; ++i) want.view()(0, i) = x.view()(0, i) * 0.3f;
        const auto scale = [&](const Floats& from, float factor, Write write) {
          const exact_sum::CudaScale arguments = {from.view().data(), factor, got.view().data(),
                                                  write, n};
          ASSERT_EQ(exact_sum::Run(arguments, nullptr), cudaSuccess);
          EXPECT_TRUE(got == want) << n;
        };
        scale(x, 0.3f, Write::kOverwrite);
        for (int64_t i = 0; i < n; ++i) want.view()(0, i) = -want.view()(0, i);
        scale(got, -1, Write::kOverwrite);  // in place
        for (int64_t i = 0; i < n; ++i) {
          const float product = x.view()(0, i) * 0.7f;
          want.view()(0, i) += product;
        }
        scale(x, 0.7f, Write::kAdd);
      }
    }
  });
}

double SumOfSquares(const std::vector<float>& x) {
  const auto n = static_cast<int64_t>(x.size());
  std::vector<double> block_sums(exact_sum::SquaresBlocks(n), NAN);
  double result = NAN;
  EXPECT_EQ(
      exact_sum::Run(exact_sum::CudaSumOfSquares{x.data(), block_sums.data(), &result, n}, nullptr),
      cudaSuccess);
  return result;
}

TEST(SumOfSquaresCudaTest, SumsByHand) {
  EXPECT_EQ(SumOfSquares({}), 0);
  EXPECT_EQ(SumOfSquares({3, -4}), 25);
  EXPECT_EQ(SumOfSquares(std::vector<float>(4097, 2)), 4 * 4097);
  EXPECT_EQ(SumOfSquares({3e38f, 3e38f}), 2 * static_cast<double>(3e38f) * 3e38f);
  EXPECT_TRUE(std::isnan(SumOfSquares({1, kNaN})));
  EXPECT_EQ(SumOfSquares({1, -kInfinity}), kInfinity);
}

// Up to 35 blocks: the warp that folds them takes 32 at a time. Magnitudes differ within and
// between blocks, so that other orders round differently.
TEST(SumOfSquaresCudaTest, EqualsTheCpuForAnyLengthAndSchedule) {
  constexpr int64_t kBlock = 4096;
  auto all = cusim::RandomFloats(34 * kBlock + 5, 4);
  for (int64_t i = 0; i < static_cast<int64_t>(all.size()); ++i) {
    all[i] *= std::ldexp(1.0f, static_cast<int>(i % 19 + i / kBlock * 7 % 13));
  }
  cusim::ForSeeds([&] {
    for (const int64_t n : {int64_t{1}, int64_t{15}, int64_t{16}, int64_t{17}, kBlock - 1, kBlock,
                            kBlock + 1, 4 * kBlock, 9 * kBlock + 1, 20 * kBlock, 31 * kBlock,
                            32 * kBlock, 33 * kBlock, 34 * kBlock + 5}) {
      const std::vector<float> x(all.begin(), all.begin() + n);
      double want = 0;
      for (int64_t begin = 0; begin < n; begin += kBlock) {
        want += SumOfSquaresBlock(x.data() + begin, std::min(kBlock, n - begin));
      }
      EXPECT_EQ(SumOfSquares(x), want) << n;
    }
  });
}

TEST(ExactSumCudaTest, NothingIsLaunchedForNoElements) {
  EXPECT_EQ(exact_sum::Run(exact_sum::CudaAccumulate{}, nullptr), cudaSuccess);
  EXPECT_EQ(exact_sum::Run(exact_sum::CudaToFloat{}, nullptr), cudaSuccess);
  EXPECT_EQ(exact_sum::Run(exact_sum::CudaScale{}, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace moe
