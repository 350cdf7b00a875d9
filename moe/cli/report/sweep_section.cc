#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "moe/cli/measure/statistics.h"
#include "moe/cli/report/charts.h"
#include "moe/cli/report/format.h"
#include "moe/cli/report/labels.h"
#include "moe/cli/report/page.h"

namespace moe::report {
namespace {

// A point of a run: its rows, more than one if it was measured again.
struct SweepPoint {
  Key key;  // the run comes first
  std::vector<const SweepRow*> rows;
  std::string name;
  size_t series[2] = {};  // of the charts along each axis
  const SweepRow& row() const { return *rows.front(); }
};

// Mean and deviation over the rows of a point. For one row the deviation is that of its
// repetitions.
measure::MeanSd Over(const SweepPoint& point, double SweepRow::*value,
                     double SweepRow::*sd = nullptr) {
  std::vector<double> values;
  for (const SweepRow* row : point.rows) {
    if (std::isfinite(row->*value)) values.push_back(row->*value);
  }
  measure::MeanSd over = measure::MeanSdOf(values);
  if (point.rows.size() == 1 && sd != nullptr) over.sd = point.row().*sd;
  return over;
}

double Whisker(double sd) {
  return std::isfinite(sd) ? sd : 0;
}

// What a point is judged by beside its speed.
struct Quality {
  const char* id;
  const char* name;  // "loss"
  const char* axis;  // with its unit
  double SweepRow::*value;
  double SweepRow::*sd;
};
constexpr Quality kDrops = {"drops", "dropped slots", "dropped slots, end (%)",
                            &SweepRow::drop_final_pct, nullptr};
constexpr Quality kLoss = {"loss", "loss", "validation loss (nats)", &SweepRow::validation_loss,
                           &SweepRow::validation_loss_sd};

// An axis of categories, along which lines join the points that agree in all else.
struct AxisOfSeries {
  Along along;
  const char* id;
  const char* title;  // "Capacity factor against "
  const char* label;
  double SweepRow::*value;
};
constexpr AxisOfSeries kAxes[] = {
    {Along::kCapacity, "", "Capacity factor against ", "capacity factor",
     &SweepRow::capacity_factor},
    {Along::kExperts, "experts-", "Experts against ", "experts", &SweepRow::experts}};
constexpr size_t kCapacity = 0;

// What a point costs, against which its quality is drawn.
struct Cost {
  const char* id;
  const char* title;  // "Speed against "
  const char* axis;   // with its unit
  double SweepRow::*value;
  double SweepRow::*sd;
  Better better;
  ScaleKind scale = ScaleKind::kLog;
};
constexpr Cost kSpeed = {"speed",
                         "Speed against ",
                         "tokens per second",
                         &SweepRow::tokens_per_s,
                         &SweepRow::tokens_per_s_sd,
                         Better::kHigher,
                         ScaleKind::kLinear};
constexpr Cost kComputeCosts[] = {
    {"flops", "FLOPs of a token against ", "FLOPs of a token, forward and backward",
     &SweepRow::flops_per_token, nullptr, Better::kLower},
    {"active", "Active parameters against ", "parameters that a token uses",
     &SweepRow::params_active, nullptr, Better::kLower},
    {"total", "Parameters against ", "parameters, all experts", &SweepRow::params_total, nullptr,
     Better::kLower}};

// More points would be a cloud, and slow to compare with each other.
constexpr size_t kMaxPoints = 1000;
// Points are of equal compute up to so much more than the least.
constexpr double kEqualCompute = 1.05;

std::string CategoryText(const AxisOfSeries& axis, double value) {
  return std::isinf(value)               ? "dropless"
         : axis.along == Along::kExperts ? CountText(value)
                                         : NumberText(value);
}

// The points in series, which share everything but the value of an axis.
class SweepCharts {
 public:
  SweepCharts(absl::Span<const NamedRow<SweepRow>> rows, size_t failed)
      : failed_(failed), all_(rows.size() + failed), line_(SweepLine(rows)) {
    Groups<SweepPoint> points;
    for (const NamedRow<SweepRow>& r : rows) {
      points.Of(OfRun(r.run->name, PointKey(*r.row))).rows.push_back(r.row);
      for (size_t a = 0; a < std::size(kAxes); ++a) {
        const double value = r.row->*kAxes[a].value;
        if (!std::isnan(value)) values_[a].insert(value);
      }
    }
    points_ = std::move(points).Take();
    const std::vector<std::string> names = PointLabels(KeysOf(points_));
    for (size_t i = 0; i < points_.size(); ++i) points_[i].name = names[i];
    for (size_t a = 0; a < std::size(kAxes); ++a) {
      Groups<SweepPoint> series;
      for (SweepPoint& p : points_) {
        p.series[a] = series.IndexOf(OfRun(p.key.front(), SeriesKey(p.row(), kAxes[a].along)));
      }
      series_names_[a] = PointLabels(KeysOf(std::move(series).Take()));
    }
  }

