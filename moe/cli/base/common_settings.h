// Rows that are in the tables of several commands, those of a layer among them.
#ifndef MOE_MOE_CLI_BASE_COMMON_SETTINGS_H_
#define MOE_MOE_CLI_BASE_COMMON_SETTINGS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/time/time.h>

#include "kernels/grouped_gemm/gemm_options.h"
#include "moe/cli/base/settings.h"
#include "moe/layer/moe_layer.h"

namespace moe::cli {

// --ranks, by default `ranks`, --backend and --device: what PlanLaunch reads.
void AddRankSettings(Table& table, int ranks = 4);

// --device alone, for commands that place their ranks themselves; DeviceOf reads it.
void AddDeviceSetting(Table& table);

// --share-device: what CheckDevices reads.
void AddShareDeviceSetting(Table& table);

// Most threads of a rank. A larger number is a mistake, and may be more than the system can start.
inline constexpr int64_t kMostThreads = 4096;

// --threads N|auto: threads of each rank.
void AddThreadsSetting(Table& table);

// --bf16-order auto|dot|tile, which sets `order`.
void AddBFloat16OrderSetting(std::optional<BFloat16Order>& order, Table& table);

// Limit of settings that are times, a year: clocks count nanoseconds in 64 bits.
inline constexpr int64_t kMostSeconds = 31'536'000;

// --comm-timeout, by default a minute.
void AddTimeoutSetting(Table& table);
absl::Duration CommTimeout(const Settings& settings);

// --output (-o) and --output-stderr (-oe): the form of the command's rows, "table" or what
// measure::TableFormOf reads.
void AddFormSettings(Table& table);

// Whole numbers of a text setting, separated by commas; none if it is empty.
absl::StatusOr<std::vector<int32_t>> NumbersOf(const Settings& settings, const char* name);

// "80GiB", "80GB", "512MiB", "1e9": bytes. kInvalidArgument names the flag.
absl::StatusOr<double> SizeInBytes(absl::string_view flag, const std::string& text);

// -q, --quiet.
void AddQuietSetting(const std::string& text, Table& table);

// --config FILE.json: what LoadSettings reads. `text` is for the help.
void AddConfigSetting(const std::string& text, Table& table);

// --color WHEN, which LoadFlags and LoadSettings pass to SetColor.
void AddColorSetting(Table& table);

// --color, --print-config and --help.
void AddHelpSettings(Table& table);

// The flags of one MoE layer, shared by the commands that make one: names, presets, configuration.

// Rows that set the fields of `layer`, whose values are the defaults: its shape (--hidden-size,
// --num-experts, widths, activation), then gate, capacity and losses.
void AddShapeSettings(MoeLayerConfig& layer, Table& table);
void AddRoutingSettings(MoeLayerConfig& layer, Table& table);

// Sets what --router implies, for settings that were not given: topk, and the settings of the model
// that the gate is named after (gpt-oss: clamped SwiGLU and biases; qwen2: a gate on its shared
// expert). Without --router, a flag that only Megatron's general gate reads selects that gate:
// --router topk. kInvalidArgument: --moe-router-load-balancing-type sinkhorn with another router.
absl::Status ApplyRouterPreset(Settings& settings);

// Completes `layer` once the rows above are filled: sets the token group and reports
// contradictions. micro_batch_tokens, seed, dispatch and overlap are set by the command. Values
// that the layer itself refuses (ValidateRouterConfig) are not checked.
absl::Status CompleteLayer(const Settings& settings, MoeLayerConfig& layer);

// Sizes in elements that no machine holds, and whose products stay within 64 bits.
inline constexpr double kMostElements = 1e12;

// An error of the library with flags for its fields: "RouterConfig.top_k is 9" becomes
// "--moe-router-topk is 9".
absl::Status InFlags(const absl::Status& status, const Settings& settings);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_COMMON_SETTINGS_H_
