// moe train --mesh auto.
#ifndef MOE_MOE_CLI_TRAIN_MESH_CHOICE_H_
#define MOE_MOE_CLI_TRAIN_MESH_CHOICE_H_

#include <string>

#include <absl/status/statusor.h>

#include "moe/cli/base/launch.h"
#include "moe/cli/base/settings.h"

namespace moe::cli {

// Sets EP, ETP, PP, TP, schedule, chunks, ZeRO and recomputation to the layout that is predicted
// fastest of those that fit on the launch's ranks, and --mesh to "given". Those that are given
// stay, as do micro-batches and leaves of trees, which are part of what fixes the bits. Equal
// settings and machines give equal layouts. Returns the line that says what was chosen and why.
// kInvalidArgument: the settings are refused, or every such layout is; kResourceExhausted: none
// fits, with what the nearest needs.
absl::StatusOr<std::string> ChooseMesh(const Launch& launch, Settings& settings);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_TRAIN_MESH_CHOICE_H_
