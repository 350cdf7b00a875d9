// Lines and points over two axes: curves, log-log bandwidth, scatter with a Pareto front.
#ifndef MOE_MOE_REPORT_XY_CHART_H_
#define MOE_MOE_REPORT_XY_CHART_H_

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "moe/report/figure.h"
#include "moe/report/pareto.h"
#include "moe/report/scale.h"

namespace moe::report {

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
  // Over the points of all kPoints series; points on it get a ring.
  std::optional<Front> front;
  // A place on the x axis that is no number: "dropless".
  std::optional<Tick> x_word;
};

// Whether there is something to draw: a finite point.
bool HasPoints(const XyChart& chart);

// Points that are not finite, or not positive on a logarithmic axis, are left out. Curves of more
// than kMaxCurvePoints are thinned to the lowest and the highest of every stretch, so that spikes
// stay. Marks: see XyStyle, one for the front, if any, and a ring for every point on it.
std::string Render(const XyChart& chart);

inline constexpr int kMaxCurvePoints = 600;
// At most kMaxCurvePoints of `points`, which are in the order of x.
std::vector<XyPoint> Thinned(const std::vector<XyPoint>& points);

}  // namespace moe::report

#endif  // MOE_MOE_REPORT_XY_CHART_H_
