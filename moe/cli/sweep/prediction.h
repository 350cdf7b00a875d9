// Points of a sweep of training that are not run, predicted from those that were (moe/plan).
#ifndef MOE_MOE_CLI_SWEEP_PREDICTION_H_
#define MOE_MOE_CLI_SWEEP_PREDICTION_H_

#include <optional>
#include <string>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "moe/cli/measure/sweep_row.h"
#include "moe/cli/sweep/sweep_plan.h"
#include "moe/plan/calibration.h"

namespace moe::cli {

// A point that was measured.
struct MeasuredPoint {
  PlannedPoint planned;
  plan::TrainedStep step;
  double step_s = 0;
};
// nullopt for a row without all parts of a step.
std::optional<MeasuredPoint> MeasuredPointOf(const PlannedPoint& planned,
                                             const sweep::SweepRow& row);

// Parameters, speed, step time and peak of memory, by a machine that is calibrated from the
// measured points of as many ranks and the same dtype, which share the cores alike. kNotFound:
// there are none.
absl::StatusOr<sweep::Figures> PredictPoint(const PlannedPoint& planned,
                                            absl::Span<const MeasuredPoint> measured);

// Of step times: each measured point is predicted from the others.
struct PredictionError {
  int points = 0;  // that could be predicted so
  double median_pct = 0, most_pct = 0;
};
PredictionError ErrorOfPrediction(absl::Span<const MeasuredPoint> measured);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_SWEEP_PREDICTION_H_
