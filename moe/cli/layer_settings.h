// The flags of one MoE layer, shared by the commands that make one: names, presets, configuration.
#ifndef MOE_MOE_CLI_LAYER_SETTINGS_H_
#define MOE_MOE_CLI_LAYER_SETTINGS_H_

#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

#include "moe/cli/settings.h"
#include "moe/moe_layer.h"

namespace moe::cli {

// Where commands differ.
struct LayerDefaults {
  int64_t num_experts = 8;
  int64_t hidden_size = 0;
  int64_t ffn_hidden_size = 256;
  double aux_loss_coeff = 0.01;
  double z_loss_coeff = 0;
};

// Shape of the layer: --hidden-size, --num-experts, widths, activation.
void AddShapeSettings(const char* group, const LayerDefaults& defaults,
                      std::vector<Setting>& table);
// Gate, capacity and losses.
void AddRoutingSettings(const char* group, const LayerDefaults& defaults,
                        std::vector<Setting>& table);

// What --router implies, for settings that were not given: topk, and what belongs to the model that
// the gate is named after (gpt-oss: clamped SwiGLU and biases; qwen2: a gate on its shared expert).
// Without --router, flags that only Megatron's general gate reads choose it: --router topk.
// kInvalidArgument: --moe-router-load-balancing-type sinkhorn with another router.
absl::Status ApplyRouterPreset(Settings& settings);

// micro_batch_tokens, seed, dispatch and overlap are the command's. Values that the layer itself
// refuses (ValidateRouterConfig) are not looked at.
absl::StatusOr<MoeLayerConfig> LayerConfigOf(const Settings& settings);

// How its rows travel: --dispatch, --node-size.
DispatcherOptions DispatcherOf(const Settings& settings);

// Sizes in elements that no machine holds, and whose products stay within 64 bits.
inline constexpr double kMostElements = 1e12;

// A message of the library with flags for its fields: "RouterConfig.top_k is 9" becomes
// "--moe-router-topk is 9".
std::string InFlags(absl::string_view message, const Settings& settings);

// kInvalidArgument "<flag> is <value>, expected <expected>".
absl::Status WrongFlag(absl::string_view flag, absl::string_view value, absl::string_view expected);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_LAYER_SETTINGS_H_
