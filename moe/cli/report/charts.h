// The kinds of charts: over two axes, level bars, and maps of cells.
#ifndef MOE_MOE_CLI_REPORT_CHARTS_H_
#define MOE_MOE_CLI_REPORT_CHARTS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "moe/cli/bench/statistics.h"
#include "moe/cli/report/drawing.h"

namespace moe::report {

using bench::Better;
using bench::ParetoFront;

// More are not told apart at a glance.
inline constexpr size_t kMaxSeries = 8;
inline constexpr size_t kMaxBars = 16;
// Why what is beyond them is not drawn.
inline constexpr char kInTable[] = "the table has all";

struct XyPoint {
  double x = 0, y = 0;
  double x_error = 0, y_error = 0;  // half the length of a whisker; 0: none
  std::string tooltip;
  std::string label;  // drawn beside the point where there is room
};

enum class XyStyle : uint8_t {
  kLine,        // one mark: a curve of many points
  kLinePoints,  // a mark per point, joined by a line
  kPoints,      // a mark per point
  kLimit,       // one mark: a dashed line that values do not pass
};

struct XySeries {
  std::string name;
  XyStyle style = XyStyle::kPoints;
  int look = 0;  // colour and shape: SeriesClass
  std::vector<XyPoint> points;
};

struct Front {
  Better x = Better::kLower, y = Better::kLower;
};

struct XyChart {
  ChartText text;
  std::string x_label, y_label;  // with units
  ScaleKind x_kind = ScaleKind::kLinear, y_kind = ScaleKind::kLinear;
  bool y_from_zero = false;
  std::vector<XySeries> series;
  // Over the points of all kPoints series, whose whiskers are their noise; points on it get a ring.
  std::optional<Front> front;
  // The x axis has categories: a point's x is the index of its own. Empty: it has numbers.
  std::vector<std::string> x_categories;
};

// A figure, empty without a finite point. Points that are not finite, or not positive on a
// logarithmic axis, are left out, and the note says how many, or how many series have no other
// points. Curves of more than kMaxCurvePoints are thinned to the lowest and the highest of every
// stretch, so that spikes stay. Marks: see XyStyle, one for the front, if any, and a ring for every
// point on it.
std::string Render(const XyChart& chart);

inline constexpr int kMaxCurvePoints = 600;
// At most kMaxCurvePoints of `points`, which are in the order of x.
std::vector<XyPoint> Thinned(const std::vector<XyPoint>& points);

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

// One mark per part that is not zero. Empty without bars.
std::string Render(const StackedBarChart& chart);

// Time of a step by phase, of training runs and of a sweep's points: all-to-all, experts,
// all-reduce, and everything else.
StackedBarChart StepPhases(std::string id, std::string note);
// The phases, unknown ones 0, and what is left of `whole`.
StackedBar PhaseBar(std::string name, double whole, std::vector<double> phases);

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

// One mark per interval. Empty without any.
std::string Render(const IntervalChart& chart);

// "better", "worse", "within noise", "noise unknown", "equal".
const char* NameOf(Verdict verdict);
// Its CSS class.
const char* ClassOf(Verdict verdict);

struct HeatMapLine {
  std::string label;    // of a tick
  std::string tooltip;  // "expert 3"
};

struct HeatMap {
  ChartText text;
  std::string x_label, y_label, value_label;
  std::vector<HeatMapLine> columns, rows;
  std::vector<double> values;  // [rows][columns], not below 0; NaN: no cell
  double middle = 1;           // has a tick on the colour scale; the scale starts at 0
};

// One mark per cell that has a value. Row 0 is at the top.
std::string Render(const HeatMap& map);

// The colour of `share`, 0 to 1, of cividis (Nunez, Anderton, Renslow 2018): its lightness grows
// evenly for all kinds of colour vision. 0xRRGGBB.
int HeatColour(double share);

}  // namespace moe::report

#endif  // MOE_MOE_CLI_REPORT_CHARTS_H_
