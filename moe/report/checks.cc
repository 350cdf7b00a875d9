#include "moe/report/checks.h"

#include <cmath>
#include <initializer_list>
#include <optional>
#include <set>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "moe/bench/fail_if.h"
#include "moe/report/format.h"

namespace moe::report {
namespace {

CheckRow RowOf(std::string name, std::initializer_list<std::pair<const char*, double>> values) {
  CheckRow row = {.name = std::move(name)};
  for (const auto& [column, value] : values) {
    if (!std::isnan(value)) row.values[column] = value;
  }
  return row;
}

CheckRow RowOf(const Run& run, const BenchRow& r) {
  return RowOf(absl::StrCat(run.name, " ", r.op, " ", r.algorithm, " ", CountText(r.size())),
               {{"ranks", r.ranks},
                {"size", r.size()},
                {"time", r.time_us},
                {"p99", r.time_us_p99},
                {"cv", r.cv_pct},
                {"algbw", r.algbw},
                {"busbw", r.busbw},
                {"memcpy", 100 * r.algbw / r.memcpy},
                {"imb_tx", r.sent_imbalance},
                {"imb_rx", r.received_imbalance},
                {"wait", r.wait_pct},
                {"gflops", r.gflops},
                {"peak_pct", 100 * r.gflops / r.peak_gflops},
                {"wrong", r.wrong}});
}

CheckRow RowOf(const Run& run, const SweepRow& r) {
  return RowOf(absl::StrCat(run.name, " E ", CountText(r.experts), " K ", CountText(r.top_k)),
               {{"experts", r.experts},
                {"topk", r.top_k},
                {"cf", r.capacity_factor},
                {"ep", r.ep},
                {"dp", r.dp},
                {"tok_s", r.tokens_per_s},
                {"step_ms", r.step_ms},
                {"a2a_ms", r.a2a_ms},
                {"drop_init", r.drop_initial_pct},
                {"drop_end", r.drop_final_pct},
                {"max_vio", r.max_violation},
                {"dead", r.dead_experts},
                {"val_loss", r.validation_loss},
                {"peak_mib", r.peak_mib}});
}

double MeanOf(const Run& run, double TrainStep::*value) {
  double sum = 0, count = 0;
  for (size_t i = FirstSteadyStep(run); i < run.steps.size(); ++i) {
    sum += run.steps[i].*value;
    ++count;
  }
  return sum / count;
}

// Speeds are means over steps; all else is of the last step, in the units of a sweep's columns.
CheckRow RowOf(const Run& run) {
  const TrainStep& last = run.steps.back();
  return RowOf(run.name,
               {{"steps", last.step},
                {"loss", last.loss},
                {"val_loss", run.totals.has_value() ? run.totals->validation_loss : kNone},
                {"tok_s", MeanOf(run, &TrainStep::tokens_per_s)},
                {"step_ms", MeanOf(run, &TrainStep::step_ms)},
                {"a2a_ms", MeanOf(run, &TrainStep::a2a_ms)},
                {"drop_end", 100 * last.drop_fraction},
                {"max_vio", last.max_violation},
                {"dead", last.dead_experts},
                {"peak_mib", last.peak_bytes / (1 << 20)}});
}

}  // namespace

std::vector<CheckRow> CheckRows(absl::Span<const Run> runs, const Comparison* comparison) {
  std::vector<CheckRow> rows;
  for (const Run& run : runs) {
    for (const BenchRow& r : run.bench) {
      if (!r.failed()) rows.push_back(RowOf(run, r));
    }
    for (const SweepRow& r : run.sweep) {
      if (!r.failed()) rows.push_back(RowOf(run, r));
    }
    if (!run.steps.empty()) rows.push_back(RowOf(run));
  }
  if (comparison == nullptr) return rows;
  for (const Difference& d : comparison->differences) {
    const std::string name = d.what.empty() ? d.metric : absl::StrCat(d.what, " ", d.metric);
    CheckRow row = {.name = name, .values = {{"worse_pct", d.worse_pct()}}};
    if (std::isfinite(d.change_pct)) row.values[d.key + "_change_pct"] = d.change_pct;
    rows.push_back(std::move(row));
  }
  return rows;
}

absl::StatusOr<std::vector<std::string>> RowsThatFail(absl::string_view expression,
                                                      absl::Span<const CheckRow> rows) {
  std::set<std::string> columns;
  for (const CheckRow& row : rows) {
    for (const auto& [column, value] : row.values) columns.insert(column);
  }
  MOE_ASSIGN_OR_RETURN(
      const bench::FailIf bound,
      bench::FailIf::Parse(expression, std::vector<std::string>(columns.begin(), columns.end())));
  std::vector<std::string> failed;
  for (const CheckRow& row : rows) {
    const auto lookup = [&](absl::string_view column) -> std::optional<double> {
      const auto at = row.values.find(std::string(column));
      return at == row.values.end() ? kNone : at->second;
    };
    if (bound.Holds(lookup)) failed.push_back(row.name);
  }
  return failed;
}

}  // namespace moe::report
