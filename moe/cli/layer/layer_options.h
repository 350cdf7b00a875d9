// What `moe layer` was asked to do.
#ifndef MOE_MOE_CLI_LAYER_LAYER_OPTIONS_H_
#define MOE_MOE_CLI_LAYER_LAYER_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/time/time.h>
#include <absl/types/span.h>

#include "moe/cli/base/launch.h"
#include "moe/cli/base/settings.h"
#include "moe/hf/block_run.h"

namespace moe::cli {

// Flags over environment over defaults. kInvalidArgument.
absl::StatusOr<Settings> LoadLayerSettings(absl::Span<const std::string> args,
                                           absl::Span<const std::string> environment,
                                           std::vector<std::string>& warnings);

struct LayerOptions {
  std::string config, weights, input, output;
  std::string grad_output, grads;  // both empty: forward alone
  std::string trace;               // empty: no time line
  std::optional<int64_t> layer;
  hf::BlockRunOptions run;
  absl::Duration comm_timeout;

  bool backward() const { return !grads.empty(); }
};

// Everything that can be wrong without opening a file: kInvalidArgument with flag, value and what
// was expected.
absl::StatusOr<LayerOptions> MakeLayerOptions(const Settings& settings, const World& world);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_LAYER_LAYER_OPTIONS_H_
