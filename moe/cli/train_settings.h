// The settings of `moe train`: names, defaults, help.
#ifndef MOE_MOE_CLI_TRAIN_SETTINGS_H_
#define MOE_MOE_CLI_TRAIN_SETTINGS_H_

#include <string>
#include <vector>

#include "moe/cli/settings.h"

namespace moe::cli {

std::vector<Setting> TrainSettings();

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_TRAIN_SETTINGS_H_
