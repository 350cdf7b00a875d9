// Flags of `moe train` that inject a fault.
#ifndef MOE_MOE_CLI_BASE_FAULT_SETTINGS_H_
#define MOE_MOE_CLI_BASE_FAULT_SETTINGS_H_

#include <absl/status/statusor.h>

#include "comm/watch/fault.h"
#include "moe/cli/base/settings.h"

namespace moe::cli {

// --fault, and Megatron's --fault-injector-*.
void AddFaultSettings(Table& table);

// Their fault for a run of `ranks` ranks; without ranks where none is given. kInvalidArgument: a
// value that is unknown, with the list of those that are known; flags of both kinds.
absl::StatusOr<Fault> FaultOf(const Settings& settings, int ranks);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_FAULT_SETTINGS_H_
