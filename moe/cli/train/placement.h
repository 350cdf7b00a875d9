// How the expert-parallel groups of a run lie on hosts.
#ifndef MOE_MOE_CLI_TRAIN_PLACEMENT_H_
#define MOE_MOE_CLI_TRAIN_PLACEMENT_H_

#include <cstdint>
#include <string>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "moe/lm/train_config.h"

namespace moe::cli {

// A line for the start of a run whose ranks are on `hosts` [R], "hosts  2; all expert-parallel
// groups cross hosts\n"; "" on one host. kInvalidArgument of --node-size where a node of any group
// would have ranks of two hosts.
absl::StatusOr<std::string> PlacementText(const lm::TrainConfig& config,
                                          absl::Span<const uint64_t> hosts);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_TRAIN_PLACEMENT_H_
