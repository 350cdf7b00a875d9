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
  std::string text;  // numbers as they stand in the document
};

// All that a command is told: flags, then the environment, then the file of --config, where the
// command has one; with --help the flags alone. Each fills in what those before it left open. Then
// --color, which every command has, holds for what is printed.
// The file's keys are the names and aliases of `settings`, with '_' or '-', and DeepSpeed's
// (deepspeed.ai/docs/config-json), by the tables of deepspeed.cc: those of the same meaning, and
// those that say nothing here while they are off. Those that change memory and speed alone are
// listed in `warnings`. There "auto" and null leave a setting to flags and defaults. Errors: those
// of LoadFlags, of LoadEnvironment and of MappedFile::Open (a folder, device or pipe is no such
// file); kInvalidArgument for what is not understood in the file, all of it in one message, with
// the nearest keys.
absl::Status LoadSettings(absl::Span<const std::string> args,
                          absl::Span<const std::string> environment, Settings& settings,
                          std::vector<std::string>& warnings);

// Keys of DeepSpeed. Sets those that are meant for `settings` and removes all from `leaves`.
// `refused` gets what each that has no meaning here should be instead, `warnings` a line for what
// is taken and makes a difference in memory or in DeepSpeed.
void TakeDeepSpeedKeys(const std::string& file, std::vector<JsonLeaf>& leaves, Settings& settings,
                       std::vector<std::string>& refused, std::vector<std::string>& warnings);

// `text`, but a number without a fraction as settings of whole numbers take it: 16.0 and 1.6e1 as
// 16.
std::string WholeText(std::string text, const Setting& setting);

// For did-you-mean.
std::vector<std::string> DeepSpeedKeys();

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_CONFIG_FILE_H_