  std::string Run() const {
    std::string html;
    for (size_t a = 0; a < std::size(kAxes); ++a) {
      html += OverAxis(a, kDrops) + OverAxis(a, kLoss);
    }
    html += Against(kSpeed, kDrops) + Against(kSpeed, kLoss);
    for (const Cost& cost : kComputeCosts) html += Against(cost, kLoss);
    return html + PhaseBars();
  }

  // The points of the least loss, one for each amount of compute; empty where none was trained.
  std::string BestAtEqualCompute() const {
    std::vector<const SweepPoint*> trained;
    for (const SweepPoint& p : points_) {
      if (std::isfinite(p.row().compute()) && std::isfinite(Over(p, kLoss.value).mean)) {
        trained.push_back(&p);
      }
    }
    const auto compute = [](const SweepPoint* p) {
      return p->row().compute();
    };
    std::stable_sort(trained.begin(), trained.end(), [&](const SweepPoint* a, const SweepPoint* b) {
      return compute(a) < compute(b);
    });
    Table table = {.title = "Best at equal compute",
                   .names = {"FLOPs", "points", "best", "loss", "± sd", "next", "loss more",
                             "noise", "trained by"},
                   .rows = {}};
    for (size_t begin = 0, end = 0; begin < trained.size(); begin = end) {
      while (end < trained.size() &&
             compute(trained[end]) <= kEqualCompute * compute(trained[begin])) {
        ++end;
      }
      table.rows.push_back(BestOf({trained.begin() + begin, trained.begin() + end}));
    }
    return table.rows.empty() ? "" : Render(table);
  }

 private:
  static Key OfRun(const std::string& run, Key key) {
    key.insert(key.begin(), run);
    return key;
  }

  std::string Rendered(XyChart chart) const {
    chart.text.lines = {line_};
    chart.text.LeaveOut(failed_, all_, "rows", "failed");
    return Render(chart);
  }

  // A single value leaves nothing to compare.
  std::string OverAxis(size_t a, const Quality& quality) const {
    const AxisOfSeries& axis = kAxes[a];
    if (values_[a].size() < 2) return "";
    XyChart chart = {.text = ChartText{.id = absl::StrCat("sweep-", axis.id, quality.id),
                                       .title = absl::StrCat(axis.title, quality.name),
                                       .note = "Lower is better."},
                     .x = Axis{.label = axis.label},
                     .y = Axis{.label = quality.axis}};
    for (const double value : values_[a]) chart.x.names.push_back(CategoryText(axis, value));
    std::map<size_t, size_t> place_of;
    for (const size_t s : SpreadOver(series_names_[a].size(), kMaxSeries)) {
      place_of[s] = chart.series.size();
      chart.series.push_back({.name = series_names_[a][s],
                              .style = XyStyle::kLinePoints,
                              .look = static_cast<int>(chart.series.size()),
                              .points = {}});
    }
    for (const SweepPoint& p : points_) {
      const auto at = place_of.find(p.series[a]);
      const auto value = values_[a].find(p.row().*axis.value);
      if (at == place_of.end() || value == values_[a].end()) continue;
      const measure::MeanSd y = Over(p, quality.value, quality.sd);
      const auto place = std::distance(values_[a].begin(), value);
      chart.series[at->second].points.push_back(
          {.x = static_cast<double>(place), .y = y.mean, .y_error = Whisker(y.sd)});
    }
    for (XySeries& s : chart.series) {
      std::stable_sort(s.points.begin(), s.points.end(),
                       [](const XyPoint& left, const XyPoint& right) { return left.x < right.x; });
    }
    chart.text.LeaveOut(series_names_[a].size() - chart.series.size(), series_names_[a].size(),
                        "series", kInTable);
    return Rendered(std::move(chart));
  }

