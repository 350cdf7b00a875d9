// kernels/exact_sum: the grid, its limits, and sums that do not depend on their order, on every
// device.
#include "kernels/exact_sum/exact_sum.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/exact_sum/exact_sum_cpu.h"
#include "kernels/exact_sum/scaled_sum.h"
#include "tests/kernels/device_memory.h"

namespace moe::testing {
namespace {

struct Sums {
  std::vector<int64_t> sum;
  GridTally tally;

  explicit Sums(size_t n) : sum(n, 0) {}
  absl::Status Add(const TestDevice& device, const ExactGrid& grid, const std::vector<float>& x,
                   Write write = Write::kAdd, ArrayOffsets at = {}) {
    const Placed<float> from(device, x, at.in);
    const Placed<int64_t> to(device, sum, at.out);
    const auto count = device.Copy<GridTally>({tally});
    const absl::Status status =
        ExactAccumulate(grid, from.span(), to.span(), write, count.span().data(), device.stream());
    sum = to.Read();
    for (const GridTally& counted : device.Read(count)) tally = counted;
    return status;
  }
};

// The specification in long double, which holds every int64 exactly.
void ReferenceAdd(const ExactGrid& grid, const std::vector<float>& x, Sums& sums) {
  for (size_t i = 0; i < x.size(); ++i) {
    const long double q =
        std::nearbyint(std::ldexp(static_cast<long double>(x[i]), -grid.unit_log2));
    if (!(std::abs(q) <= static_cast<long double>(grid.limit()))) {
      ++sums.tally.non_finite;
    } else {
      sums.sum[i] += static_cast<int64_t>(q);
      if (std::ldexp(q, grid.unit_log2) != x[i]) ++sums.tally.inexact;
    }
    sums.tally.largest = std::max(sums.tally.largest, GridTally::BitsOf(std::abs(x[i])));
  }
}

TEST(ExactAccumulateTest, RoundsToTheGridTiesToEven) {
  const std::vector<float> x = {0.5f, 1.5f, 2.5f, -0.5f, -1.5f, 0.75f, 3.0f, -0.0f, 1e-30f};
  ForEachDevice([&](const TestDevice& device) {
    Sums sums(x.size());
    ASSERT_OK(sums.Add(device, {.unit_log2 = 0}, x));
    EXPECT_EQ(sums.sum, (std::vector<int64_t>{0, 2, 2, 0, -2, 1, 3, 0, 0}));
    EXPECT_EQ(sums.tally.inexact, 7);  // all but 3 and 0
    ASSERT_OK(sums.Add(device, {.unit_log2 = -1, .max_terms = 2}, x));
    EXPECT_EQ(sums.sum, (std::vector<int64_t>{1, 5, 7, -1, -5, 3, 9, 0, 0}));
    EXPECT_EQ(sums.tally.inexact, 7 + 2);  // 0.75, and the value that becomes 0
    EXPECT_EQ(sums.tally.non_finite, 0);
    EXPECT_EQ(sums.tally.largest_value(), 3);
  });
}

// Magnitudes from far below the unit to far above the limit, in every position of a vector.
TEST(ExactAccumulateTest, MatchesTheSpecificationForAnyMagnitudeGridLengthAndAlignment) {
  const auto check = [](const TestDevice& device, const ExactGrid& grid, int64_t n,
                        ArrayOffsets at) {
    SCOPED_TRACE(::testing::Message() << grid.unit_log2 << " " << grid.max_terms << " " << n);
    auto x = RandomFloats(n, 1);
    for (int64_t i = 0; i < n; ++i) {
      x[i] = std::ldexp(x[i], static_cast<int>(i % 81) - 70 - grid.unit_log2);
    }
    Sums sums(x.size()), expected(x.size());
    for (const Write write : {Write::kAdd, Write::kAdd, Write::kOverwrite}) {
      ASSERT_OK(sums.Add(device, grid, x, write, at));
      if (write == Write::kOverwrite) std::fill(expected.sum.begin(), expected.sum.end(), 0);
      ReferenceAdd(grid, x, expected);
      EXPECT_EQ(sums.sum, expected.sum);
      EXPECT_EQ(sums.tally, expected.tally);
    }
  };
  ForEachDevice(Simd::kAll, [&](const TestDevice& device) {
    for (const int unit : {-50, -34, 0}) {
      for (const int64_t terms : {int64_t{2}, int64_t{3}, int64_t{4096}, int64_t{1} << 40}) {
        for (const int64_t n : {1, 7, 8, 9, 333}) check(device, {unit, terms}, n, kArrayOffsets[0]);
      }
    }
    for (const ArrayOffsets at : kArrayOffsets) {
      for (const int64_t n : {0, 1, 7, 333, 2051}) check(device, {-50, 4096}, n, at);
    }
    check(device, {-50, 4096}, 70001, {});  // several threads
  });
}

TEST(ExactAccumulateTest, NonFiniteElementsCountAndAddNothing) {
  ForEachDevice([](const TestDevice& device) {
    for (const size_t at : {0, 5, 16, 18}) {
      for (const float bad : {kNaN, -kNaN, kInfinity, -kInfinity, 3e38f, 8192.0f}) {
        std::vector<float> x(19, 0.5f);
        x[at] = bad;
        Sums sums(19);
        sums.tally.non_finite = 4;
        ASSERT_OK(sums.Add(device, {}, x));
        EXPECT_EQ(sums.tally.non_finite, 5) << bad;
        EXPECT_EQ(sums.tally.inexact, 0) << bad;
        EXPECT_EQ(sums.tally.largest_value(), std::isnan(bad) ? kInfinity : std::abs(bad));
        for (size_t i = 0; i < 19; ++i) EXPECT_EQ(sums.sum[i], i == at ? 0 : int64_t{1} << 49);
      }
    }
  });
}

// Elements of every kind, at every position in a vector and in a cache line.
TEST(ExactAccumulateTest, OverwritesWhatIsThereInCacheOrPastIt) {
  std::vector<float> x = RandomFloats(203, 1);
  x[1] = kNaN;
  x[100] = 0x1p60f;  // above the limit
  x[202] = -kInfinity;
  const double inverse_unit = 0x1p4;
  std::vector<int64_t> want(x.size(), 0);
  const auto n = static_cast<int64_t>(x.size());
  const auto accumulate = [&](SumWrite write, int64_t* sum, int64_t begin, int64_t end) {
    return ExactAccumulateRange(x.data() + begin, inverse_unit, INT64_MAX / 8, write, sum,
                                end - begin);
  };
  const GridTally all = accumulate(SumWrite::kAdd, want.data(), 0, n);
  EXPECT_EQ(all.non_finite, 3);
  EXPECT_GT(all.inexact, 0);
  for (const SumWrite write : {SumWrite::kOverwrite, SumWrite::kStreamed}) {
    for (const int64_t size : {int64_t{0}, int64_t{1}, int64_t{64}, n}) {
      for (size_t offset = 0; offset < 8; ++offset) {
        Workspace workspace;
        const auto memory = workspace.Array<int64_t>(n + 8).value();
        std::fill(memory.begin(), memory.end(), -7);
        const auto sum = memory.subspan(offset, size);
        // In two ranges, as for two threads.
        GridTally tally = accumulate(write, sum.data(), 0, size / 2);
        AddAtomically(accumulate(write, sum.data() + size / 2, size / 2, size), tally);
        EXPECT_EQ(tally.non_finite, size < 2 ? 0 : size < n ? 1 : 3);
        if (size == n) {
          EXPECT_EQ(tally, all);
        }
        EXPECT_TRUE(std::equal(sum.begin(), sum.end(), want.begin())) << size << " " << offset;
        for (const int64_t& beyond : memory.subspan(offset + size)) EXPECT_EQ(beyond, -7);
        for (const int64_t& before : memory.subspan(0, offset)) EXPECT_EQ(before, -7);
      }
    }
  }
}

// M terms of the largest value that fits the grid, of either sign, in any order: no overflow
// (checked by UBSan), and the next larger float is refused.
TEST(ExactAccumulateTest, MaxTermsAtTheLimitDoNotOverflow) {
  ForEachDevice([](const TestDevice& device) {
    for (const int64_t terms : {1, 2, 3, 5, 64, 500}) {
      if (kSanitized && terms > 5) continue;  // repeat the same launches
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
        const float sign = i % 2 == 0 ? 1.0f : -1.0f;
        ASSERT_OK(sums.Add(device, grid, std::vector<float>(9, edge)));
        ASSERT_OK(mixed.Add(device, grid, std::vector<float>(9, sign * edge)));
      }
      EXPECT_EQ(sums.sum, std::vector<int64_t>(9, terms * q)) << terms;
      EXPECT_EQ(mixed.sum, std::vector<int64_t>(9, terms % 2 * q)) << terms;
      EXPECT_EQ(sums.tally.non_finite, 0);
      for (const float sign : {1.0f, -1.0f}) {
        const std::vector<float> above(9, sign * std::nextafter(edge, kInfinity));
        ASSERT_OK(sums.Add(device, grid, above));
      }
      EXPECT_EQ(sums.tally.non_finite, 18) << terms;
      EXPECT_EQ(sums.sum, std::vector<int64_t>(9, terms * q)) << terms;
    }
  });
}

TEST(ExactAccumulateTest, RefusesDifferentLengthsAndBadGrids) {
  ForEachDevice([](const TestDevice& device) {
    Sums sums(3);
    ExpectRefused(sums.Add(device, {}, std::vector<float>(4)),
                  "ExactAccumulate: sum is [3], expected [4]");
    ExpectRefused(sums.Add(device, {.max_terms = 0}, std::vector<float>(3)),
                  "ExactAccumulate: max_terms is 0, expected >= 1");
    ExpectRefused(sums.Add(device, {.unit_log2 = -1100}, std::vector<float>(3)),
                  "ExactAccumulate: unit_log2 is -1100, expected -1000 to 1000");
    const auto sum = device.Copy(sums.sum);
    const auto out = device.Random(4, 1);
    EXPECT_TRUE(
        absl::IsInvalidArgument(ExactToFloat({}, sum.span(), 1.0, out.span(), device.stream())));
  });
}

std::vector<float> ToFloat(const TestDevice& device, const ExactGrid& grid,
                           const std::vector<int64_t>& sums, double scale, ArrayOffsets at = {}) {
  const Placed<int64_t> sum(device, sums, at.in);
  const Placed<float> out(device, std::vector<float>(sums.size()), at.out);
  EXPECT_OK(ExactToFloat(grid, sum.span(), scale, out.span(), device.stream()));
  return out.Read();
}

// Integers of all magnitudes, including the extremes; factors that give normal, subnormal and
// infinite float32, and some that are not powers of two.
TEST(ExactToFloatTest, RoundsAsFloat64DoesForAnyFactorLengthAndAlignment) {
  std::vector<int64_t> sums;
  for (int64_t i = 0; i < 40009; ++i) {
    const auto r = Random4({.seed = 9, .item = uint64_t(i)});
    sums.push_back(static_cast<int64_t>((uint64_t{r[0]} << 32) | r[1]) >> (i % 64));
  }
  sums[0] = INT64_MAX;
  sums[1] = INT64_MIN;
  const auto check = [&](const TestDevice& device, int64_t n, int unit_log2, double scale,
                         ArrayOffsets at) {
    const std::vector<int64_t> sum(sums.begin(), sums.begin() + n);
    std::vector<float> want;
    for (const int64_t s : sum) {
      want.push_back(static_cast<float>(std::ldexp(static_cast<double>(s), unit_log2) * scale));
    }
    EXPECT_TRUE(SameBits(ToFloat(device, {.unit_log2 = unit_log2}, sum, scale, at), want))
        << n << " " << unit_log2 << " " << scale;
  };
  ForEachDevice(Simd::kAll, [&](const TestDevice& device) {
    for (const ArrayOffsets at : kArrayOffsets) {
      for (const int64_t n : {0, 1, 4, 333, 1029}) {
        for (const int unit_log2 : {-50, -190, 70}) check(device, n, unit_log2, 1.0, at);
        for (const double scale : {0.125, 1.0 / 3, 0.3e-12}) check(device, n, -50, scale, at);
      }
    }
    check(device, 40009, -50, 1.0 / 3, {});  // several threads
  });
}

// For the elements of a unit, in their order.
double ReferenceSquares(const std::vector<float>& x) {
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

using SquareSum = std::vector<int64_t>;

SquareSum SquaresOf(const TestDevice& device, const std::vector<float>& x,
                    const std::vector<SquaresUnit>& units) {
  const auto values = device.Copy(x);
  const auto on_device = device.Copy(units);
  const auto sum = device.Copy(SquareSum(kSquareSumSize, 0));
  EXPECT_OK(AddSquares({values.span(), 1}, on_device.span(), sum.span().data(), device.stream()));
  return device.Read(sum);
}

double ValueOf(const SquareSum& sum) {
  int64_t digits[kSquareSumSize];
  std::copy_n(sum.begin(), kSquareSumSize, digits);
  return SquareSumValue(digits);
}

double SquaresOf(const TestDevice& device, const std::vector<float>& x) {
  const auto n = std::ssize(x);
  return ValueOf(SquaresOf(device, x, {{.begin = 0, .rows = 1, .cols = n, .stride = n}}));
}

TEST(AddSquaresTest, SumsByHand) {
  ForEachDevice([](const TestDevice& device) {
    EXPECT_EQ(SquaresOf(device, {}), 0);
    EXPECT_EQ(SquaresOf(device, {3, -4}), 25);
    EXPECT_EQ(SquaresOf(device, std::vector<float>(4097, 2)), 4 * 4097);
    EXPECT_EQ(SquaresOf(device, {0x1.8p35f}), 0x1.2p71);
    EXPECT_EQ(SquaresOf(device, {0x1p-60f}), 0x1p-120);
    EXPECT_EQ(SquaresOf(device, {0x1p-61f}), 0);  // rounded to the unit
    for (const float bad : {kNaN, -kInfinity, 0x1p36f}) {
      const SquareSum sum =
          SquaresOf(device, {1, bad, 2}, {{0, 1, 1, 1}, {1, 1, 1, 1}, {2, 1, 1, 1}});
      EXPECT_EQ(sum.back(), 1) << bad;
      EXPECT_EQ(ValueOf(sum), 5) << bad;
    }
  });
}

// Magnitudes differ within and between blocks, so that other orders would round differently.
TEST(AddSquaresTest, AUnitHasTheBitsOfTheFixedOrderAtEveryLength) {
  auto all = RandomFloats(3 * 4096 + 1, 4);
  for (int64_t i = 0; i < std::ssize(all); ++i) {
    all[i] *= std::ldexp(1.0f, static_cast<int>(i % 19 + i / 4096 * 7 % 13));
  }
  ForEachDevice(Simd::kAll, [&](const TestDevice& device) {
    for (const int64_t n : {int64_t{1}, int64_t{15}, int64_t{16}, int64_t{17}, int64_t{4095},
                            int64_t{4096}, int64_t{4097}, std::ssize(all)}) {
      const std::vector<float> x(all.begin(), all.begin() + n);
      EXPECT_EQ(SquaresOf(device, x), ReferenceSquares(x)) << n;
    }
  });
}

// A matrix in two halves of columns and two of rows: units with gaps between rows, distributed over
// calls in any order, and more of them than a fork or a thread block processes.
TEST(AddSquaresTest, UnitsAddUpExactlyInAnyOrder) {
  constexpr int64_t kRows = 600, kCols = 96;
  auto x = RandomFloats(kRows * kCols, 5);
  for (int64_t i = 0; i < std::ssize(x); ++i)
    x[i] *= std::ldexp(1.0f, static_cast<int>(i % 31) - 15);
  std::vector<SquaresUnit> units;
  unsigned __int128 expected = 0;  // in 2^-60
  for (int64_t c = 0; c < kCols; c += kCols / 2) {
    for (int64_t r = 0; r < kRows; r += 2) {
      units.push_back({r * kCols + c, 2, kCols / 2, kCols});
      std::vector<float> elements;
      for (int64_t row = r; row < r + 2; ++row) {
        for (int64_t col = c; col < c + kCols / 2; ++col) elements.push_back(x[row * kCols + col]);
      }
      // Squares of a unit are sums of 96 values below 2^32: in 2^-60 they fit.
      expected += static_cast<unsigned __int128>(std::ldexp(ReferenceSquares(elements), 60));
    }
  }
  const double value = std::ldexp(static_cast<double>(expected), -60);
  ForEachDevice([&](const TestDevice& device) {
    const SquareSum forward = SquaresOf(device, x, units);
    EXPECT_NEAR(ValueOf(forward), value, value * 0x1p-50);
    std::vector<SquaresUnit> backward(units.rbegin(), units.rend());
    EXPECT_EQ(SquaresOf(device, x, backward), forward);
    const std::vector<SquaresUnit> first(units.begin(), units.begin() + 7),
        rest(units.begin() + 7, units.end());
    SquareSum sum = SquaresOf(device, x, first);
    const SquareSum other = SquaresOf(device, x, rest);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += other[i];
    EXPECT_EQ(sum, forward);
  });
}

// Compares with 128-bit integers, for terms of all magnitudes.
TEST(SquareSumTest, DigitsAreTheTermsInUnitsOf2ToTheMinus120) {
  for (int exponent = -130; exponent < 72; ++exponent) {
    for (const double fraction :
         {1.0, 0x1.fffffffffffffp0, 0x1.0000000000001p0, 0x1.123456789abcdp0}) {
      const double term = std::ldexp(fraction, exponent);
      const SquareSumTerm digits = SquareSumTermOf(term);
      ASSERT_GE(digits.first, 0);
      int64_t sum[kSquareSumSize] = {};
      for (int i = 0; i < 3 && digits.first + i < kSquareSumDigits; ++i) {
        sum[digits.first + i] = static_cast<int64_t>(digits.at[i]);
        EXPECT_LT(digits.at[i], uint64_t{1} << 32);
      }
      EXPECT_EQ(SquareSumValue(sum), std::ldexp(std::rint(std::ldexp(term, 120)), -120)) << term;
      // A million such terms carry.
      for (int64_t& digit : sum) digit *= 1 << 20;
      EXPECT_EQ(SquareSumValue(sum), std::ldexp(std::rint(std::ldexp(term, 120)), -100)) << term;
    }
  }
}

// Every range that operations may read, and the values that they compute from exact sums, against
// the float32 that ToFloat writes.
TEST(ScaledSumTest, PartsAndOperationsSeeWhatToFloatWrites) {
  constexpr int64_t kSize = 9001;
  const ExactGrid grid = {.unit_log2 = -40, .max_terms = 3};
  const auto partial = RandomFloats(kSize, 8);
  std::vector<int64_t> exact(kSize);
  GridTally tally;
  const TestDevice device(Device(), 2);
  Stream& stream = device.stream();
  ASSERT_OK(ExactAccumulate(grid, partial, absl::MakeSpan(exact), Write::kAdd, &tally, stream));
  for (const ScaledSum& sum : {ScaledSum(partial, 1.0 / 3), ScaledSum(exact, grid, 1.0 / 3)}) {
    std::vector<float> all(kSize);
    ASSERT_OK(sum.ToFloat(absl::MakeSpan(all), stream));
    EXPECT_NEAR(all[5], partial[5] / 3, std::abs(partial[5]) * 1e-6);
    for (const int64_t begin : {int64_t{0}, int64_t{1}, int64_t{4096}, kSize - 1}) {
      std::vector<float> part(std::min<int64_t>(100, kSize - begin));
      sum.Read(begin, std::ssize(part), part.data());
      EXPECT_EQ(part, std::vector<float>(&all[begin], &all[begin] + part.size())) << begin;
    }
    const std::vector<SquaresUnit> units = {{0, 1, 5000, 5000}, {5000, 40, 60, 100}};
    int64_t squares[kSquareSumSize] = {}, squares_of_all[kSquareSumSize] = {};
    ASSERT_OK(AddSquares(sum, units, squares, stream));
    ASSERT_OK(AddSquares({all, 1}, units, squares_of_all, stream));
    EXPECT_THAT(squares, ::testing::ElementsAreArray(squares_of_all));
  }
  ExpectRefused(AddSquares({exact, {.max_terms = 0}, 1}, {}, nullptr, stream),
                "AddSquares: max_terms is 0, expected >= 1");
}

}  // namespace
}  // namespace moe::testing
