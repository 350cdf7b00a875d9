// Statistics of repeated measurements that stand up to a noisy machine.
#ifndef MOE_MOE_BENCH_STATISTICS_H_
#define MOE_MOE_BENCH_STATISTICS_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <vector>

#include <absl/types/span.h>

namespace moe::bench {

// Of no samples: all 0.
struct Statistics {
  double mean = 0, min = 0, max = 0;
  double p50 = 0;     // median: of an even number, the mean of the middle two
  double p99 = 0;     // nearest rank: the smallest sample with 99 % of all at or below it
  double cv_pct = 0;  // coefficient of variation: 100 * standard deviation (over n) / mean
};

inline Statistics Describe(absl::Span<const double> samples) {
  Statistics s;
  if (samples.empty()) return s;
  std::vector<double> x(samples.begin(), samples.end());
  std::sort(x.begin(), x.end());
  const size_t n = x.size();
  const auto count = static_cast<double>(n);
  s.min = x.front();
  s.max = x.back();
  s.p50 = (x[(n - 1) / 2] + x[n / 2]) / 2;
  s.p99 = x[(99 * n + 99) / 100 - 1];
  s.mean = std::accumulate(x.begin(), x.end(), 0.0) / count;
  double squares = 0;
  for (const double value : x) squares += (value - s.mean) * (value - s.mean);
  if (s.mean > 0) s.cv_pct = 100 * std::sqrt(squares / count) / s.mean;
  return s;
}

}  // namespace moe::bench

#endif  // MOE_MOE_BENCH_STATISTICS_H_
