// Layouts of moe plan that were run: predicted against measured.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "moe/cli/measure/statistics.h"
#include "moe/cli/report/charts.h"
#include "moe/cli/report/format.h"
#include "moe/cli/report/page.h"

namespace moe::report {
namespace {

// What is predicted and then measured.
struct Prediction {
  const char* id;
  const char* title;
  const char* axis;  // with its unit, behind "measured " and "predicted "
  double PlanRow::*predicted;
  double PlanRow::*measured;
  double factor;
};
constexpr Prediction kPredictions[] = {
    {"plan-time", "Step time, predicted against measured", "step (ms)", &PlanRow::step_ms,
     &PlanRow::measured_ms, 1},
    {"plan-memory", "Memory of a rank, predicted against measured", "memory (MiB)",
     &PlanRow::used_bytes, &PlanRow::measured_bytes, 0x1p-20}};

constexpr double kBand = 0.25;  // errors that are drawn as lines

std::string LayoutText(const PlanRow& row) {
  std::string text =
      absl::StrCat("PP ", CountText(row.pp), " TP ", CountText(row.tp), " EP ", CountText(row.ep));
  if (row.etp > 1) absl::StrAppend(&text, " ETP ", CountText(row.etp));
  absl::StrAppend(&text, " ZeRO ", CountText(row.zero));
  if (row.recompute != "none") absl::StrAppend(&text, " recompute ", row.recompute);
  return text;
}

std::string ErrorText(const std::vector<double>& errors_pct) {
  if (errors_pct.empty()) return "";
  const measure::Statistics error = measure::Describe(errors_pct);
  return absl::StrFormat("Median error %.1f %%, largest %.1f %%. ", error.p50, error.max);
}

// Points above the middle line were predicted too large.
std::string ChartOf(absl::Span<const NamedRow<PlanRow>> rows, const Prediction& p) {
  XyChart chart = {.text = {.id = p.id, .title = p.title, .note = ""},
                   .x = {.label = absl::StrCat("measured ", p.axis), .kind = ScaleKind::kLog},
                   .y = {.label = absl::StrCat("predicted ", p.axis), .kind = ScaleKind::kLog}};
  double least = INFINITY, most = 0;
  std::vector<double> errors;
  const Run* run = nullptr;
  for (const NamedRow<PlanRow>& named : rows) {
    const double x = named.row->*p.measured * p.factor, y = named.row->*p.predicted * p.factor;
    if (!(x > 0) || !(y > 0)) continue;
    if (named.run != run) {
      run = named.run;
      chart.series.push_back({.name = run->name,
                              .style = XyStyle::kPoints,
                              .look = static_cast<int>(chart.series.size())});
    }
    chart.series.back().points.push_back({.x = x, .y = y, .name = LayoutText(*named.row)});
    errors.push_back(100 * std::abs(y / x - 1));
    least = std::min({least, x, y});
    most = std::max({most, x, y});
  }
  if (errors.empty()) return "";
  const size_t runs = chart.series.size();
  if (runs > kMaxSeries) {
    chart.series.resize(kMaxSeries);
    chart.text.LeaveOut(runs - kMaxSeries, runs, "inputs", kInTable);
  }
  for (const double error : {0.0, kBand, -kBand}) {
    XySeries line = {.name = error == 0 ? "equal" : absl::StrFormat("%+.0f %%", 100 * error),
                     .style = XyStyle::kLimit,
                     .look = static_cast<int>(chart.series.size()),
                     .faint = true};
    for (const double x : {least, most}) line.points.push_back({.x = x, .y = x * (1 + error)});
    chart.series.push_back(std::move(line));
  }
  chart.text.note = absl::StrCat(ErrorText(errors), "Points below the line took longer, or more, ",
                                 "than was predicted. ", chart.text.note);
  return Render(chart);
}

}  // namespace

Section PlanSection(absl::Span<const Run> runs) {
  Section section = {.id = "plan", .heading = "Plan"};
  std::vector<NamedRow<PlanRow>> rows;
  for (const Run& run : runs) {
    for (const PlanRow& row : run.plan) rows.push_back({&run, &row});
  }
  if (rows.empty()) return section;
  std::string charts;
  for (const Prediction& p : kPredictions) charts += ChartOf(rows, p);
  if (!charts.empty()) section.body = absl::StrCat("<div class=\"charts\">\n", charts, "</div>\n");
  section.body += Render(TableOf<PlanRow>("Layouts", rows));
  return section;
}

}  // namespace moe::report
