// What is offloaded, as flags name it.
#ifndef MOE_MOE_CLI_BASE_OFFLOAD_TEXT_H_
#define MOE_MOE_CLI_BASE_OFFLOAD_TEXT_H_

#include <string>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/strings/strip.h>

#include "moe/zero/state_placement.h"

namespace moe::cli {

// The forms of the text, for messages.
inline constexpr char kOffloadForms[] = "none, optimizer or optimizer:file=DIR";

// Of weights, which commands without an optimiser offload (weight_offload.h).
inline constexpr char kWeightOffload[] = "weights:file=";

// kInvalidArgument, with what was expected, for a text of no form.
inline absl::StatusOr<Offload> ParseOffload(absl::string_view text) {
  Offload offload;
  if (absl::ConsumePrefix(&text, "optimizer:file=") && !text.empty()) {
    offload.optimizer = OffloadTo::kFile;
    offload.file.folder = std::string(text);
  } else if (text == "optimizer") {
    offload.optimizer = OffloadTo::kHost;
  } else if (text != "none") {
    return absl::InvalidArgumentError(kOffloadForms);
  }
  return offload;
}

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_OFFLOAD_TEXT_H_
