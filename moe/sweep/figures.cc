#include "moe/sweep/figures.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace moe::sweep {
namespace {

double PhaseMs(const lm::StepMetrics& metrics, Phase phase) {
  return metrics.phase_seconds[static_cast<int>(phase)] * 1e3;
}

// Mean of `value` over steps [begin, end).
template <typename Value>
double Mean(absl::Span<const lm::StepMetrics> steps, Value value) {
  double sum = 0;
  for (const lm::StepMetrics& step : steps) sum += value(step);
  return sum / static_cast<double>(steps.size());
}

}  // namespace

MeanSd MeanSdOf(absl::Span<const double> values) {
  if (values.empty()) return {};
  const auto n = static_cast<double>(values.size());
  double sum = 0;
  for (const double value : values) sum += value;
  MeanSd result = {.mean = sum / n};
  if (values.size() < 2) return result;
  double squares = 0;
  for (const double value : values) squares += (value - result.mean) * (value - result.mean);
  result.sd = std::sqrt(squares / (n - 1));
  return result;
}

Summary Summarize(absl::Span<const Figures> repetitions) {
  const auto over = [&](double Figures::*figure) {
    std::vector<double> values;
    for (const Figures& f : repetitions) values.push_back(f.*figure);
    return MeanSdOf(values);
  };
  Summary summary;
  for (double Figures::*figure :
       {&Figures::params_total, &Figures::params_active, &Figures::tokens_per_s, &Figures::step_ms,
        &Figures::a2a_ms, &Figures::all_reduce_ms, &Figures::expert_ms, &Figures::drop_initial_pct,
        &Figures::drop_final_pct, &Figures::max_violation, &Figures::dead_experts,
        &Figures::validation_loss}) {
    summary.mean.*figure = over(figure).mean;
  }
  for (const Figures& f : repetitions) {
    summary.mean.peak_bytes = std::fmax(summary.mean.peak_bytes, f.peak_bytes);  // NaN: the other
  }
  summary.tokens_per_s_sd = over(&Figures::tokens_per_s).sd;
  summary.validation_loss_sd = over(&Figures::validation_loss).sd;
  return summary;
}

Figures TrainFigures::Finish(const lm::TrainReport& report) const {
  Figures figures = {.params_total = static_cast<double>(report.parameters_total),
                     .params_active = static_cast<double>(report.parameters_active),
                     .validation_loss = report.validation_loss_after};
  if (steps_.empty()) return figures;
  const auto all = absl::MakeConstSpan(steps_);
  const auto steady = all.size() > 1 ? all.subspan(1) : all;
  double tokens = 0, seconds = 0;
  for (const lm::StepMetrics& step : steady) {
    tokens += step.tokens_per_second * step.step_seconds;
    seconds += step.step_seconds;
  }
  figures.tokens_per_s = tokens / seconds;
  figures.step_ms = seconds / static_cast<double>(steady.size()) * 1e3;
  figures.a2a_ms = Mean(steady, [](const lm::StepMetrics& m) {
    return PhaseMs(m, Phase::kDispatch) + PhaseMs(m, Phase::kCombine);
  });
  figures.all_reduce_ms =
      Mean(steady, [](const lm::StepMetrics& m) { return PhaseMs(m, Phase::kAllReduce); });
  figures.expert_ms =
      Mean(steady, [](const lm::StepMetrics& m) { return PhaseMs(m, Phase::kExpert); });
  const auto last = all.last(std::max<size_t>(1, all.size() / 10));
  figures.drop_initial_pct = 100 * all.front().drop_fraction;
  figures.drop_final_pct =
      100 * Mean(last, [](const lm::StepMetrics& m) { return m.drop_fraction; });
  figures.max_violation = Mean(last, [](const lm::StepMetrics& m) { return m.max_violation; });
  figures.dead_experts =
      Mean(last, [](const lm::StepMetrics& m) { return static_cast<double>(m.dead_experts); });
  for (const lm::StepMetrics& step : steps_) {
    figures.peak_bytes = std::fmax(figures.peak_bytes, static_cast<double>(step.peak_bytes));
  }
  return figures;
}

Figures LayerFigures(const bench::LayerResult& result) {
  // Mean over ranks, as of training: each phase's slowest rank is another, and their sum would be
  // more than the step.
  const auto ms = [&](const char* phase) {
    double sum = 0;
    for (const bench::LayerRow& row : result.rows) {
      if (row.phase != phase) continue;
      for (const bench::LayerRow& whole : result.rows) {
        if (whole.phase != "all" || whole.pass != row.pass) continue;
        sum += row.share_pct / 100 * whole.time_us.p50 * 1e-3;
      }
    }
    return sum;
  };
  const bench::LayerFigures& measured = result.figures;
  return {.tokens_per_s = measured.tokens_per_s,
          .step_ms = measured.step_us.p50 * 1e-3,
          .a2a_ms = ms("dispatch") + ms("combine"),
          .expert_ms = ms("expert"),
          .drop_initial_pct = 100 * measured.drop_fraction,
          .drop_final_pct = 100 * measured.drop_fraction,
          .max_violation = measured.max_vio,
          .dead_experts = static_cast<double>(measured.dead_experts),
          .peak_bytes = static_cast<double>(measured.peak_bytes)};
}

}  // namespace moe::sweep
