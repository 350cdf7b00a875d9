// --init-from: a run that starts with the weights of a public model.
#ifndef MOE_MOE_CLI_TRAIN_INIT_FROM_H_
#define MOE_MOE_CLI_TRAIN_INIT_FROM_H_

#include <absl/status/status.h>

#include "moe/cli/base/settings.h"

namespace moe::cli {

// Sets the model's settings to what config.json in the folder of --init-from says, as a preset;
// nothing without the flag. kInvalidArgument, naming the setting, where another value was given;
// errors of hf::ReadModelConfig.
absl::Status ApplyInitFrom(Settings& settings);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_TRAIN_INIT_FROM_H_
