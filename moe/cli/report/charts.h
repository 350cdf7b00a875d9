// The charts of a page, as data. page.js draws them with Chart.js.
#ifndef MOE_MOE_CLI_REPORT_CHARTS_H_
#define MOE_MOE_CLI_REPORT_CHARTS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <absl/strings/string_view.h>

#include "moe/cli/measure/statistics.h"

namespace moe::report {

using measure::Better;
using measure::ParetoFront;

// More are not told apart at a glance: a series has a colour of its own.
inline constexpr size_t kMaxSeries = 8;
inline constexpr size_t kMaxBars = 16;
// Why what is beyond them is not drawn.
inline constexpr char kInTable[] = "the table has all";

struct ChartText {
  std::string id;     // of the element, from this program: letters, digits, '-'
  std::string title;  // what is shown
  std::string note;   // how to read it: one or two sentences, or empty

  // Adds to the note what is not drawn: "Not drawn: 2 of 26 points (failed)." 0: nothing.
  void LeaveOut(size_t count, size_t of, absl::string_view things, absl::string_view why);
};

enum class ScaleKind : uint8_t {
  kLinear,
  kWhole,  // linear, ticks at whole numbers only
  kLog,
  kBytes,  // logarithmic, ticks at powers of two: "4 KiB"
};

struct Axis {
  std::string label;  // with its unit
  ScaleKind kind = ScaleKind::kLinear;
  bool from_zero = false;
  // An axis of categories: a value is the index of its category. Empty: an axis of numbers.
  std::vector<std::string> names = {};
};

struct XyPoint {
  double x = 0, y = 0;
  double x_error = 0, y_error = 0;  // half the length of a whisker; 0: none
  std::string name;                 // under the pointer; empty: that of the series
  std::string label;                // drawn beside the point where there is room
};

enum class XyStyle : uint8_t {
  kLine,        // a curve of many points
  kLinePoints,  // a mark per point, joined by a line
  kPoints,      // a mark per point
  kLimit,       // a dashed line that values do not pass
  kFront,       // a ring per point and the staircase that they attain
};

struct XySeries {
  std::string name;
  XyStyle style = XyStyle::kPoints;
  int look = 0;        // colour, shape and dashes
  bool faint = false;  // grey, for what matters less
  std::vector<XyPoint> points;
};

struct Front {
  Better x = Better::kLower, y = Better::kLower;
};

struct XyChart {
  ChartText text;
  Axis x, y;
  std::vector<XySeries> series;
  // Over the points of all kPoints series, whose whiskers are their noise.
  std::optional<Front> front = std::nullopt;
};

// A figure, empty without a finite point. Points that are not finite, or not positive on a
// logarithmic axis, are left out, and the note says how many, or how many series have no other
// points. Curves of more than kMaxCurvePoints are thinned to the lowest and the highest of every
// stretch, so that spikes stay.
std::string Render(const XyChart& chart);

inline constexpr size_t kMaxCurvePoints = 600;
// At most kMaxCurvePoints of `points`, which are in the order of x.
std::vector<XyPoint> Thinned(const std::vector<XyPoint>& points);

struct StackedBar {
  std::string name;
  std::vector<double> parts;  // one per part of the chart, in its unit; NaN and below 0 count as 0
};

struct StackedBarChart {
  ChartText text;
  std::string x_label;  // with unit
  std::string unit;     // under the pointer: "ms"
  std::vector<std::string> parts;
  std::vector<StackedBar> bars;
};

// Parts that are zero in all bars are left out. Empty without bars.
std::string Render(const StackedBarChart& chart);

// Time of a step by phase, of training runs and of a sweep's points: all-to-all, experts,
// all-reduce, and everything else.
StackedBarChart StepPhases(std::string id, std::string note);
// The phases, unknown ones 0, and what is left of `whole`.
StackedBar PhaseBar(std::string name, double whole, std::vector<double> phases);

struct HeatMap {
  ChartText text;
  Axis x, y;  // of categories; row 0 is at the top
  std::string value_label;
  std::vector<double> values;  // [rows][columns], not below 0; NaN: no cell
  double middle = 1;           // marked on the colour scale, which starts at 0; 0: nothing is
};

std::string Render(const HeatMap& map);

}  // namespace moe::report

#endif  // MOE_MOE_CLI_REPORT_CHARTS_H_
