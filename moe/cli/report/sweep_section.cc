#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

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
  size_t series = 0;
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

// More points would be a cloud, and slow to compare with each other.
constexpr size_t kMaxPoints = 1000;

// The points in series, which share everything but the capacity factor.
class SweepCharts {
 public:
  SweepCharts(absl::Span<const NamedRow<SweepRow>> rows, size_t failed)
      : failed_(failed), all_(rows.size() + failed) {
    Groups<SweepPoint> points, series;
    for (const NamedRow<SweepRow>& r : rows) {
      points.Of(OfRun(r.run->name, PointKey(*r.row))).rows.push_back(r.row);
      factors_.insert(r.row->capacity_factor);
    }
    points_ = std::move(points).Take();
    const std::vector<std::string> names = PointLabels(KeysOf(points_));
    for (size_t i = 0; i < points_.size(); ++i) {
      SweepPoint& p = points_[i];
      p.name = names[i];
      p.series = series.IndexOf(OfRun(p.key.front(), SeriesKey(p.row())));
    }
    series_names_ = PointLabels(KeysOf(std::move(series).Take()));
  }

  std::string Run() const {
    return OverCapacity(kDrops) + OverCapacity(kLoss) + AgainstSpeed(kDrops) + AgainstSpeed(kLoss) +
           PhaseBars();
  }

 private:
  static Key OfRun(const std::string& run, Key key) {
    key.insert(key.begin(), run);
    return key;
  }

  std::string Rendered(XyChart chart) const {
    chart.text.LeaveOut(failed_, all_, "rows", "failed");
    return Render(chart);
  }

  // A single capacity factor leaves nothing to compare.
  std::string OverCapacity(const Quality& quality) const {
    if (factors_.size() < 2) return "";
    XyChart chart = {
        .text = ChartText{.id = absl::StrCat("sweep-", quality.id),
                          .title = absl::StrCat("Capacity factor against ", quality.name),
                          .note = "Lower is better."},
        .x = Axis{.label = "capacity factor"},
        .y = Axis{.label = quality.axis}};
    for (const double cf : factors_) {
      chart.x.names.push_back(std::isinf(cf) ? "dropless" : NumberText(cf));
    }
    const size_t drawn = std::min(series_names_.size(), kMaxSeries);
    for (size_t s = 0; s < drawn; ++s) {
      chart.series.push_back({.name = series_names_[s],
                              .style = XyStyle::kLinePoints,
                              .look = static_cast<int>(s),
                              .points = {}});
    }
    for (const SweepPoint& p : points_) {
      if (p.series >= drawn) continue;
      const measure::MeanSd y = Over(p, quality.value, quality.sd);
      const auto place = std::distance(factors_.begin(), factors_.find(p.row().capacity_factor));
      chart.series[p.series].points.push_back(
          {.x = static_cast<double>(place), .y = y.mean, .y_error = Whisker(y.sd)});
    }
    for (XySeries& s : chart.series) {
      std::stable_sort(s.points.begin(), s.points.end(),
                       [](const XyPoint& a, const XyPoint& b) { return a.x < b.x; });
    }
    chart.text.LeaveOut(series_names_.size() - drawn, series_names_.size(), "series", kInTable);
    return Rendered(std::move(chart));
  }

  // Layers are judged by their drops, training by its loss. Above kMaxSeries series all points have
  // one look, each with its name.
  std::string AgainstSpeed(const Quality& quality) const {
    XyChart chart = {
        .text =
            ChartText{.id = absl::StrCat("sweep-speed-", quality.id),
                      .title = absl::StrCat("Speed against ", quality.name),
                      .note = "Lower right is better. Rings: points that no other beats by more "
                              "than the noise."},
        .x = Axis{.label = "tokens per second"},
        .y = Axis{.label = quality.axis},
        .front = Front{Better::kHigher, Better::kLower}};
    const bool many = series_names_.size() > kMaxSeries;
    std::map<size_t, size_t> place_of;
    bool whiskers = false;
    std::set<double> values;
    size_t all = 0;
    for (const SweepPoint& p : points_) {
      const bool trained = std::isfinite(Over(p, kLoss.value).mean);
      if (trained != (quality.value == kLoss.value) || ++all > kMaxPoints) continue;
      const auto [at, is_new] = place_of.emplace(many ? 0 : p.series, chart.series.size());
      if (is_new) {
        chart.series.push_back({.name = many ? "points" : series_names_[p.series],
                                .look = static_cast<int>(many ? 0 : p.series)});
      }
      const measure::MeanSd x = Over(p, &SweepRow::tokens_per_s, &SweepRow::tokens_per_s_sd);
      const measure::MeanSd y = Over(p, quality.value, quality.sd);
      whiskers |= Whisker(x.sd) > 0 || Whisker(y.sd) > 0;
      values.insert(y.mean);
      std::string label = factors_.size() > 1 ? p.row().capacity_text() : "";
      if (!label.empty() && !std::isinf(p.row().capacity_factor)) label = "cf " + label;
      chart.series[at->second].points.push_back({.x = x.mean,
                                                 .y = y.mean,
                                                 .x_error = Whisker(x.sd),
                                                 .y_error = Whisker(y.sd),
                                                 .name = p.name,
                                                 .label = many ? p.name : label});
    }
    if (values.size() < 2) return "";  // all equally good: the table and the bars have the speeds
    chart.text.LeaveOut(all - std::min(all, kMaxPoints), all, "points", kInTable);
    chart.text.note += whiskers ? " Whiskers: standard deviation over repetitions."
                                : " One repetition each: the noise is not known.";
    return Rendered(std::move(chart));
  }

  std::string PhaseBars() const {
    StackedBarChart chart = StepPhases("sweep-phases", "");
    size_t timed = 0;
    for (const SweepPoint& p : points_) {
      const double step = Over(p, &SweepRow::step_ms).mean;
      if (!std::isfinite(step) || ++timed > kMaxBars) continue;
      chart.bars.push_back(
          PhaseBar(p.name, step,
                   {Over(p, &SweepRow::a2a_ms).mean, Over(p, &SweepRow::expert_ms).mean,
                    Over(p, &SweepRow::all_reduce_ms).mean}));
    }
    chart.text.LeaveOut(timed - chart.bars.size(), points_.size(), "points", kInTable);
    chart.text.LeaveOut(points_.size() - timed, points_.size(), "points", "no such figure");
    chart.text.LeaveOut(failed_, all_, "rows", "failed");
    return Render(chart);
  }

  const size_t failed_, all_;  // numbers of rows
  std::vector<SweepPoint> points_;
  std::vector<std::string> series_names_;
  std::set<double> factors_;  // dropless, infinity, is the last one
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
    section.body =
        "<div class=\"charts\">\n" + SweepCharts(rows, all.size() - rows.size()).Run() + "</div>\n";
  }
  section.body += Render(TableOf<SweepRow>("All points", all));
  return section;
}

}  // namespace moe::report
