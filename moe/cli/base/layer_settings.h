// The flags of one MoE layer, shared by the commands that make one: names, presets, configuration.
#ifndef MOE_MOE_CLI_BASE_LAYER_SETTINGS_H_
#define MOE_MOE_CLI_BASE_LAYER_SETTINGS_H_

#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

#include "moe/cli/base/settings.h"
#include "moe/moe_layer.h"

namespace moe::cli {

// Rows that set the fields of `layer`, whose values are the defaults: its shape (--hidden-size,
// --num-experts, widths, activation), then gate, capacity and losses.
void AddShapeSettings(MoeLayerConfig& layer, Table& table);
void AddRoutingSettings(MoeLayerConfig& layer, Table& table);

// What --router implies, for settings that were not given: topk, and what belongs to the model that
// the gate is named after (gpt-oss: clamped SwiGLU and biases; qwen2: a gate on its shared expert).
// Without --router, flags that only Megatron's general gate reads choose it: --router topk.
// kInvalidArgument: --moe-router-load-balancing-type sinkhorn with another router.
absl::Status ApplyRouterPreset(Settings& settings);

// What the rows above leave, once they are filled: the token group, and what contradicts itself.
absl::Status CompleteLayer(const Settings& settings, MoeLayerConfig& layer);

// Both, where nothing else of the table is read at once. micro_batch_tokens, seed, dispatch and
// overlap are the command's. Values that the layer itself refuses (ValidateRouterConfig) are not
// looked at.
absl::StatusOr<MoeLayerConfig> LayerConfigOf(const Settings& settings);

// Sizes in elements that no machine holds, and whose products stay within 64 bits.
inline constexpr double kMostElements = 1e12;

// A message of the library with flags for its fields: "RouterConfig.top_k is 9" becomes
// "--moe-router-topk is 9".
std::string InFlags(absl::string_view message, const Settings& settings);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_LAYER_SETTINGS_H_
