#include "moe/cli/measure/statistics.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <iterator>
#include <map>
#include <numeric>

namespace moe::measure {
namespace {

double Mean(absl::Span<const double> values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// Sum of the squares of the distances from `mean`.
double Squares(absl::Span<const double> values, double mean) {
  double squares = 0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  return squares;
}

// Margin by which `a` is better than `b` beyond the noise of their difference; below 0: worse.
double Advantage(const Sample& a, const Sample& b, Better better) {
  const auto known = [](const Sample& s) {
    return std::isnan(s.error) ? SampleOf(s.mean, 0) : s;
  };
  const double by = better == Better::kLower ? b.mean - a.mean : a.mean - b.mean;
  return std::copysign(std::max(0.0, std::abs(by) - NoiseOfDifference(known(a), known(b))), by);
}

}  // namespace

Statistics Describe(absl::Span<const double> samples) {
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
  s.mean = Mean(x);
  if (s.mean > 0) s.cv_pct = 100 * std::sqrt(Squares(x, s.mean) / count) / s.mean;
  return s;
}

MeanSd MeanSdOf(absl::Span<const double> values) {
  if (values.empty()) return {};
  const auto n = static_cast<double>(values.size());
  MeanSd result = {.mean = Mean(values)};
  if (n >= 2) result.sd = std::sqrt(Squares(values, result.mean) / (n - 1));
  return result;
}

Sample SampleOf(absl::Span<const double> values) {
  Sample sample;
  if (values.empty()) return sample;
  sample.mean = Mean(values);
  if (values.size() < 2) return sample;
  const auto n = static_cast<double>(values.size());
  sample.error = std::sqrt(Squares(values, sample.mean) / (n - 1) / n);
  sample.degrees = n - 1;
  return sample;
}

Sample SampleOf(double mean, double sd) {
  // Mostly over hundreds of calls: its own error does not matter.
  return {.mean = mean, .error = sd, .degrees = std::numeric_limits<double>::infinity()};
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

std::vector<int> ParetoFront(absl::Span<const std::pair<Sample, Sample>> points, Better x,
                             Better y) {
  // Costs, so that less is better in both.
  const auto cost = [&](int i) {
    const auto& [a, b] = points[i];
    return std::pair(x == Better::kLower ? a.mean : -a.mean,
                     y == Better::kLower ? b.mean : -b.mean);
  };
  std::vector<int> order;
  for (int i = 0; i < static_cast<int>(points.size()); ++i) {
    if (!std::isnan(points[i].first.mean) && !std::isnan(points[i].second.mean)) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](int i, int j) { return cost(i) < cost(j); });
  std::vector<int> exact;
  double best = std::numeric_limits<double>::infinity();
  for (const int i : order) {
    const bool same = !exact.empty() && cost(i) == cost(exact.back());
    if (cost(i).second >= best && !same) continue;
    best = cost(i).second;
    exact.push_back(i);
  }
  const auto beats = [&](int by, int i) {
    const double in_x = Advantage(points[by].first, points[i].first, x);
    const double in_y = Advantage(points[by].second, points[i].second, y);
    return std::min(in_x, in_y) >= 0 && std::max(in_x, in_y) > 0;
  };
  std::map<int, bool> known;
  const std::function<bool(int)> stands = [&](int i) {
    const auto [at, is_new] = known.emplace(i, false);
    if (!is_new) return at->second;
    return at->second = std::none_of(exact.begin(), exact.end(),
                                     [&](int by) { return beats(by, i) && stands(by); });
  };
  std::vector<int> front;
  std::copy_if(order.begin(), order.end(), std::back_inserter(front), stands);
  if (x == Better::kHigher) std::reverse(front.begin(), front.end());
  return front;
}

}  // namespace moe::measure
