#include "moe/cli/sweep/prediction.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/base/layout_settings.h"
#include "moe/cli/measure/statistics.h"
#include "moe/plan/mesh_search.h"
#include "moe/plan/step_time.h"

namespace moe::cli {
namespace {

bool Alike(const PlannedPoint& a, const PlannedPoint& b) {
  return a.launch.world.ranks == b.launch.world.ranks && a.point.threads == b.point.threads &&
         a.train.trainer.dtype == b.train.trainer.dtype;
}

}  // namespace

std::optional<MeasuredPoint> MeasuredPointOf(const PlannedPoint& planned,
                                             const sweep::SweepRow& row) {
  MeasuredPoint measured = {.planned = planned, .step_s = row.number("step_ms") * 1e-3};
  plan::TrainedStep& step = measured.step;
  step = {.cost = plan::CostOf(planned.train.model),
          .work = plan::WorkloadOf(planned.train, planned.launch.world.ranks),
          .layout = plan::LayoutOf(planned.train)};
  step.SetParts([&](const char* key) { return row.number(key); });
  if (!std::isfinite(step.gradients)) return std::nullopt;
  return measured;
}

absl::StatusOr<sweep::Figures> PredictPoint(const PlannedPoint& planned,
                                            absl::Span<const MeasuredPoint> measured) {
  plan::Calibration samples;
  for (const MeasuredPoint& point : measured) {
    if (Alike(point.planned, planned)) samples.steps.push_back(point.step);
  }
  if (samples.steps.empty()) {
    return absl::NotFoundError(absl::StrCat("no point of ", planned.launch.world.ranks,
                                            " ranks and this dtype was measured, from which it "
                                            "could be predicted"));
  }
  MOE_ASSIGN_OR_RETURN(const plan::Machine machine,
                       plan::Calibrate(samples, MachineOf(planned.launch, /*memory_bytes=*/0)));
  const plan::Workload work = plan::WorkloadOf(planned.train, planned.launch.world.ranks);
  plan::Bubbles bubbles;
  const plan::StepTime time = plan::PredictStep(plan::CostOf(planned.train.model), machine, work,
                                                plan::LayoutOf(planned.train), bubbles);
  const plan::ModelSize size = plan::SizeOf(planned.train.model);
  return sweep::Figures{.params_total = static_cast<double>(size.total),
                        .params_active = static_cast<double>(size.active),
                        .tokens_per_s = work.tokens() / time.total(),
                        .step_ms = time.total() * 1e3,
                        .peak_bytes = plan::EstimateMemory(planned.memory).used_bytes()};
}

PredictionError ErrorOfPrediction(absl::Span<const MeasuredPoint> measured) {
  std::vector<double> errors_pct;
  for (size_t i = 0; i < measured.size(); ++i) {
    std::vector<MeasuredPoint> others(measured.begin(), measured.end());
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(i));
    const auto figures = PredictPoint(measured[i].planned, others);
    if (!figures.ok()) continue;
    errors_pct.push_back(100 * std::abs(figures->step_ms * 1e-3 / measured[i].step_s - 1));
  }
  if (errors_pct.empty()) return {};
  const measure::Statistics error = measure::Describe(errors_pct);
  return {.points = static_cast<int>(errors_pct.size()),
          .median_pct = error.p50,
          .most_pct = error.max};
}

}  // namespace moe::cli
