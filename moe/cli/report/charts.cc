#include "moe/cli/report/charts.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_replace.h>

#include <nlohmann/json.hpp>

#include "moe/cli/report/format.h"

namespace moe::report {
namespace {

using Json = nlohmann::json;

// The figure as HTML: its texts, the element to draw in, and the data that page.js draws.
std::string Figure(const ChartText& text, const Json& data) {
  // Bytes of an input that are not UTF-8 are replaced rather than causing an exception. No text can
  // end the element or begin a comment in it: both need a '<'.
  const std::string rows = absl::StrReplaceAll(
      data.dump(-1, ' ', false, Json::error_handler_t::replace), {{"<", "\\u003c"}});
  const std::string title = Escape(text.title);
  std::string html = absl::StrCat("<figure class=\"chart\" id=\"", text.id, "\">\n<figcaption><h3>",
                                  title, "</h3>");
  for (const std::string& line : text.lines) {
    absl::StrAppend(&html, "<p><code>", Escape(line), "</code></p>");
  }
  if (!text.note.empty()) absl::StrAppend(&html, "<p>", Escape(text.note), "</p>");
  return absl::StrCat(
      html, "</figcaption>\n<div class=\"drawing\"><canvas role=\"img\" aria-label=\"", title,
      "\"></canvas></div>\n<script type=\"application/json\">", rows, "</script>\n</figure>\n");
}

bool IsLog(const Axis& axis) {
  return axis.kind == ScaleKind::kLog || axis.kind == ScaleKind::kBytes;
}

Json JsonOf(const Axis& axis) {
  constexpr const char* kKinds[] = {"linear", "whole", "log", "bytes"};
  Json json = {{"label", axis.label}, {"kind", kKinds[static_cast<int>(axis.kind)]}};
  if (axis.from_zero) json["zero"] = true;
  if (!axis.names.empty()) json["names"] = axis.names;
  return json;
}

Json JsonOf(const XySeries& series) {
  constexpr const char* kStyles[] = {"line", "line-points", "points", "limit", "front"};
  Json points = Json::array();
  for (const XyPoint& p : series.points) {
    Json& json = points.emplace_back(Json{{"x", p.x}, {"y", p.y}});
    if (p.x_error > 0) json["dx"] = p.x_error;
    if (p.y_error > 0) json["dy"] = p.y_error;
    if (!p.name.empty()) json["name"] = p.name;
    if (!p.label.empty()) json["label"] = p.label;
  }
  return {{"name", series.name},
          {"style", kStyles[static_cast<int>(series.style)]},
          {"look", series.look},
          {"faint", series.faint},
          {"points", std::move(points)}};
}

bool Drawable(const XyChart& chart, const XyPoint& p) {
  return std::isfinite(p.x) && std::isfinite(p.y) && (!IsLog(chart.x) || p.x > 0) &&
         (!IsLog(chart.y) || p.y > 0);
}

// The series with the points that can be drawn, curves thinned; the note reports what is left out.
std::vector<XySeries> Drawn(const XyChart& chart, ChartText& text) {
  std::vector<XySeries> drawn;
  size_t all = 0, left_out = 0;
  for (XySeries series : chart.series) {
    const size_t of_series = series.points.size();
    const size_t without =
        std::erase_if(series.points, [&](const XyPoint& p) { return !Drawable(chart, p); });
    if (series.points.empty()) continue;
    all += of_series;
    left_out += without;
    if (series.style == XyStyle::kLine) series.points = Thinned(series.points);
    drawn.push_back(std::move(series));
  }
  constexpr char kWhy[] = "no such figure";
  text.LeaveOut(chart.series.size() - drawn.size(), chart.series.size(), "series", kWhy);
  text.LeaveOut(left_out, all, "points", kWhy);
  return drawn;
}

// Moves the labels of the points to `front`, which is drawn first. If there are many points, only
// its labels remain: readers would take a few names among unnamed points for those of their
// neighbours.
XySeries FrontOf(std::vector<XySeries>& all, const Front& better) {
  std::vector<XyPoint*> points;
  std::vector<std::pair<measure::Sample, measure::Sample>> samples;
  for (XySeries& s : all) {
    if (s.style != XyStyle::kPoints) continue;
    for (XyPoint& p : s.points) {
      points.push_back(&p);
      samples.emplace_back(measure::SampleOf(p.x, p.x_error), measure::SampleOf(p.y, p.y_error));
    }
  }
  XySeries front = {.name = "Pareto front", .style = XyStyle::kFront};
  for (const int i : ParetoFront(samples, better.x, better.y)) {
    XyPoint& p = *points[i];
    std::string label = std::exchange(p.label, "");
    // Among many points those of the front alone have names.
    if (points.size() > kMaxSeries && !p.name.empty()) label = p.name;
    front.points.push_back({.x = p.x, .y = p.y, .name = p.name, .label = std::move(label)});
  }
  if (points.size() > kMaxSeries) {
    for (XyPoint* p : points) p->label.clear();
  }
  return front;
}

size_t CountOfPoints(const std::vector<XySeries>& all) {
  size_t count = 0;
  for (const XySeries& s : all) count += s.style == XyStyle::kPoints ? s.points.size() : 0;
  return count;
}

// Names of most of many points would tell nothing.
std::string NoteOfFront(const std::vector<std::string>& names, size_t points) {
  if (names.size() > kMaxSeries && 2 * names.size() > points) {
    return absl::StrCat("Pareto points: ", names.size(), " of ", points,
                        ", which differ by less than the noise; more repetitions lower it.");
  }
  return absl::StrCat("Pareto points: ", absl::StrJoin(names, "; "), ".");
}

double PartOf(double value) {
  return std::isfinite(value) && value > 0 ? value : 0;
}

}  // namespace

void ChartText::LeaveOut(size_t count, size_t of, absl::string_view things, absl::string_view why) {
  if (count == 0) return;
  absl::StrAppend(&note, note.empty() ? "" : " ", "Not drawn: ", count, " of ", of, " ", things,
                  " (", why, ").");
}

std::vector<size_t> SpreadOver(size_t count, size_t limit) {
  std::vector<size_t> spread;
  if (count <= limit) limit = count;
  for (size_t i = 0; i < limit; ++i) {
    spread.push_back(limit == 1 ? 0 : i * (count - 1) / (limit - 1));
  }
  return spread;
}

std::vector<XyPoint> Thinned(const std::vector<XyPoint>& points) {
  const size_t n = points.size();
  if (n <= kMaxCurvePoints) return points;
  constexpr size_t kStretches = kMaxCurvePoints / 2;
  std::vector<XyPoint> thinned;
  for (size_t s = 0; s < kStretches; ++s) {
    const auto begin = points.begin() + static_cast<int64_t>(n * s / kStretches);
    const auto end = points.begin() + static_cast<int64_t>(n * (s + 1) / kStretches);
    auto [low, high] = std::minmax_element(
        begin, end, [](const XyPoint& a, const XyPoint& b) { return a.y < b.y; });
    if (low > high) std::swap(low, high);
    thinned.push_back(*low);
    if (high != low) thinned.push_back(*high);
  }
  return thinned;
}

std::string Render(const XyChart& chart) {
  ChartText text = chart.text;
  std::vector<XySeries> drawn = Drawn(chart, text);
  if (drawn.empty()) return "";
  Json data = {{"kind", "xy"}, {"x", JsonOf(chart.x)}, {"y", JsonOf(chart.y)}};
  if (chart.front.has_value()) {
    XySeries front = FrontOf(drawn, *chart.front);
    // Labels are drawn where there is room.
    std::vector<std::string> names;
    for (const XyPoint& p : front.points) {
      if (!p.name.empty()) names.push_back(p.name);
    }
    if (!names.empty()) {
      absl::StrAppend(&text.note, text.note.empty() ? "" : " ",
                      NoteOfFront(names, CountOfPoints(drawn)));
    }
    drawn.insert(drawn.begin(), std::move(front));
    // Between two points the front attains the worse of both.
    data["stepped"] = chart.front->x == Better::kLower ? "before" : "after";
  }
  Json& series = data["series"] = Json::array();
  for (const XySeries& s : drawn) series.push_back(JsonOf(s));
  return Figure(text, data);
}

std::string Render(const StackedBarChart& chart) {
  if (chart.bars.empty()) return "";
  Axis names;
  for (const StackedBar& bar : chart.bars) names.names.push_back(bar.name);
  Json data = {{"kind", "bars"},
               {"unit", chart.unit},
               {"x", JsonOf(Axis{.label = chart.x_label, .from_zero = true})},
               {"y", JsonOf(names)},
               {"series", Json::array()}};
  for (size_t part = 0; part < chart.parts.size(); ++part) {
    std::vector<double> values;
    for (const StackedBar& bar : chart.bars) values.push_back(PartOf(bar.parts[part]));
    if (std::all_of(values.begin(), values.end(), [](double value) { return value == 0; }))
      continue;
    data["series"].push_back({{"name", chart.parts[part]}, {"look", part}, {"values", values}});
  }
  return Figure(chart.text, data);
}

StackedBarChart StepPhases(std::string id, std::string note) {
  return {.text =
              ChartText{
                  .id = std::move(id), .title = "Time of a step by phase", .note = std::move(note)},
          .x_label = "time (ms)",
          .unit = "ms",
          .parts = {"all-to-all", "experts", "attention", "output layer", "all-reduce", "optimiser",
                    "everything else"},
          .bars = {}};
}

StackedBar PhaseBar(std::string name, double whole, std::vector<double> phases) {
  double rest = whole;
  for (const double phase : phases) rest -= PartOf(phase);
  phases.push_back(PartOf(rest));
  return {.name = std::move(name), .parts = std::move(phases)};
}

std::string Render(const HeatMap& map) {
  // Values that are not finite become null, since JSON has no such numbers.
  return Figure(map.text, {{"kind", "cells"},
                           {"x", JsonOf(map.x)},
                           {"y", JsonOf(map.y)},
                           {"label", map.value_label},
                           {"middle", map.middle},
                           {"values", map.values}});
}

}  // namespace moe::report
