// What moe/plan and settings say of each other.
#ifndef MOE_MOE_CLI_BASE_LAYOUT_SETTINGS_H_
#define MOE_MOE_CLI_BASE_LAYOUT_SETTINGS_H_

#include "moe/cli/base/launch.h"
#include "moe/cli/base/settings.h"
#include "moe/plan/machine.h"
#include "moe/plan/mesh_search.h"

namespace moe::cli {

// These settings with a layout.
Settings WithLayout(Settings train, const plan::Candidate& candidate);

// The ranks of a launch, nothing of which is measured: MachineOfCores, and GPUs as an H100 is.
// memory_bytes of a rank; 0: the GPU's.
plan::Machine MachineOf(const Launch& launch, double memory_bytes);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_LAYOUT_SETTINGS_H_
