// Statistics of repeated measurements that stand up to a noisy machine, differences beyond noise,
// and the Pareto front.
#ifndef MOE_MOE_CLI_MEASURE_STATISTICS_H_
#define MOE_MOE_CLI_MEASURE_STATISTICS_H_

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include <absl/types/span.h>

namespace moe::measure {

// Value of an unknown figure.
inline constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

// Without samples all are 0.
struct Statistics {
  double mean = 0, min = 0, max = 0;
  double p50 = 0;     // median: of an even number, the mean of the middle two
  double p99 = 0;     // nearest rank: the smallest sample with 99 % of all at or below it
  double cv_pct = 0;  // coefficient of variation: 100 * standard deviation (over n) / mean
};
Statistics Describe(absl::Span<const double> samples);

struct MeanSd {
  double mean = kNone;
  double sd = kNone;  // sqrt(sum (x - mean)^2 / (n - 1)); unknown for fewer than two
};
// `values` are all known, or all unknown.
MeanSd MeanSdOf(absl::Span<const double> values);

struct Sample {
  double mean = kNone;
  double error = kNone;    // standard error of the mean; kNone: unknown
  double degrees = kNone;  // degrees of freedom of `error`
};

// n > 1 independent values: error = s / sqrt(n), s over n - 1. One value: its error is unknown.
Sample SampleOf(absl::Span<const double> values);

// One mean of calls, or of a sweep's repetitions, with their standard deviation. They share the
// conditions of one run, so that many of them tell little about the next run: the error of the mean
// is the spread of a single one, not that over the root of their number.
Sample SampleOf(double mean, double sd);

// For a time series whose neighbours are correlated: the error of the mean from the means of ten
// stretches (batch means). Fewer than 20 values: unknown.
Sample SampleOfSeries(absl::Span<const double> values);

// Half the width of the interval that holds b - a with probability 0.95 (Welch 1947), kNone where
// an error is unknown.
double NoiseOfDifference(const Sample& a, const Sample& b);

// The 0.975 quantile of Student's t with `degrees` of freedom, at least 1; within 1 % of the exact.
double StudentT975(double degrees);

enum class Better : uint8_t { kLower, kHigher };

// Indices of the points (x, y) on the front, from the lowest x to the highest: those that no point
// of it beats. One beats another if it is better in one figure by more than the noise of their
// difference (NoiseOfDifference; an unknown error counts as 0) and in the other not worse by more
// than it; only points of the exact front do, for which no other is at least as good in both and
// better in one. Without noise the two fronts are the same. Equal points are all on it, points with
// NaN are not. O(n log n + n * exact front), and as deep a recursion as that front is long.
std::vector<int> ParetoFront(absl::Span<const std::pair<Sample, Sample>> points, Better x,
                             Better y);

}  // namespace moe::measure

#endif  // MOE_MOE_CLI_MEASURE_STATISTICS_H_
