// Predicted against measured: the first layouts of a plan, each trained for some steps.
#ifndef MOE_MOE_CLI_PLAN_PLAN_CHECK_H_
#define MOE_MOE_CLI_PLAN_PLAN_CHECK_H_

#include <string>
#include <vector>

#include <absl/status/statusor.h>

#include "moe/cli/base/settings.h"
#include "moe/cli/plan/plan_output.h"

namespace moe::cli {

// Trains `steps` steps on threads of this process, on text that is drawn, with the settings of moe
// train. kResourceExhausted where this machine has too little memory.
absl::StatusOr<MeasuredStep> MeasureStep(const Settings& train, int64_t steps);

// Of the predicted step times of rows that were measured, in percent; and how much longer the first
// took than the fastest of them.
struct PlannerError {
  double median_pct = 0, most_pct = 0, first_pct = 0;
};
PlannerError PlannerErrorOf(const std::vector<PlanRow>& rows);

// A line for each row that was measured, and the errors of all.
std::string CheckText(const std::vector<PlanRow>& rows);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_PLAN_PLAN_CHECK_H_
