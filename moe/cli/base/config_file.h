// Settings from a JSON file: this program's names, and DeepSpeed's keys where they mean the same.
#ifndef MOE_MOE_CLI_BASE_CONFIG_FILE_H_
#define MOE_MOE_CLI_BASE_CONFIG_FILE_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "moe/cli/base/settings.h"

namespace moe::cli {

enum class JsonType : uint8_t { kString, kNumber, kBool, kNull, kEmptyList, kEmptyObject };

// A scalar of a JSON document with the way to it: "optimizer.params.betas.0".
struct JsonLeaf {
  std::string path;
  JsonType type = JsonType::kNull;
  std::string text;  // numbers as written in the document
};

// Loads all settings of a command: from flags, then the environment, then the file of --config if
// the command has that flag; with --help from flags alone. Each source sets what the earlier ones
// left open. Then --color, which every command has, applies to all that is printed.
// The file's keys are the names and aliases of `settings`, with '_' or '-', and DeepSpeed's
// (deepspeed.ai/docs/config-json), by the tables of deepspeed.cc: those of the same meaning, and
// those that have no effect here while they are off. Keys that change memory and speed alone are
// listed in `warnings`. For DeepSpeed's keys "auto" and null leave a setting to flags and defaults.
// Errors: those of LoadFlags, of LoadEnvironment and of MappedFile::Open (a folder, device or pipe
// is no such file); kInvalidArgument for all that is not understood in the file, in one message,
// with the nearest keys.
absl::Status LoadSettings(absl::Span<const std::string> args,
                          absl::Span<const std::string> environment, Settings& settings,
                          std::vector<std::string>& warnings);

// Takes DeepSpeed's keys: sets those that have a meaning for `settings` and removes all of them
// from `leaves`. Adds to `refused` what to use instead of each key without a meaning here, and to
// `warnings` a line for each accepted key that makes a difference in memory or in DeepSpeed.
void TakeDeepSpeedKeys(const std::string& file, std::vector<JsonLeaf>& leaves, Settings& settings,
                       std::vector<std::string>& refused, std::vector<std::string>& warnings);

// `text`; but a number without a fraction in the form that settings of whole numbers take: 16.0 and
// 1.6e1 as 16.
std::string WholeText(std::string text, const Setting& setting);

// DeepSpeed's keys, for suggestions of the nearest one.
std::vector<std::string> DeepSpeedKeys();

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_CONFIG_FILE_H_