  // Layers are judged by their drops, training by its loss. Above kMaxSeries series all points have
  // one look, each with its name.
  std::string Against(const Cost& cost, const Quality& quality) const {
    XyChart chart = {
        .text =
            ChartText{.id = absl::StrCat("sweep-", cost.id, "-", quality.id),
                      .title = absl::StrCat(cost.title, quality.name),
                      .note = absl::StrCat(
                          "Lower ", cost.better == Better::kHigher ? "right" : "left",
                          " is better. Rings: points that no other beats by more than the noise.")},
        .x = Axis{.label = cost.axis, .kind = cost.scale},
        .y = Axis{.label = quality.axis},
        .front = Front{cost.better, Better::kLower}};
    const bool many = series_names_[kCapacity].size() > kMaxSeries;
    std::map<size_t, size_t> place_of;
    bool whiskers = false;
    std::set<double> qualities, costs;
    size_t all = 0;
    for (const SweepPoint& p : points_) {
      const bool trained = std::isfinite(Over(p, kLoss.value).mean);
      const measure::MeanSd x = Over(p, cost.value, cost.sd);
      if (trained != (quality.value == kLoss.value) || !std::isfinite(x.mean) ||
          ++all > kMaxPoints) {
        continue;
      }
      const size_t series = p.series[kCapacity];
      const auto [at, is_new] = place_of.emplace(many ? 0 : series, chart.series.size());
      if (is_new) {
        chart.series.push_back({.name = many ? "points" : series_names_[kCapacity][series],
                                .look = static_cast<int>(many ? 0 : series)});
      }
      const measure::MeanSd y = Over(p, quality.value, quality.sd);
      whiskers |= Whisker(x.sd) > 0 || Whisker(y.sd) > 0;
      qualities.insert(y.mean);
      costs.insert(x.mean);
      std::string label = values_[kCapacity].size() > 1 ? p.row().capacity_text() : "";
      if (!label.empty() && !std::isinf(p.row().capacity_factor)) label = "cf " + label;
      chart.series[at->second].points.push_back({.x = x.mean,
                                                 .y = y.mean,
                                                 .x_error = Whisker(x.sd),
                                                 .y_error = Whisker(y.sd),
                                                 .name = p.name,
                                                 .label = many ? p.name : label});
    }
    // All equally good: the table and the bars have the speeds. One cost: nothing to choose.
    if (qualities.size() < 2 || costs.size() < 2) return "";
    chart.text.LeaveOut(all - std::min(all, kMaxPoints), all, "points", kInTable);
    chart.text.note += whiskers ? " Whiskers: standard deviation over repetitions."
                                : " One repetition each: the noise is not known.";
    return Rendered(std::move(chart));
  }

  // The row of points of equal compute.
  static std::vector<TableCell> BestOf(std::vector<const SweepPoint*> points) {
    const auto loss = [](const SweepPoint* p) {
      return Over(*p, kLoss.value, kLoss.sd);
    };
    std::stable_sort(points.begin(), points.end(), [&](const SweepPoint* a, const SweepPoint* b) {
      return loss(a).mean < loss(b).mean;
    });
    const SweepPoint& best = *points.front();
    const measure::MeanSd least = loss(&best);
    const bool alone = points.size() < 2;
    const measure::MeanSd next = alone ? measure::MeanSd{kNone, kNone} : loss(points[1]);
    const double noise = measure::NoiseOfDifference(measure::SampleOf(least.mean, least.sd),
                                                    measure::SampleOf(next.mean, next.sd));
    return {TableCell::Number(best.row().compute()),
            TableCell::Count(static_cast<double>(points.size())),
            TableCell::Text(best.name),
            TableCell::Number(least.mean, 4),
            TableCell::Number(least.sd, 2),
            TableCell::Text(alone ? "" : points[1]->name),
            TableCell::Number(next.mean - least.mean, 2),
            TableCell::Number(noise, 2),
            TableCell::Text(TrainLine(best.row()))};
  }

  std::string PhaseBars() const {
    StackedBarChart chart = StepPhases("sweep-phases", "");
    std::vector<const SweepPoint*> timed;
    for (const SweepPoint& p : points_) {
      if (std::isfinite(Over(p, &SweepRow::step_ms).mean)) timed.push_back(&p);
    }
    for (const size_t i : SpreadOver(timed.size(), kMaxBars)) {
      const auto mean = [&](double SweepRow::*value) {
        return Over(*timed[i], value).mean;
      };
      chart.bars.push_back(
          PhaseBar(timed[i]->name, mean(&SweepRow::step_ms),
                   {mean(&SweepRow::a2a_ms), mean(&SweepRow::expert_ms),
                    mean(&SweepRow::attention_ms), mean(&SweepRow::output_ms),
                    mean(&SweepRow::all_reduce_ms), mean(&SweepRow::optimizer_ms)}));
    }
    chart.text.lines = {line_};
    chart.text.LeaveOut(timed.size() - chart.bars.size(), points_.size(), "points", kInTable);
    chart.text.LeaveOut(points_.size() - timed.size(), points_.size(), "points", "no such figure");
    chart.text.LeaveOut(failed_, all_, "rows", "failed");
    return Render(chart);
  }

  const size_t failed_, all_;  // numbers of rows
  const std::string line_;
  std::vector<SweepPoint> points_;
  std::vector<std::string> series_names_[std::size(kAxes)];
  std::set<double> values_[std::size(kAxes)];  // dropless, infinity, is the last one
};

}  // namespace

Section SweepSection(absl::Span<const Run> runs) {
  Section section = {.id = "sweep", .heading = "Sweeps"};
  std::vector<NamedRow<SweepRow>> all, rows;
  for (const Run& run : runs) {
    for (const SweepRow& row : run.sweep) {
      all.push_back({&run, &row});
      if (!row.failed()) rows.push_back({&run, &row});
    }
  }
  if (all.empty()) return section;
  if (!rows.empty()) {
    const SweepCharts charts(rows, all.size() - rows.size());
    section.body = absl::StrCat("<div class=\"charts\">\n", charts.Run(), "</div>\n",
                                charts.BestAtEqualCompute());
  }
  section.body += Render(TableOf<SweepRow>("All points", all));
  return section;
}

}  // namespace moe::report
