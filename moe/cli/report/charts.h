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

// `limit` of `count` things in order, spread evenly, the first and the last among them; all of
// fewer.
std::vector<size_t> SpreadOver(size_t count, size_t limit);

// Limit of series, so that each has a distinguishable colour.
inline constexpr size_t kMaxSeries = 8;
inline constexpr size_t kMaxBars = 16;
// Where to find what is beyond these limits.
inline constexpr char kInTable[] = "the table has all";

struct ChartText {
  std::string id;     // id of the HTML element, from this program: letters, digits, '-'
  std::string title;  // heading of the figure
  std::string note;   // how to read it: one or two sentences, or empty
  std::vector<std::string> lines = {};  // command lines that made it

  // Adds to the note how many things are not drawn: "Not drawn: 2 of 26 points (failed)." 0:
  // nothing.
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
  // Categories of the axis; a value is the index of its category. Empty: an axis of numbers.
  std::vector<std::string> names = {};
};

struct XyPoint {
  double x = 0, y = 0;
  double x_error = 0, y_error = 0;  // half the length of a whisker; 0: none
  std::string name;                 // shown under the pointer; empty: the name of the series
  std::string label;                // drawn beside the point where there is room
};

enum class XyStyle : uint8_t {
  kLine,        // a curve of many points
  kLinePoints,  // a mark per point, joined by a line
  kPoints,      // a mark per point
  kLimit,       // a dashed line that values do not exceed
  kFront,       // a ring around each point of the front, and the staircase that they attain
};

struct XySeries {
  std::string name;
  XyStyle style = XyStyle::kPoints;
  int look = 0;        // colour, shape and dashes
  bool faint = false;  // grey, for less important series
  std::vector<XyPoint> points;
};

struct Front {
  Better x = Better::kLower, y = Better::kLower;
};

struct XyChart {
  ChartText text;
  Axis x, y;
  std::vector<XySeries> series;
  // The front over the points of all kPoints series, whose whiskers are their noise.
  std::optional<Front> front = std::nullopt;
};

// A figure, empty without a finite point. Points that are not finite, or not positive on a
// logarithmic axis, are left out; the note reports how many, or how many series have no other
// points. Curves of more than kMaxCurvePoints are thinned to the lowest and the highest point of
// every stretch, so that spikes stay visible.
std::string Render(const XyChart& chart);

inline constexpr size_t kMaxCurvePoints = 600;
// Thins `points`, which are in the order of x, to at most kMaxCurvePoints.
std::vector<XyPoint> Thinned(const std::vector<XyPoint>& points);

struct StackedBar {
  std::string name;
  // one for each part of the chart, in its unit; NaN and negative values count as 0
  std::vector<double> parts;
};

struct StackedBarChart {
  ChartText text;
  std::string x_label;  // with unit
  std::string unit;     // shown under the pointer: "ms"
  std::vector<std::string> parts;
  std::vector<StackedBar> bars;
};

// Parts that are zero in all bars are left out. Empty without bars.
std::string Render(const StackedBarChart& chart);

// A chart of the time of a step by phase, for training runs and points of a sweep: all-to-all,
// experts, attention, output layer, all-reduce, optimiser, and everything else.
StackedBarChart StepPhases(std::string id, std::string note);
// The phases, unknown ones as 0, and the rest of `whole`.
StackedBar PhaseBar(std::string name, double whole, std::vector<double> phases);

struct HeatMap {
  ChartText text;
  Axis x, y;  // axes of categories; row 0 is at the top
  std::string value_label;
  std::vector<double> values;  // [rows][columns], not negative; NaN: no cell
  double middle = 1;           // marked on the colour scale, which starts at 0; 0: no mark
};

std::string Render(const HeatMap& map);

}  // namespace moe::report

#endif  // MOE_MOE_CLI_REPORT_CHARTS_H_
