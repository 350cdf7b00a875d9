// What `moe plan` is asked, and the runs of moe train that it plans.
#ifndef MOE_MOE_CLI_PLAN_PLAN_OPTIONS_H_
#define MOE_MOE_CLI_PLAN_PLAN_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <absl/status/statusor.h>

#include "moe/cli/base/settings.h"
#include "moe/cli/base/train_options.h"
#include "moe/plan/machine.h"
#include "moe/plan/mesh_search.h"

namespace moe::cli {

struct PlanOptions {
  std::string model;  // config.json, or the folder that has it
  int ranks = 8;
  int node = 0;  // ranks of a node; 0: those of the machine
  std::string gpu = "h100";
  std::string memory;  // "80GiB"; empty: that of the machine
  plan::Goal goal = plan::Goal::kThroughput;
  int64_t sequences = 0;                 // of a step; 0: kSequencesOfRank for each rank
  int shown = 5;                         // meshes in the table
  std::vector<std::string> calibration;  // files of rows of moe bench; none: published figures
  std::string routing;                   // a file, "dirichlet:30"; empty: even
  int check = 0;                         // layouts that are run
  int64_t steps = 4;                     // of each repetition
  int repetitions = 3;                   // of each layout
  std::optional<double> mtbf_hours;
  double stall_s = 1;

  static constexpr int64_t kSequencesOfRank = 16;
};

// The rows of the command, which set `options`; those that moe train has, too, are copies of its.
Table PlanSettings(PlanOptions& options);

// Settings of moe train for the model and the settings that the two commands share.
absl::StatusOr<Settings> TrainSettingsOf(const lm::TransformerConfig& model,
                                         const Settings& settings, const PlanOptions& options,
                                         DeviceKind device);

// What moe train makes of such settings on so many ranks; its errors where it refuses them.
absl::StatusOr<TrainOptions> CheckTrainSettings(const Settings& train, int ranks);

// "moe train --ranks 64 --ep 8 ...".
std::string TrainLine(const Settings& train);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_PLAN_PLAN_OPTIONS_H_
