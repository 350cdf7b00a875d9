#include <cmath>
#include <initializer_list>
#include <optional>
#include <set>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/report/compare.h"
#include "moe/cli/report/format.h"
#include "moe/cli/report/labels.h"

namespace moe::report {
namespace {

CheckRow RowOf(std::string name, std::initializer_list<std::pair<const char*, double>> values) {
  CheckRow row = {.name = std::move(name)};
  for (const auto& [column, value] : values) {
    if (!std::isnan(value)) row.values[column] = value;
  }
  return row;
}

template <typename Row>
std::map<std::string, double> BoundsOf(const Row& row) {
  std::map<std::string, double> values;
  for (const Column<Row>& c : ColumnsOf<Row>()) {
    const double value = NumberOf(c, row);
    if (c.bound[0] != 0 && !std::isnan(value)) values[c.bound] = value;
  }
  return values;
}

// Speeds are means over steps; all else comes from the last step, in the units of a sweep's
// columns.
CheckRow RowOf(const Run& run) {
  const TrainStep& last = run.steps.back();
  return RowOf(run.name,
               {{"steps", last.step},
                {"loss", last.loss},
                {"val_loss", run.totals.has_value() ? run.totals->validation_loss : kNone},
                {"tok_s", SteadyMean(run, &TrainStep::tokens_per_s)},
                {"step_ms", SteadyMean(run, &TrainStep::step_ms)},
                {"a2a_ms", SteadyMean(run, &TrainStep::a2a_ms)},
                {"drop_end", 100 * last.drop_fraction},
                {"max_vio", last.max_violation},
                {"dead", last.dead_experts},
                {"peak_mib", last.peak_bytes / (1 << 20)}});
}

// Means of the columns over rows of one kind.
template <typename Row>
std::map<std::string, double> Means(const std::vector<const Row*>& rows) {
  std::map<std::string, std::pair<double, int>> sums;
  for (const Row* row : rows) {
    for (const auto& [column, value] : BoundsOf(*row)) {
      sums[column].first += value;
      ++sums[column].second;
    }
  }
  std::map<std::string, double> means;
  for (const auto& [column, sum] : sums) means[column] = sum.first / sum.second;
  return means;
}

void AddRows(const Run& run, std::vector<CheckRow>& rows) {
  for (const BenchRow& r : run.bench) {
    if (r.failed()) continue;
    rows.push_back(
        {.name = absl::StrCat(run.name, " ", r.op, " ", r.algorithm, " ", CountText(r.size())),
         .values = BoundsOf(r)});
  }
  std::vector<Key> points;
  for (const SweepRow& r : run.sweep) {
    if (!r.failed()) points.push_back(PointKey(r));
  }
  const std::vector<std::string> labels = PointLabels(points);
  size_t next = 0;
  for (const SweepRow& r : run.sweep) {
    if (r.failed()) continue;
    rows.push_back({.name = absl::StrCat(run.name, " ", labels[next++]), .values = BoundsOf(r)});
  }
  if (!run.steps.empty()) rows.push_back(RowOf(run));
}

void AddComparedRows(const Run& a, const Run& b, std::vector<CheckRow>& rows) {
  const auto add = [&](const auto& all) {
    for (const auto& r : all) {
      rows.push_back({.name = absl::StrCat(b.name, " ", r.what),
                      .values = Means(r.rows),
                      .base = Means(r.base)});
    }
  };
  add(BenchRepetitions(a, b));
  add(SweepRepetitions(a, b));
  if (b.steps.empty()) return;
  CheckRow row = RowOf(b);
  if (!a.steps.empty()) row.base = RowOf(a).values;
  rows.push_back(std::move(row));
}

}  // namespace

std::vector<CheckRow> CheckRows(absl::Span<const Run> runs, const Comparison* comparison) {
  std::vector<CheckRow> rows;
  const size_t compared = comparison == nullptr ? 0 : 2;
  for (const Run& run : runs.subspan(compared)) AddRows(run, rows);
  if (comparison == nullptr) return rows;
  AddComparedRows(runs[0], runs[1], rows);
  for (const Difference& d : comparison->differences) {
    const std::string name = d.what.empty() ? d.metric : absl::StrCat(d.what, " ", d.metric);
    CheckRow row = {.name = name, .values = {{"worse_pct", d.worse_pct()}}};
    if (std::isfinite(d.change_pct)) row.values[d.key + "_change_pct"] = d.change_pct;
    rows.push_back(std::move(row));
  }
  return rows;
}

absl::StatusOr<std::vector<std::string>> RowsThatFail(absl::string_view expression,
                                                      absl::Span<const CheckRow> rows,
                                                      measure::FailIf::Base base) {
  std::set<std::string> columns;
  for (const CheckRow& row : rows) {
    for (const auto& [column, value] : row.values) columns.insert(column);
  }
  MOE_ASSIGN_OR_RETURN(
      const measure::FailIf bound,
      measure::FailIf::Parse(expression, std::vector<std::string>(columns.begin(), columns.end()),
                             base));
  const auto column_of = [](const std::map<std::string, double>& values) {
    return [&values](absl::string_view column) -> std::optional<double> {
      const auto at = values.find(std::string(column));
      return at == values.end() ? kNone : at->second;
    };
  };
  std::vector<std::string> failed;
  for (const CheckRow& row : rows) {
    if (bound.Holds(column_of(row.values), column_of(row.base))) failed.push_back(row.name);
  }
  return failed;
}

}  // namespace moe::report
