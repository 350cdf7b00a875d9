// Level bars: stacked parts of a whole, and changes with their noise.
#ifndef MOE_MOE_REPORT_BAR_CHART_H_
#define MOE_MOE_REPORT_BAR_CHART_H_

#include <cstdint>
#include <string>
#include <vector>

#include "moe/report/figure.h"

namespace moe::report {

struct StackedBar {
  std::string name;
  std::vector<double> parts;  // one per part of the chart, in its unit; NaN and below 0 count as 0
};

struct StackedBarChart {
  ChartText text;
  std::string x_label;  // with unit
  std::string unit;     // in tooltips: "ms"
  std::vector<std::string> parts;
  std::vector<StackedBar> bars;
};

// One mark per part that is not zero.
std::string Render(const StackedBarChart& chart);

enum class Verdict : uint8_t { kBetter, kWorse, kWithinNoise, kUnknownNoise, kEqual };

struct Interval {
  std::string name;
  double value = 0;
  double half_width = 0;  // NaN: unknown
  Verdict verdict = Verdict::kUnknownNoise;
  std::string tooltip;
};

// Values on one axis around a line at zero, one below the other.
struct IntervalChart {
  ChartText text;
  std::string x_label;
  std::vector<Interval> intervals;
};

// One mark per interval.
std::string Render(const IntervalChart& chart);

// "better", "worse", "within noise", "noise unknown", "equal".
const char* NameOf(Verdict verdict);
// Its CSS class.
const char* ClassOf(Verdict verdict);

}  // namespace moe::report

#endif  // MOE_MOE_REPORT_BAR_CHART_H_
