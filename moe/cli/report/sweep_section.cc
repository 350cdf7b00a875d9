#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "moe/cli/report/charts.h"
#include "moe/cli/report/format.h"
#include "moe/cli/report/labels.h"
#include "moe/cli/report/page.h"

namespace moe::report {
namespace {

constexpr size_t kMaxSeries = 8;
constexpr size_t kMaxBars = 16;

std::string CapacityName(double capacity_factor) {
  return std::isinf(capacity_factor) ? "dropless"
                                     : absl::StrCat("cf ", NumberText(capacity_factor));
}

// The run stands first.
Key OfRun(const NamedRow<SweepRow>& r, Key key) {
  key.insert(key.begin(), r.run->name);
  return key;
}

// The rows as series: what is the same but for the capacity factor.
class SweepCharts {
 public:
  explicit SweepCharts(std::vector<NamedRow<SweepRow>> rows) : rows_(std::move(rows)) {
    std::vector<Key> points;
    std::map<Key, int> series;
    std::vector<Key> series_keys;
    for (const NamedRow<SweepRow>& r : rows_) {
      points.push_back(OfRun(r, PointKey(*r.row)));
      const Key key = OfRun(r, SeriesKey(*r.row));
      const auto [at, is_new] = series.emplace(key, static_cast<int>(series.size()));
      if (is_new) series_keys.push_back(key);
      series_of_.push_back(at->second);
    }
    point_names_ = PointLabels(points);
    series_names_ = PointLabels(series_keys);
    PlaceDropless();
  }

  std::string Run() const {
    std::string html;
    Add(Over("sweep-drops", "Capacity factor against dropped tokens", "dropped slots, end (%)",
             &SweepRow::drop_final_pct, "Lower left is better: less padding, fewer drops."),
        html);
    Add(Over("sweep-loss", "Capacity factor against loss", "validation loss (nats)",
             &SweepRow::validation_loss, "Lower left is better."),
        html);
    Add(SpeedAgainstLoss(), html);
    return html + PhaseBars();
  }

 private:
  // Without drops there is no capacity factor: such rows stand behind all numbers.
  void PlaceDropless() {
    double low = 0, high = 0;
    bool any = false;
    for (const NamedRow<SweepRow>& r : rows_) {
      const double cf = r.row->capacity_factor;
      if (std::isinf(cf)) {
        has_dropless_ = true;
        continue;
      }
      low = any ? std::min(low, cf) : cf;
      high = any ? std::max(high, cf) : cf;
      any = true;
    }
    dropless_at_ = high + std::max(0.5, (high - low) / 3);
  }
  double PlaceOf(double cf) const { return std::isinf(cf) ? dropless_at_ : cf; }

  static void Add(const XyChart& chart, std::string& html) {
    if (HasPoints(chart)) html += Render(chart);
  }

  template <typename MakePoint>
  void FillSeries(XyChart& chart, MakePoint make_point) const {
    const size_t count = std::min(series_names_.size(), kMaxSeries);
    for (size_t s = 0; s < count; ++s) {
      chart.series.push_back({.name = series_names_[s], .look = static_cast<int>(s)});
    }
    for (size_t i = 0; i < rows_.size(); ++i) {
      if (series_of_[i] < static_cast<int>(count)) {
        chart.series[series_of_[i]].points.push_back(make_point(*rows_[i].row, point_names_[i]));
      }
    }
    if (count < series_names_.size()) {
      absl::StrAppend(&chart.text.note, " The first ", count, " of ", series_names_.size(),
                      " series; the table has all.");
    }
  }

  XyChart Over(const char* id, const char* title, const char* y_label, double SweepRow::*y,
               const char* note) const {
    XyChart chart = {.text = ChartText{.id = id,
                                       .title = title,
                                       .note = absl::StrCat(note, " Rings: the Pareto front.")},
                     .x_label = "capacity factor",
                     .y_label = y_label,
                     .front = Front{Better::kLower, Better::kLower}};
    if (has_dropless_) chart.x_word = Tick{dropless_at_, "dropless"};
    FillSeries(chart, [&](const SweepRow& row, const std::string& name) {
      return XyPoint{.x = PlaceOf(row.capacity_factor),
                     .y = row.*y,
                     .tooltip = absl::StrCat(name, ": ", NumberText(row.*y, 4))};
    });
    return chart;
  }

  XyChart SpeedAgainstLoss() const {
    XyChart chart = {
        .text = ChartText{.id = "sweep-front",
                          .title = "Speed against loss",
                          .note = "Lower right is better. Rings: the Pareto front. Whiskers: "
                                  "standard deviation."},
        .x_label = "tokens per second",
        .y_label = "validation loss (nats)",
        .front = Front{Better::kHigher, Better::kLower}};
    FillSeries(chart, [&](const SweepRow& row, const std::string& name) {
      const double sd = row.tokens_per_s_sd;
      return XyPoint{
          .x = row.tokens_per_s,
          .y = row.validation_loss,
          .x_error = std::isfinite(sd) ? sd : 0,
          .tooltip = absl::StrCat(name, ": ", CountText(row.tokens_per_s), " tokens/s, loss ",
                                  NumberText(row.validation_loss, 4)),
          .label = CapacityName(row.capacity_factor)};
    });
    return chart;
  }

  std::string PhaseBars() const {
    StackedBarChart chart = {
        .text = ChartText{.id = "sweep-phases", .title = "Time of a step by phase"},
        .x_label = "time (ms)",
        .unit = "ms",
        .parts = {"all-to-all", "experts", "all-reduce", "everything else"}};
    const auto known = [](double ms) {
      return std::isfinite(ms) ? ms : 0;
    };
    for (size_t i = 0; i < rows_.size(); ++i) {
      const SweepRow& r = *rows_[i].row;
      if (!std::isfinite(r.step_ms) || chart.bars.size() == kMaxBars) continue;
      const double named = known(r.a2a_ms) + known(r.expert_ms) + known(r.all_reduce_ms);
      chart.bars.push_back({.name = point_names_[i],
                            .parts = {known(r.a2a_ms), known(r.expert_ms), known(r.all_reduce_ms),
                                      std::max(0.0, r.step_ms - named)}});
    }
    if (rows_.size() > kMaxBars) {
      chart.text.note = absl::StrCat("The first ", kMaxBars, " of ", rows_.size(), " points.");
    }
    return chart.bars.empty() ? "" : Render(chart);
  }

  const std::vector<NamedRow<SweepRow>> rows_;
  std::vector<std::string> point_names_, series_names_;
  std::vector<int> series_of_;  // of each row
  bool has_dropless_ = false;
  double dropless_at_ = 0;
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
    section.body = "<div class=\"charts\">\n" + SweepCharts(std::move(rows)).Run() + "</div>\n";
  }
  section.body += Render(TableOf<SweepRow>("All points", all));
  return section;
}

}  // namespace moe::report
