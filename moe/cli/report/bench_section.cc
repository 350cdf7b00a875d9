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

using NamedRows = std::vector<NamedRow<BenchRow>>;
struct BenchSeries {
  Key key;
  NamedRows rows;
};
using Series = std::vector<BenchSeries>;

// Everything that identifies a measurement except its size; the run comes first.
Key SeriesKey(const NamedRow<BenchRow>& r) {
  return {r.run->name,
          r.row->algorithm,
          r.row->backend,
          r.row->transport,
          Plural(r.row->ranks, "rank"),
          Plural(r.row->hosts, "host"),
          r.row->dtype,
          r.row->seed_text(),
          r.row->routing,
          r.row->settings};
}

// Whether two runs measured the same thing. If not, the files are parts of one measurement: one per
// routing, for example.
bool RunsRepeat(const NamedRows& rows) {
  std::map<std::pair<Key, double>, const Run*> seen;
  return std::any_of(rows.begin(), rows.end(), [&](const NamedRow<BenchRow>& r) {
    Key key = SeriesKey(r);
    key.front().clear();
    const auto at = seen.emplace(std::pair(std::move(key), r.row->size()), r.run).first;
    return at->second != r.run;
  });
}

// Series in the order of first appearance; each covers all routings unless `by_routing`.
Series SeriesOf(const NamedRows& rows, bool by_routing) {
  const bool by_run = RunsRepeat(rows);
  Groups<BenchSeries> series;
  for (const NamedRow<BenchRow>& r : rows) {
    Key key = SeriesKey(r);
    if (!by_routing) key[key.size() - 2].clear();
    if (!by_run) key.front().clear();
    series.Of(std::move(key)).rows.push_back(r);
  }
  return std::move(series).Take();
}

// The value that an operation is judged by.
struct Yardstick {
  double BenchRow::*value;
  const char* name;
  const char* unit;
  bool bounded;  // by the rate at which every rank copies as many bytes within its memory
};

std::string LabelOf(const Yardstick& yardstick) {
  return absl::StrCat(yardstick.name, " (", yardstick.unit, ")");
}

Yardstick YardstickOf(const NamedRows& rows) {
  // The first one that the rows contain; the bus bandwidth of one rank is 0.
  for (const Yardstick& y : {Yardstick{&BenchRow::busbw, "bus bandwidth", "GB/s", true},
                             Yardstick{&BenchRow::algbw, "bandwidth", "GB/s", true}}) {
    const bool any = std::any_of(rows.begin(), rows.end(),
                                 [&](const NamedRow<BenchRow>& r) { return r.row->*y.value > 0; });
    if (any) return y;
  }
  return {&BenchRow::time_us, "time", "us", false};
}

// One point per size: the mean of its rows. Its whisker is their standard deviation, or for one row
// the variation of its calls.
XyPoint PointOf(const Yardstick& yardstick, const std::vector<const BenchRow*>& rows) {
  std::vector<double> values;
  for (const BenchRow* r : rows) values.push_back(r->*yardstick.value);
  const measure::MeanSd over = measure::MeanSdOf(values);
  XyPoint p = {.x = rows.front()->size(), .y = over.mean};
  const double cv = rows.front()->cv_pct;
  if (rows.size() > 1) {
    p.y_error = over.sd;
  } else if (std::isfinite(cv)) {
    p.y_error = p.y * cv / 100;
  }
  return p;
}

std::vector<XyPoint> PointsOf(const Yardstick& yardstick, const NamedRows& rows) {
  std::map<double, std::vector<const BenchRow*>> by_size;
  for (const NamedRow<BenchRow>& r : rows) {
    if (std::isfinite(r.row->*yardstick.value)) by_size[r.row->size()].push_back(r.row);
  }
  std::vector<XyPoint> points;
  for (const auto& [size, of_size] : by_size) points.push_back(PointOf(yardstick, of_size));
  return points;
}

XySeries LimitOf(const NamedRows& rows) {
  XySeries limit = {
      .name = "limit: memcpy of this size", .style = XyStyle::kLimit, .look = kMaxSeries - 1};
  const Yardstick own = {&BenchRow::memcpy, "", "GB/s", false};
  for (const XyPoint& p : PointsOf(own, rows)) limit.points.push_back({.x = p.x, .y = p.y});
  return limit;
}

// The rows of an operation, and the number of rows that are in no chart.
struct OfOperation {
  std::string op;
  NamedRows rows;
  size_t failed = 0;
  size_t to_itself = 0;
  void SayWhatIsLeftOut(ChartText& text) const {
    const size_t all = rows.size() + failed + to_itself;
    text.LeaveOut(failed, all, "rows", "failed");
    text.LeaveOut(to_itself, all, "rows", "copies within a rank");
  }
};

