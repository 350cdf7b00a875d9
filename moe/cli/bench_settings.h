// The settings of `moe bench`: names, defaults, help.
#ifndef MOE_MOE_CLI_BENCH_SETTINGS_H_
#define MOE_MOE_CLI_BENCH_SETTINGS_H_

#include <string>
#include <vector>

#include "moe/cli/settings.h"

namespace moe::cli {

std::vector<Setting> BenchSettings();

// Operations, flags by group, then columns, formulas and exit codes.
std::string BenchHelp();

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BENCH_SETTINGS_H_
