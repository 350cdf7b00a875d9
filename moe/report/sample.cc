#include "moe/report/sample.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <vector>

namespace moe::report {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double Mean(absl::Span<const double> values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

}  // namespace

Sample SampleOf(absl::Span<const double> values) {
  Sample sample;
  if (values.empty()) return sample;
  sample.mean = Mean(values);
  if (values.size() < 2) return sample;
  double squares = 0;
  for (const double v : values) squares += (v - sample.mean) * (v - sample.mean);
  const auto n = static_cast<double>(values.size());
  sample.error = std::sqrt(squares / (n - 1) / n);
  sample.degrees = n - 1;
  return sample;
}

Sample SampleOf(double mean, double cv_pct) {
  // A cv is over hundreds of calls: its own error does not matter.
  return {.mean = mean, .error = std::abs(mean) * cv_pct / 100, .degrees = kInfinity};
}

Sample SampleOfSeries(absl::Span<const double> values) {
  constexpr size_t kBatches = 10;
  if (values.empty()) return {};
  if (values.size() < 2 * kBatches) return {.mean = Mean(values)};
  std::vector<double> means;
  for (size_t i = 0; i < kBatches; ++i) {
    const size_t begin = values.size() * i / kBatches;
    means.push_back(Mean(values.subspan(begin, values.size() * (i + 1) / kBatches - begin)));
  }
  Sample sample = SampleOf(means);
  sample.mean = Mean(values);
  return sample;
}

double NoiseOfDifference(const Sample& a, const Sample& b) {
  const double va = a.error * a.error;
  const double vb = b.error * b.error;
  if (!(va + vb >= 0)) return kNone;
  if (va + vb == 0) return 0;
  const double degrees = (va + vb) * (va + vb) / (va * va / a.degrees + vb * vb / b.degrees);
  return StudentT975(degrees) * std::sqrt(va + vb);
}

double StudentT975(double degrees) {
  constexpr double kTable[] = {12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365,
                               2.306,  2.262, 2.228, 2.201, 2.179, 2.160, 2.145};
  constexpr auto kLast = static_cast<double>(std::size(kTable));
  // The first terms of the expansion around the normal quantile z (Abramowitz, Stegun, 26.7.5).
  constexpr double kZ = 1.95996;
  if (!(degrees < kLast)) return kZ + (kZ * kZ * kZ + kZ) / (4 * degrees);
  const double at = std::max(1.0, degrees) - 1;
  const auto below = static_cast<size_t>(at);
  return kTable[below] + (at - static_cast<double>(below)) * (kTable[below + 1] - kTable[below]);
}

}  // namespace moe::report
