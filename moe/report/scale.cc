#include "moe/report/scale.h"

#include <algorithm>
#include <cmath>

#include "moe/report/format.h"

namespace moe::report {
namespace {

// The smallest of 1, 2, 5 times a power of ten that is not below `step`.
double NiceStep(double step) {
  const double power = std::pow(10, std::floor(std::log10(step)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    // A step of exactly 2 may come out of the division as 2 + 1 ulp.
    if (factor * power >= step * (1 - 1e-9)) return factor * power;
  }
  return 10 * power;
}

// Digits that tell neighbouring ticks apart, and no more.
int DigitsFor(double step, double largest) {
  if (largest <= 0) return 1;
  return std::max(
      1,
      static_cast<int>(std::floor(std::log10(largest)) - std::floor(std::log10(step) + 1e-9)) + 1);
}

}  // namespace

Scale Scale::Of(ScaleKind kind, double low, double high, int num_ticks,
                const std::optional<Tick>& word) {
  if (!(low <= high)) low = 0, high = 1;
  Scale scale;
  scale.logarithmic_ = (kind == ScaleKind::kLog || kind == ScaleKind::kBytes) && low > 0;
  if (!scale.logarithmic_) {
    scale.MakeLinear(low, high, num_ticks, kind == ScaleKind::kWhole);
  } else if (kind == ScaleKind::kLog) {
    scale.MakeLog(low, high, num_ticks);
  } else {
    scale.MakeBytes(low, high, num_ticks);
  }
  if (word.has_value()) scale.Add(*word);
  return scale;
}

void Scale::Add(const Tick& word) {
  // Numbers from half a tick before the word on would read as if they went on behind it.
  const double half = (ticks_[1].value - ticks_[0].value) / 2;
  while (!ticks_.empty() && ticks_.back().value > word.value - half) ticks_.pop_back();
  ticks_.push_back(word);
  high_ = std::max(high_, word.value);
}

void Scale::MakeLinear(double low, double high, int num_ticks, bool whole) {
  if (high - low <= 1e-12 * std::abs(high)) {
    const double around = low == 0 ? 1 : std::abs(low) / 2;
    high += around;
    // Times, shares and counts have no values below zero to make room for.
    low = low >= 0 ? std::max(0.0, low - around) : low - around;
  }
  double step = NiceStep((high - low) / num_ticks);
  if (whole) step = std::max(1.0, step);
  // Within a millionth of a tick is on it.
  const double first = std::floor(low / step + 1e-6);
  const double last = std::max(first + 1, std::ceil(high / step - 1e-6));
  low_ = first * step;
  high_ = last * step;
  const int digits = DigitsFor(step, std::max(std::abs(low_), std::abs(high_)));
  for (double i = first; i <= last; ++i) ticks_.push_back({i * step, NumberText(i * step, digits)});
}

void Scale::MakeLog(double low, double high, int num_ticks) {
  const bool fine = high / low < 100;
  const int per_decade = fine ? 3 : 1;
  const auto value = [&](int i) {
    const int decade = static_cast<int>(std::floor(static_cast<double>(i) / per_decade));
    const double factors[] = {1, 2, 5};
    return factors[i - decade * per_decade] * std::pow(10, decade);
  };
  int first = static_cast<int>(std::floor(std::log10(low))) * per_decade;
  while (value(first + 1) <= low * (1 + 1e-9)) ++first;
  int last = first + 1;
  while (value(last) < high * (1 - 1e-9)) ++last;
  low_ = value(first);
  high_ = value(last);
  const int every = std::max(1, (last - first + num_ticks - 1) / num_ticks);
  for (int i = first; i <= last; i += every) ticks_.push_back({value(i), NumberText(value(i))});
}

void Scale::MakeBytes(double low, double high, int num_ticks) {
  int first = static_cast<int>(std::floor(std::log2(low) + 1e-9));
  int last = std::max(first + 1, static_cast<int>(std::ceil(std::log2(high) - 1e-9)));
  const int every = std::max(1, (last - first + num_ticks - 1) / num_ticks);
  low_ = std::exp2(first);
  high_ = std::exp2(last);
  for (int i = first; i <= last; i += every) {
    ticks_.push_back({std::exp2(i), BytesText(std::exp2(i))});
  }
}

double Scale::Place(double value) const {
  if (!logarithmic_) return (value - low_) / (high_ - low_);
  return std::log(value / low_) / std::log(high_ / low_);
}

}  // namespace moe::report
