// Predicted against measured: the first layouts of a plan, each trained for some steps.
#ifndef MOE_MOE_CLI_PLAN_PLAN_CHECK_H_
#define MOE_MOE_CLI_PLAN_PLAN_CHECK_H_

#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "moe/cli/base/launch.h"
#include "moe/cli/base/settings.h"
#include "moe/cli/plan/plan_options.h"
#include "moe/cli/plan/plan_output.h"

namespace moe::cli {

// Trains each of `rows` for options.steps steps on text that is drawn, options.repetitions times
// and in turns, so that other work on the machine meets all of them, and sets what they took: the
// shortest step behind the first, and the highest peak. `train`: settings without the layout.
// On threads of this process, or with all processes of `launch`, where the first alone has the
// figures then.
// kResourceExhausted where this machine has too little memory; kInvalidArgument where processes
// have other rows.
absl::Status MeasureRows(const Settings& train, const Launch& launch, const PlanOptions& options,
                         absl::Span<PlanRow> rows);

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