// Adds the first series, and reports how many are left out.
void AddSeries(const Series& all, XyStyle style,
               std::vector<XyPoint> (*points_of)(const Yardstick&, const NamedRows&),
               const Yardstick& yardstick, XyChart& chart) {
  const std::vector<std::string> names = PointLabels(KeysOf(all));
  bool whiskers = false;
  for (size_t i = 0; i < std::min(all.size(), kMaxSeries); ++i) {
    chart.series.push_back({.name = names[i],
                            .style = style,
                            .look = static_cast<int>(i),
                            .points = points_of(yardstick, all[i].rows)});
    for (const XyPoint& p : chart.series.back().points) whiskers |= p.y_error > 0;
  }
  if (whiskers) chart.text.note += " Whiskers: standard deviation.";
  chart.text.LeaveOut(all.size() - chart.series.size(), all.size(), "series", kInTable);
}

XyChart SizeChart(const OfOperation& operation, size_t index) {
  const auto& [op, rows, failed, to_itself] = operation;
  const Yardstick yardstick = YardstickOf(rows);
  XyChart chart = {
      .text = ChartText{.id = absl::StrCat("bench-size-", index),
                        .title = absl::StrCat(op, ": ", yardstick.name, " over size"),
                        .note = yardstick.bounded ? "Higher is better." : "Lower is better."},
      .x = Axis{.label = "bytes per rank", .kind = ScaleKind::kBytes},
      .y = Axis{.label = LabelOf(yardstick), .kind = ScaleKind::kLog}};
  AddSeries(SeriesOf(rows, true), XyStyle::kLinePoints, PointsOf, yardstick, chart);
  operation.SayWhatIsLeftOut(chart.text);
  if (!yardstick.bounded) return chart;
  XySeries limit = LimitOf(rows);
  if (!limit.points.empty()) chart.series.push_back(std::move(limit));
  return chart;
}

// The largest size of every routing of a series.
std::vector<XyPoint> SkewPoints(const Yardstick& yardstick, const NamedRows& rows) {
  std::map<std::string, const BenchRow*> largest;
  for (const NamedRow<BenchRow>& r : rows) {
    const BenchRow*& best = largest[r.row->routing];
    if (best == nullptr || r.row->size() > best->size()) best = r.row;
  }
  std::vector<XyPoint> points;
  for (const auto& [routing, row] : largest) {
    points.push_back({.x = row->imbalance(),
                      .y = row->*yardstick.value,
                      .name = absl::StrCat(routing, ", ", row->size_text()),
                      .label = routing});
  }
  return points;
}

// Empty unless routings differ in their imbalance.
std::string SkewChart(const OfOperation& operation, size_t index) {
  const auto& [op, rows, failed, to_itself] = operation;
  const auto [low, high] = std::minmax_element(
      rows.begin(), rows.end(), [](const NamedRow<BenchRow>& a, const NamedRow<BenchRow>& b) {
        return a.row->imbalance() < b.row->imbalance();
      });
  if (!(low->row->imbalance() < high->row->imbalance())) return "";
  const Yardstick yardstick = YardstickOf(rows);
  XyChart chart = {
      .text = ChartText{.id = absl::StrCat("bench-skew-", index),
                        .title = absl::StrCat(op, ": skew against ", yardstick.name),
                        .note = "The largest size of each routing. Imbalance 1 is even."},
      .x = Axis{.label = "imbalance: most loaded rank / mean"},
      .y = Axis{.label = LabelOf(yardstick), .from_zero = true}};
  AddSeries(SeriesOf(rows, false), XyStyle::kPoints, SkewPoints, yardstick, chart);
  operation.SayWhatIsLeftOut(chart.text);
  return Render(chart);
}

}  // namespace

Section BenchSection(absl::Span<const Run> runs) {
  Section section = {.id = "bench", .heading = "Benchmarks"};
  NamedRows all;
  std::vector<OfOperation> ops;
  for (const Run& run : runs) {
    for (const BenchRow& row : run.bench) {
      all.push_back({&run, &row});
      if (!row.phase.empty()) continue;  // shown by LayerPhases
      const auto same = [&](const OfOperation& o) {
        return o.op == row.op;
      };
      auto at = std::find_if(ops.begin(), ops.end(), same);
      if (at == ops.end()) at = ops.insert(ops.end(), OfOperation{.op = row.op, .rows = {}});
      // A rank's transfer to itself is a copy, and not included in the mean over pairs.
      if (row.failed()) {
        ++at->failed;
      } else if (row.source == row.destination) {
        ++at->to_itself;
      } else {
        at->rows.push_back({&run, &row});
      }
    }
  }
  if (all.empty()) return section;
  section.body = "<div class=\"charts\">\n";
  for (size_t i = 0; i < ops.size(); ++i) {
    if (ops[i].rows.empty()) continue;
    section.body += Render(SizeChart(ops[i], i)) + SkewChart(ops[i], i);
  }
  absl::StrAppend(&section.body, PairMaps(runs), LayerPhases(runs), "</div>\n",
                  Render(TableOf<BenchRow>("All benchmark rows", all)));
  return section;
}

}  // namespace moe::report
