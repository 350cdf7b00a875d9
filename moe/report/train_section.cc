#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "moe/report/bar_chart.h"
#include "moe/report/expert_load.h"
#include "moe/report/format.h"
#include "moe/report/palette.h"
#include "moe/report/sections.h"
#include "moe/report/table.h"
#include "moe/report/xy_chart.h"

namespace moe::report {
namespace {

double MeanOf(const Run& run, double TrainStep::*value) {
  double sum = 0, count = 0;
  for (size_t i = FirstSteadyStep(run); i < run.steps.size(); ++i) {
    if (!std::isfinite(run.steps[i].*value)) continue;
    sum += run.steps[i].*value;
    ++count;
  }
  return count > 0 ? sum / count : kNone;
}

double DeviationOf(const Run& run, double TrainStep::*value) {
  const double mean = MeanOf(run, value);
  double squares = 0, count = 0;
  for (size_t i = FirstSteadyStep(run); i < run.steps.size(); ++i) {
    if (!std::isfinite(run.steps[i].*value)) continue;
    squares += (run.steps[i].*value - mean) * (run.steps[i].*value - mean);
    ++count;
  }
  return count > 1 ? std::sqrt(squares / (count - 1)) : kNone;
}

XySeries Curve(const Run& run, int look, double TrainStep::*value, double factor) {
  XySeries series = {.name = run.name, .style = XyStyle::kLine, .look = look};
  for (const TrainStep& s : run.steps) {
    series.points.push_back({.x = s.step, .y = factor * s.*value});
  }
  return series;
}

// Validation passes are few: points, with the losses before the first and after the last step.
XySeries ValidationOf(const Run& run, int look) {
  XySeries series = {.name = run.name + ", validation", .look = look};
  const auto add = [&](double step, double loss) {
    if (!std::isfinite(loss)) return;
    if (!series.points.empty() && series.points.back().x == step) return;
    series.points.push_back({.x = step,
                             .y = loss,
                             .tooltip = absl::StrCat(run.name, ", validation after step ",
                                                     CountText(step), ": ", NumberText(loss, 5))});
  };
  if (run.totals.has_value()) add(0, run.totals->validation_loss_before);
  for (const TrainStep& s : run.steps) add(s.step, s.validation_loss);
  if (run.totals.has_value()) add(run.totals->steps, run.totals->validation_loss);
  return series;
}

using Runs = std::vector<const Run*>;

std::string LossChart(const Runs& runs) {
  XyChart chart = {
      .text = ChartText{.id = "train-loss", .title = "Loss", .note = "Lower is better."},
      .x_label = "step",
      .y_label = "loss (nats per token)",
      .x_kind = ScaleKind::kWhole};
  for (size_t i = 0; i < runs.size(); ++i) {
    chart.series.push_back(Curve(*runs[i], static_cast<int>(i), &TrainStep::loss, 1));
    chart.series.push_back(ValidationOf(*runs[i], static_cast<int>(i)));
  }
  return HasPoints(chart) ? Render(chart) : "";
}

std::string CurveChart(const Runs& runs, const char* id, const char* title, const char* y_label,
                       const char* note, double TrainStep::*value, double factor) {
  XyChart chart = {.text = ChartText{.id = id, .title = title, .note = note},
                   .x_label = "step",
                   .y_label = y_label,
                   .x_kind = ScaleKind::kWhole,
                   .y_from_zero = true};
  bool any = false;
  for (size_t i = 0; i < runs.size(); ++i) {
    chart.series.push_back(Curve(*runs[i], static_cast<int>(i), value, factor));
    for (const XyPoint& p : chart.series.back().points) any = any || p.y > 0;
  }
  return any ? Render(chart) : "";  // a line at zero says nothing
}

std::string PhaseChart(const Runs& runs) {
  StackedBarChart chart = {
      .text =
          ChartText{.id = "train-phases",
                    .title = "Time of a step by phase",
                    .note =
                        "Means over steps and ranks. The all-reduce runs beside the backward pass: "
                        "what it hides is not seen here."},
      .x_label = "time (ms)",
      .unit = "ms",
      .parts = {"all-to-all", "experts", "all-reduce", "everything else"}};
  for (const Run* run : runs) {
    const double step = MeanOf(*run, &TrainStep::step_ms);
    if (!std::isfinite(step)) continue;
    std::vector<double> parts = {MeanOf(*run, &TrainStep::a2a_ms),
                                 MeanOf(*run, &TrainStep::expert_ms),
                                 MeanOf(*run, &TrainStep::all_reduce_ms)};
    double named = 0;
    for (const double part : parts) named += std::isfinite(part) ? part : 0;
    parts.push_back(std::max(0.0, step - named));
    chart.bars.push_back({.name = run->name, .parts = std::move(parts)});
  }
  return chart.bars.empty() ? "" : Render(chart);
}

std::vector<TableCell> RowOf(const Run& run) {
  const auto count = [](double value) {
    return TableCell::Number(value, CountText(value));
  };
  const TrainTotals totals = run.totals.value_or(TrainTotals());
  const TrainStep& first = run.steps.front();
  const TrainStep& last = run.steps.back();
  const double step_ms = MeanOf(run, &TrainStep::step_ms);
  return {TableCell::Text(run.name),
          count(last.step),
          count(totals.tokens),
          TableCell::Number(totals.seconds),
          TableCell::Number(last.loss, 4),
          TableCell::Number(totals.validation_loss_before, 4),
          TableCell::Number(totals.validation_loss, 4),
          count(MeanOf(run, &TrainStep::tokens_per_s)),
          count(DeviationOf(run, &TrainStep::tokens_per_s)),
          TableCell::Number(step_ms),
          TableCell::Number(100 * MeanOf(run, &TrainStep::a2a_ms) / step_ms, 2),
          TableCell::Number(100 * first.drop_fraction),
          TableCell::Number(100 * last.drop_fraction),
          TableCell::Number(last.max_violation),
          count(last.dead_experts),
          TableCell::Number(last.peak_bytes, BytesText(last.peak_bytes)),
          TableCell::Text(run.totals.has_value() ? totals.weights_hash : "did not end")};
}

std::string RunTable(const Runs& runs) {
  Table table = {
      .title = "Training runs",
      .names = {"run", "steps", "tokens", "time (s)", "loss, last step", "validation loss, before",
                "validation loss, after", "tokens/s", "± sd", "step (ms)", "all-to-all (% of step)",
                "drops, first step (%)", "drops, last step (%)", "max violation", "dead experts",
                "peak memory", "weights (xxh3)"}};
  for (const Run* run : runs) table.rows.push_back(RowOf(*run));
  return Render(table);
}

}  // namespace

Section TrainSection(absl::Span<const Run> all) {
  Section section = {.id = "train", .heading = "Training"};
  Runs runs;
  for (const Run& run : all) {
    if (run.kind == RunKind::kTrain) runs.push_back(&run);
  }
  if (runs.empty()) return section;
  Runs drawn = runs;
  if (drawn.size() > kNumInks) drawn.resize(kNumInks);
  section.body = "<div class=\"charts\">\n";
  section.body += LossChart(drawn);
  section.body += CurveChart(drawn, "train-drops", "Dropped slots", "dropped (%)",
                             "Slots beyond the experts' capacity.", &TrainStep::drop_fraction, 100);
  section.body += CurveChart(
      drawn, "train-balance", "Load of the busiest expert", "load over even load - 1",
      "0 is even, 1 is twice the even load; the worst layer.", &TrainStep::max_violation, 1);
  section.body += PhaseChart(runs);
  for (size_t i = 0; i < drawn.size(); ++i) section.body += ExpertLoadMaps(*drawn[i], i);
  section.body += "</div>\n";
  if (drawn.size() < runs.size()) {
    section.body += absl::StrCat("<p>Curves and maps show the first ", drawn.size(), " of ",
                                 runs.size(), " runs.</p>\n");
  }
  section.body += RunTable(runs);
  return section;
}

}  // namespace moe::report
