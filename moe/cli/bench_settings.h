// The settings of `moe bench`: names, defaults, help.
#ifndef MOE_MOE_CLI_BENCH_SETTINGS_H_
#define MOE_MOE_CLI_BENCH_SETTINGS_H_

#include <string>
#include <vector>

#include "moe/cli/command_help.h"

namespace moe::cli {

// Groups of the settings that make a layer: those that its parts may not read are refused there.
inline constexpr char kLayerGroup[] = "A layer and its parts (gate, permute, combine, gemm, layer)";
inline constexpr char kRouterGroup[] = "Router of gate and layer";

std::vector<Setting> BenchSettings();

// Flags as FlagsOf has them of what was given and changes results, but for what every row of
// `operation` has a key for: rows that differ in it are of different things.
std::string BenchIdentity(const Settings& settings, const std::string& operation);

// With their names, in the order of the help.
const std::vector<Operands::Word>& BenchOperations();

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BENCH_SETTINGS_H_
