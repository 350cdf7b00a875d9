// Weights that do not fit: --offload weights:file=DIR and --weight-memory, and what became of them.
#ifndef MOE_MOE_CLI_BASE_WEIGHT_OFFLOAD_H_
#define MOE_MOE_CLI_BASE_WEIGHT_OFFLOAD_H_

#include <optional>
#include <string>

#include <absl/status/statusor.h>

#include <nlohmann/json.hpp>

#include "moe/cli/base/settings.h"
#include "moe/zero/weight_pager.h"

namespace moe::cli {

void AddWeightOffloadSettings(Table& table);
// nullopt: weights are in memory. kInvalidArgument names the flag: one of the two without the
// other, a text of no form, a CUDA device.
absl::StatusOr<std::optional<WeightFileOptions>> WeightOffloadOf(const Settings& settings);

// Of all ranks, on one line.
std::string TextOf(const PagingReport& report);
nlohmann::ordered_json JsonOf(const std::optional<PagingReport>& report);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_WEIGHT_OFFLOAD_H_
