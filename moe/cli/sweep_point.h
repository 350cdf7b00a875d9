// One point of a sweep, from its settings.
#ifndef MOE_MOE_CLI_SWEEP_POINT_H_
#define MOE_MOE_CLI_SWEEP_POINT_H_

#include <absl/status/status.h>

#include "moe/cli/settings.h"
#include "moe/cli/sweep_plan.h"

namespace moe::cli {

// What the row says of the point, whether it can run or not.
void FillPoint(const Settings& settings, sweep::Point& point);

// Fill `planned` with what runs, as `moe train` and `moe bench layer` would check and make it.
// kInvalidArgument with flag, value and what was expected where values do not go together.
absl::Status PlanTraining(const Settings& settings, const lm::Corpus& corpus,
                          PlannedPoint& planned);
absl::Status PlanLayer(const Settings& settings, PlannedPoint& planned);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_SWEEP_POINT_H_
