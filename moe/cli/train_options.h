// From settings to what `moe train` runs.
#ifndef MOE_MOE_CLI_TRAIN_OPTIONS_H_
#define MOE_MOE_CLI_TRAIN_OPTIONS_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/time/time.h>
#include <absl/types/span.h>

#include "comm/world_plan.h"
#include "moe/cli/settings.h"
#include "moe/lm/trainer.h"

namespace moe::cli {

// Flags over environment over --config over router presets over defaults. Errors: kInvalidArgument
// or kNotFound.
absl::StatusOr<Settings> LoadTrainSettings(absl::Span<const std::string> args,
                                           absl::Span<const std::string> environment,
                                           std::vector<std::string>& warnings);

struct TrainOptions {
  lm::TrainConfig train;
  std::vector<std::string> data;
  std::string out;             // empty: no files
  std::string trace;           // empty: no time line
  std::string record_routing;  // empty: routing is not recorded
  int ranks = 1;
  absl::Duration comm_timeout;
};

// Where the ranks will run.
struct World {
  int ranks = 1;
  int local_ranks = 1;  // on this machine
  int cores = 1;        // of this machine
  Backend backend = Backend::kLocal;
};

// Finds everything that can be wrong without reading the text: kInvalidArgument with flag, value
// and nearest valid choice.
absl::StatusOr<TrainOptions> MakeTrainOptions(const Settings& settings, const World& world);

// Parameters of the model over all experts, and those that one token uses.
struct ModelSize {
  int64_t total = 0;
  int64_t active = 0;
};
ModelSize SizeOf(const lm::TransformerConfig& config);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_TRAIN_OPTIONS_H_
