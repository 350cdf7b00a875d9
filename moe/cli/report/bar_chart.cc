#include <algorithm>
#include <cmath>

#include <absl/strings/str_cat.h>

#include "moe/cli/report/charts.h"
#include "moe/cli/report/drawing.h"
#include "moe/cli/report/format.h"

namespace moe::report {
namespace {

constexpr double kRowHeight = 38;
constexpr double kBarHeight = 15;
constexpr double kAxisHeight = 44;

double PartOf(double value) {
  return std::isfinite(value) && value > 0 ? value : 0;
}

// Rows from the top of the drawing on, an x axis below them. Names stand above their bars, so that
// long ones take no width from them.
class Rows {
 public:
  Rows(const Scale& x, size_t num_rows)
      : x_(x),
        right_(kDrawingWidth - std::max(6.0, TextWidth(x.ticks().back().label) / 2)),
        bottom_(static_cast<double>(num_rows) * kRowHeight + 4) {}

  double height() const { return bottom_ + kAxisHeight; }
  double X(double value) const { return kLeft + x_.Place(value) * (right_ - kLeft); }
  double BarTop(size_t row) const { return static_cast<double>(row) * kRowHeight + 19; }

  void DrawAxis(Svg& svg, const std::string& label) const {
    const size_t stride = LabelStride(x_, right_ - kLeft);
    for (size_t i = 0; i < x_.ticks().size(); ++i) {
      const Tick& tick = x_.ticks()[i];
      const double at = X(tick.value);
      svg.Line("grid", {at, 16}, {at, bottom_});
      if (i % stride != 0) continue;
      svg.Text("tick", {at, bottom_ + 16}, Anchor::kMiddle, tick.label);
    }
    svg.Text("label", {(kLeft + right_) / 2, bottom_ + 35}, Anchor::kMiddle, label);
  }

  void DrawName(Svg& svg, size_t row, const std::string& name) const {
    svg.Text("name", {0, BarTop(row) - 5}, Anchor::kStart,
             Shortened(name, static_cast<int>(kDrawingWidth / kLetterWidth)));
  }

 private:
  static constexpr double kLeft = 18;  // half of a label below the first tick

  const Scale& x_;
  const double right_, bottom_;
};

void DrawParts(const StackedBarChart& chart, const Rows& rows, size_t row, Svg& svg) {
  const StackedBar& bar = chart.bars[row];
  double total = 0;
  for (const double part : bar.parts) total += PartOf(part);
  double from = 0;
  for (size_t i = 0; i < bar.parts.size(); ++i) {
    const double part = PartOf(bar.parts[i]);
    if (part == 0) continue;
    svg.RectangleMark(
        absl::StrCat("block ", SeriesClass(static_cast<int>(i))), {rows.X(from), rows.BarTop(row)},
        rows.X(from + part) - rows.X(from), kBarHeight,
        absl::StrCat(bar.name, "\n", chart.parts[i], ": ", NumberText(part), " ", chart.unit,
                     part == total ? ""
                                   : absl::StrCat(", ", NumberText(100 * part / total), " % of ",
                                                  NumberText(total), " ", chart.unit)));
    from += part;
  }
}

void DrawInterval(const Interval& interval, const Rows& rows, size_t row, Svg& svg) {
  const double y = rows.BarTop(row) + kBarHeight / 2;
  const std::string classes = ClassOf(interval.verdict);
  if (interval.half_width > 0) {
    svg.Line(absl::StrCat("interval ", classes), {rows.X(interval.value - interval.half_width), y},
             {rows.X(interval.value + interval.half_width), y});
  }
  svg.PathMark(absl::StrCat("point ", classes),
               ShapePath(static_cast<int>(interval.verdict), {rows.X(interval.value), y}, 5),
               interval.tooltip);
}

}  // namespace

std::string Render(const StackedBarChart& chart) {
  if (chart.bars.empty()) return "";
  double longest = 0;
  for (const StackedBar& bar : chart.bars) {
    double total = 0;
    for (const double part : bar.parts) total += PartOf(part);
    longest = std::max(longest, total);
  }
  const Scale x = Scale::Of(ScaleKind::kLinear, 0, longest, 5);
  const Rows rows(x, chart.bars.size());
  Svg svg(kDrawingWidth, rows.height(), chart.text.title);
  rows.DrawAxis(svg, chart.x_label);
  for (size_t row = 0; row < chart.bars.size(); ++row) {
    rows.DrawName(svg, row, chart.bars[row].name);
    DrawParts(chart, rows, row, svg);
  }
  std::vector<LegendEntry> legend;
  for (size_t i = 0; i < chart.parts.size(); ++i) {
    const bool drawn = std::any_of(chart.bars.begin(), chart.bars.end(),
                                   [&](const StackedBar& bar) { return PartOf(bar.parts[i]) > 0; });
    if (!drawn) continue;
    legend.push_back(
        {.series = static_cast<int>(i), .key = LegendKey::kBlock, .name = chart.parts[i]});
  }
  return Figure(chart.text, svg, legend);
}

StackedBarChart StepPhases(std::string id, std::string note) {
  return {.text =
              ChartText{
                  .id = std::move(id), .title = "Time of a step by phase", .note = std::move(note)},
          .x_label = "time (ms)",
          .unit = "ms",
          .parts = {"all-to-all", "experts", "all-reduce", "everything else"},
          .bars = {}};
}

StackedBar PhaseBar(std::string name, double whole, std::vector<double> phases) {
  double rest = whole;
  for (const double phase : phases) rest -= PartOf(phase);
  phases.push_back(PartOf(rest));
  return {.name = std::move(name), .parts = std::move(phases)};
}

std::string Render(const IntervalChart& chart) {
  if (chart.intervals.empty()) return "";
  double low = 0, high = 0;
  for (const Interval& i : chart.intervals) {
    const double half = i.half_width > 0 ? i.half_width : 0;
    low = std::min(low, i.value - half);
    high = std::max(high, i.value + half);
  }
  const Scale x = Scale::Of(ScaleKind::kLinear, low, high, 5);
  const Rows rows(x, chart.intervals.size());
  Svg svg(kDrawingWidth, rows.height(), chart.text.title);
  rows.DrawAxis(svg, chart.x_label);
  svg.Line("axis", {rows.X(0), 16}, {rows.X(0), rows.height() - kAxisHeight});
  for (size_t row = 0; row < chart.intervals.size(); ++row) {
    rows.DrawName(svg, row, chart.intervals[row].name);
    DrawInterval(chart.intervals[row], rows, row, svg);
  }
  return Figure(chart.text, svg, {});
}

const char* NameOf(Verdict verdict) {
  constexpr const char* kNames[] = {"better", "worse", "within noise", "noise unknown", "equal"};
  return kNames[static_cast<int>(verdict)];
}

const char* ClassOf(Verdict verdict) {
  constexpr const char* kClasses[] = {"better", "worse", "same", "unknown", "same"};
  return kClasses[static_cast<int>(verdict)];
}

}  // namespace moe::report
