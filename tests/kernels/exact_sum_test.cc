// kernels/exact_sum: the grid, its edges, and sums that do not depend on their order.
#include "kernels/exact_sum/exact_sum.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "kernels/exact_sum/exact_sum_cpu.h"
#include "kernels/exact_sum/grad_accumulator.h"
#include "kernels/exact_sum/scaled_sum.h"
#include "tests/kernels/op_test.h"

namespace moe {
namespace {

using testing::kInfinity;
using testing::kNaN;
using testing::RandomFloats;
using testing::SameBits;
using testing::TestStream;

struct Sums {
  std::vector<int64_t> sum;
  int64_t non_finite = 0;

  explicit Sums(size_t n) : sum(n, 0) {}
  absl::Status Add(const ExactGrid& grid, const std::vector<float>& x, TestStream& stream) {
    return ExactAccumulate(grid, x, absl::MakeSpan(sum), Write::kAdd, &non_finite, *stream);
  }
};

// The specification in long double, which holds every int64 exactly.
void ReferenceAdd(const ExactGrid& grid, const std::vector<float>& x, Sums& sums) {
  for (size_t i = 0; i < x.size(); ++i) {
    const long double q =
        std::nearbyint(std::ldexp(static_cast<long double>(x[i]), -grid.unit_log2));
    if (!(std::abs(q) <= static_cast<long double>(grid.limit()))) {
      ++sums.non_finite;
    } else {
      sums.sum[i] += static_cast<int64_t>(q);
    }
  }
}

TEST(ExactAccumulateTest, RoundsToTheGridTiesToEven) {
  TestStream stream;
  const std::vector<float> x = {0.5f, 1.5f, 2.5f, -0.5f, -1.5f, 0.75f, 3.0f, -0.0f, 1e-30f};
  Sums sums(x.size());
  ASSERT_TRUE(sums.Add({.unit_log2 = 0}, x, stream).ok());
  EXPECT_EQ(sums.sum, (std::vector<int64_t>{0, 2, 2, 0, -2, 1, 3, 0, 0}));
  ASSERT_TRUE(sums.Add({.unit_log2 = -1, .max_terms = 2}, x, stream).ok());
  EXPECT_EQ(sums.sum, (std::vector<int64_t>{1, 5, 7, -1, -5, 3, 9, 0, 0}));
  EXPECT_EQ(sums.non_finite, 0);
}

// Magnitudes from far below the unit to far above the limit, in every position of a vector.
TEST(ExactAccumulateTest, MatchesTheSpecificationForAllMagnitudesAndGrids) {
  TestStream stream;
  for (const int unit : {-50, -34, 0}) {
    for (const int64_t terms : {int64_t{1}, int64_t{3}, int64_t{4096}, int64_t{1} << 40}) {
      const ExactGrid grid = {.unit_log2 = unit, .max_terms = terms};
      for (const int64_t n : {1, 7, 8, 9, 333}) {
        auto x = RandomFloats(n, 1);
        for (int64_t i = 0; i < n; ++i)
          x[i] = std::ldexp(x[i], static_cast<int>(i % 80) - 70 - unit);
        Sums sums(x.size()), expected(x.size());
        ASSERT_TRUE(sums.Add(grid, x, stream).ok());
        ReferenceAdd(grid, x, expected);
        EXPECT_EQ(sums.sum, expected.sum) << unit << " " << terms << " " << n;
        EXPECT_EQ(sums.non_finite, expected.non_finite) << unit << " " << terms << " " << n;
      }
    }
  }
}

TEST(ExactAccumulateTest, NonFiniteElementsCountAndAddNothing) {
  TestStream stream;
  for (const size_t at : {0, 5, 16, 18}) {
    for (const float bad : {kNaN, -kNaN, kInfinity, -kInfinity, 3e38f, 8192.0f}) {
      std::vector<float> x(19, 0.5f);
      x[at] = bad;
      Sums sums(19);
      sums.non_finite = 4;
      ASSERT_TRUE(sums.Add({}, x, stream).ok());
      EXPECT_EQ(sums.non_finite, 5) << bad;
      for (size_t i = 0; i < 19; ++i) EXPECT_EQ(sums.sum[i], i == at ? 0 : int64_t{1} << 49);
    }
  }
}

// M terms at the largest value the grid takes, of either sign, in any order: no overflow (UBSan
// watches), and the next larger float is refused.
// Elements of every kind, at every place of a vector and of a cache line.
TEST(ExactAccumulateTest, OverwritesWhatIsThereInCacheOrPastIt) {
  std::vector<float> x = testing::RandomFloats(203, 1);
  x[1] = kNaN;
  x[100] = 0x1p60f;  // above the limit
  x[202] = -kInfinity;
  const double inverse_unit = 0x1p30;
  std::vector<int64_t> want(x.size(), 0);
  const auto n = static_cast<int64_t>(x.size());
  ASSERT_EQ(
      ExactAccumulateRange(x.data(), inverse_unit, INT64_MAX / 8, SumWrite::kAdd, want.data(), n),
      3);
  for (const SumWrite write : {SumWrite::kOverwrite, SumWrite::kStreamed}) {
    for (const int64_t size : {int64_t{0}, int64_t{1}, int64_t{64}, n}) {
      for (size_t offset = 0; offset < 8; ++offset) {
        Workspace workspace;
        const auto memory = workspace.Array<int64_t>(n + 8).value();
        std::fill(memory.begin(), memory.end(), -7);
        const auto sum = memory.subspan(offset, size);
        EXPECT_EQ(
            ExactAccumulateRange(x.data(), inverse_unit, INT64_MAX / 8, write, sum.data(), size),
            size < 2   ? 0
            : size < n ? 1
                       : 3);
        EXPECT_TRUE(std::equal(sum.begin(), sum.end(), want.begin())) << size << " " << offset;
        for (const int64_t& beyond : memory.subspan(offset + size)) EXPECT_EQ(beyond, -7);
        for (const int64_t& before : memory.subspan(0, offset)) EXPECT_EQ(before, -7);
      }
    }
  }
}

TEST(ExactAccumulateTest, MaxTermsAtTheLimitDoNotOverflow) {
  TestStream stream;
  for (const int64_t terms : {1, 2, 3, 5, 64, 1000}) {
    const ExactGrid grid = {.unit_log2 = -50, .max_terms = terms};
    // The largest float whose q is within the limit: 2^63 itself is above INT64_MAX.
    auto edge = static_cast<float>(std::ldexp(static_cast<double>(grid.limit()), -50));
    while (std::ldexp(static_cast<long double>(edge), 50) >
           static_cast<long double>(grid.limit())) {
      edge = std::nextafter(edge, 0.0f);
    }
    const auto q = static_cast<int64_t>(std::ldexp(static_cast<double>(edge), 50));
    Sums sums(9), mixed(9);
    for (int64_t i = 0; i < terms; ++i) {
      ASSERT_TRUE(sums.Add(grid, std::vector<float>(9, edge), stream).ok());
      ASSERT_TRUE(mixed.Add(grid, std::vector<float>(9, i % 2 == 0 ? edge : -edge), stream).ok());
    }
    EXPECT_EQ(sums.sum, std::vector<int64_t>(9, terms * q)) << terms;
    EXPECT_EQ(mixed.sum, std::vector<int64_t>(9, terms % 2 * q)) << terms;
    EXPECT_EQ(sums.non_finite, 0);
    const std::vector<float> above(9, std::nextafter(edge, kInfinity));
    ASSERT_TRUE(sums.Add(grid, above, stream).ok());
    EXPECT_EQ(sums.non_finite, 9) << terms;
  }
}

TEST(ExactAccumulateTest, AnyOrderOfTermsAndAnyNumberOfThreadsGivesTheSameBits) {
  constexpr int kTerms = 7;
  const int64_t n = 70001;
  const ExactGrid grid = {.max_terms = kTerms};
  std::vector<std::vector<float>> terms;
  for (int i = 0; i < kTerms; ++i)
    terms.push_back(RandomFloats(n, 10 + i, std::ldexp(1.0, -3 * i)));
  terms[2][5] = kNaN;
  terms[4][70000] = kInfinity;
  Sums expected(n);
  TestStream one;
  for (const auto& x : terms) ASSERT_TRUE(expected.Add(grid, x, one).ok());
  EXPECT_EQ(expected.non_finite, 2);
  for (const int threads : {2, 3}) {
    TestStream stream(threads);
    for (int shuffle = 1; shuffle <= 3; ++shuffle) {
      Sums sums(n);
      for (int i = 0; i < kTerms; ++i) {
        ASSERT_TRUE(sums.Add(grid, terms[(i * shuffle + 3) % kTerms], stream).ok());
      }
      EXPECT_EQ(sums.sum, expected.sum);
      EXPECT_EQ(sums.non_finite, 2);
    }
  }
}

TEST(ExactAccumulateTest, RefusesDifferentLengthsAndBadGrids) {
  TestStream stream;
  Sums sums(3);
  EXPECT_EQ(testing::Message(sums.Add({}, std::vector<float>(4), stream)),
            "ExactAccumulate: sum is [3], expected [4]");
  EXPECT_EQ(testing::Message(sums.Add({.max_terms = 0}, std::vector<float>(3), stream)),
            "ExactAccumulate: max_terms is 0, expected >= 1");
  EXPECT_EQ(testing::Message(sums.Add({.unit_log2 = -1100}, std::vector<float>(3), stream)),
            "ExactAccumulate: unit_log2 is -1100, expected -1000 to 1000");
}

TEST(ExactToFloatTest, ReadsBackWhatTheGridHoldsAndRoundsAsFloat64Does) {
  const int64_t n = 40009;
  std::vector<int64_t> sum(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    const auto r = Random4({.seed = 9, .item = uint64_t(i)});
    sum[i] = static_cast<int64_t>((uint64_t{r[0]} << 32) | r[1]) >> (i % 64);
  }
  sum[0] = INT64_MAX;
  sum[1] = INT64_MIN;
  for (const int threads : {1, 2}) {
    TestStream stream(threads);
    for (const double scale : {1.0, 0.125, 1.0 / 3}) {
      std::vector<float> out(static_cast<size_t>(n));
      ASSERT_TRUE(ExactToFloat({}, sum, scale, absl::MakeSpan(out), *stream).ok());
      for (int64_t i = 0; i < n; ++i) {
        const auto expected = static_cast<float>(static_cast<double>(sum[i]) * 0x1p-50 * scale);
        ASSERT_TRUE(SameBits(out[i], expected)) << sum[i] << " " << scale;
      }
    }
  }
  TestStream stream;
  const std::vector<float> x = {0.1f, -3.25f, 0x1p-40f, 1.0f / 3};
  Sums sums(4);
  ASSERT_TRUE(sums.Add({}, x, stream).ok());
  std::vector<float> back(4), wrong(3);
  ASSERT_TRUE(ExactToFloat({}, sums.sum, 1.0, absl::MakeSpan(back), *stream).ok());
  EXPECT_EQ(back, x);
  EXPECT_EQ(ExactToFloat({}, sums.sum, 1.0, absl::MakeSpan(wrong), *stream).code(),
            absl::StatusCode::kInvalidArgument);
}

double ReferenceSumOfSquares(const std::vector<float>& x) {
  double total = 0;
  for (size_t block = 0; block < x.size(); block += 4096) {
    double s[16] = {};
    for (size_t i = block; i < std::min(x.size(), block + 4096); ++i) {
      s[(i - block) % 16] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    }
    for (int width = 8; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) s[i] += s[i + width];
    }
    total += s[0];
  }
  return total;
}

TEST(ScaleTest, MultipliesEachElementOnAnyNumberOfThreads) {
  const int64_t n = 40009;
  const auto x = RandomFloats(n, 7);
  for (const int threads : {1, 2}) {
    TestStream stream(threads);
    std::vector<float> out(static_cast<size_t>(n)), in_place = x, wrong(3);
    ASSERT_TRUE(Scale(x, 1.0f / 3, absl::MakeSpan(out), Write::kOverwrite, *stream).ok());
    for (int64_t i = 0; i < n; ++i) ASSERT_EQ(out[i], x[i] * (1.0f / 3));
    ASSERT_TRUE(
        Scale(in_place, 1.0f / 3, absl::MakeSpan(in_place), Write::kOverwrite, *stream).ok());
    EXPECT_EQ(in_place, out);
    EXPECT_EQ(testing::Message(Scale(x, 1, absl::MakeSpan(wrong), Write::kAdd, *stream)),
              "Scale: out is [3], expected [40009]");
  }
}

// A fused multiply-add would keep the product's 2^-24.
TEST(ScaleTest, AddsProductsThatAreRounded) {
  TestStream stream;
  const std::vector<float> x = {1 + 0x1p-12f, 3};
  std::vector<float> out = {-1 - 0x1p-11f, 0.5f};
  ASSERT_TRUE(Scale(x, 1 + 0x1p-12f, absl::MakeSpan(out), Write::kAdd, *stream).ok());
  EXPECT_EQ(out, (std::vector<float>{0, 3.5f + 3 * 0x1p-12f}));
}

TEST(SumOfSquaresTest, HasTheBitsOfTheFixedOrderAtEveryLengthOnAnyNumberOfThreads) {
  Workspace workspace;
  for (const int64_t n : {0, 1, 15, 17, 4095, 4096, 4097, 100000, 1100000}) {
    const auto x = RandomFloats(n, 5);
    const double expected = ReferenceSumOfSquares(x);
    for (const int threads : {1, 2, 3}) {
      TestStream stream(threads);
      double result = -1;
      ASSERT_TRUE(SumOfSquares({x, 1}, &result, workspace, *stream).ok());
      EXPECT_EQ(result, expected) << n << " " << threads;
    }
  }
  TestStream stream;
  auto x = RandomFloats(100, 6);
  x[99] = kNaN;
  double result = 0;
  ASSERT_TRUE(SumOfSquares({x, 1}, &result, workspace, *stream).ok());
  EXPECT_TRUE(std::isnan(result));
}

// Every part that operations may read, and what they make of exact sums, against the float32 that
// ToFloat writes.
TEST(ScaledSumTest, PartsAndOperationsSeeWhatToFloatWrites) {
  constexpr int64_t kSize = 9001;
  const ExactGrid grid = {.unit_log2 = -40, .max_terms = 3};
  const auto partial = RandomFloats(kSize, 8);
  std::vector<int64_t> exact(kSize);
  int64_t non_finite = 0;
  TestStream stream(2);
  Workspace workspace;
  ASSERT_TRUE(
      ExactAccumulate(grid, partial, absl::MakeSpan(exact), Write::kAdd, &non_finite, *stream)
          .ok());
  for (const ScaledSum& sum : {ScaledSum(partial, 1.0 / 3), ScaledSum(exact, grid, 1.0 / 3)}) {
    std::vector<float> all(kSize);
    ASSERT_TRUE(sum.ToFloat(absl::MakeSpan(all), *stream).ok());
    EXPECT_NEAR(all[5], partial[5] / 3, std::abs(partial[5]) * 1e-6);
    for (const int64_t begin : {int64_t{0}, int64_t{1}, int64_t{4096}, kSize - 1}) {
      std::vector<float> part(std::min<int64_t>(100, kSize - begin));
      sum.Read(begin, std::ssize(part), part.data());
      EXPECT_EQ(part, std::vector<float>(&all[begin], &all[begin] + part.size())) << begin;
    }
    double squares = 0, squares_of_all = 0;
    ASSERT_TRUE(SumOfSquares(sum, &squares, workspace, *stream).ok());
    ASSERT_TRUE(SumOfSquares({all, 1}, &squares_of_all, workspace, *stream).ok());
    EXPECT_EQ(squares, squares_of_all);
  }
  EXPECT_EQ(
      testing::Message(SumOfSquares({exact, {.max_terms = 0}, 1}, nullptr, workspace, *stream)),
      "SumOfSquares: max_terms is 0, expected >= 1");
}

TEST(GradAccumulatorTest, AddsInTheOrderOfArrivalOrExactly) {
  TestStream stream;
  Workspace workspace;
  const auto fill = [](float value) {
    return [value](absl::Span<float> out, Write write) {
      for (float& x : out) x = write == Write::kAdd ? x + value : value;
      return absl::OkStatus();
    };
  };
  std::vector<float> floats(5, 1.0f);
  const GradAccumulator plain(absl::MakeSpan(floats));
  EXPECT_FALSE(plain.exact());
  EXPECT_EQ(plain.size(), 5);
  ASSERT_TRUE(plain.Add(fill(0.5f), workspace, *stream).ok());
  EXPECT_EQ(floats, std::vector<float>(5, 1.5f));

  std::vector<int64_t> sum(5, 0);
  int64_t non_finite = 0;
  const GradAccumulator exact(absl::MakeSpan(sum), {.unit_log2 = -2, .max_terms = 4}, &non_finite);
  EXPECT_TRUE(exact.exact());
  EXPECT_EQ(exact.size(), 5);
  for (const float value : {0.5f, 1.0f, kNaN}) {
    ASSERT_TRUE(exact.Add(fill(value), workspace, *stream).ok());
  }
  EXPECT_EQ(sum, std::vector<int64_t>(5, 6));
  EXPECT_EQ(non_finite, 5);
  EXPECT_EQ(workspace.used_bytes(), 0);
  const auto fail = [](absl::Span<float>, Write) {
    return absl::InternalError("boom");
  };
  EXPECT_EQ(exact.Add(fail, workspace, *stream).message(), "boom");
  EXPECT_EQ(sum, std::vector<int64_t>(5, 6));
}

TEST(GradAccumulatorTest, TheFirstPartialOfAnEmptySumOverwritesIt) {
  TestStream stream;
  Workspace workspace;
  const auto fill = [](absl::Span<float> out, Write write) {
    for (float& x : out) x = write == Write::kAdd ? x + 0.5f : 0.5f;
    return absl::OkStatus();
  };
  std::vector<float> floats(3);
  std::vector<int64_t> sum(3);
  int64_t non_finite = 0;
  bool empty = true;
  const GradAccumulator plain(absl::MakeSpan(floats), &empty);
  const GradAccumulator exact(absl::MakeSpan(sum), {.unit_log2 = -2, .max_terms = 4}, &non_finite,
                              &empty);
  for (const GradAccumulator& grad : {plain, exact}) {
    // Of any copy.
    for (int adds = 0; adds < 3; ++adds) {
      std::fill(floats.begin(), floats.end(), kNaN);
      std::fill(sum.begin(), sum.end(), 99);
      empty = true;
      for (int i = 0; i < adds; ++i) {
        ASSERT_TRUE(GradAccumulator(grad).Add(fill, workspace, *stream).ok());
        EXPECT_FALSE(empty);
      }
      ASSERT_TRUE(grad.ClearIfEmpty(*stream).ok());
      EXPECT_FALSE(empty);
      if (grad.exact()) {
        EXPECT_EQ(sum, std::vector<int64_t>(3, 2 * adds));
      } else {
        EXPECT_EQ(floats, std::vector<float>(3, 0.5f * static_cast<float>(adds)));
      }
    }
  }
  EXPECT_EQ(non_finite, 0);
}

}  // namespace
}  // namespace moe
