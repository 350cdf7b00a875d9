#include "moe/cli/base/weight_offload.h"

#include <algorithm>

#include <absl/strings/str_cat.h>
#include <absl/strings/strip.h>
#include <fmt/format.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/offload_text.h"
#include "moe/cli/base/terminal.h"

namespace moe::cli {
namespace {

constexpr char kForms[] = "none or weights:file=DIR";

}  // namespace

void AddWeightOffloadSettings(Table& table) {
  table
      .Add("--offload WHAT", {Kind::kText, "none"},
           "weights:file=DIR = weights for which --weight-memory has no room, to a scratch file of "
           "each rank in DIR, an existing folder; the same bits (docs/parallelism.md); with "
           "--device cpu")
      .Roles(kPerRank);  // a rank's own DIR
  table.Add("--weight-memory SIZE", Kind::kText,
            "most memory of a rank for weights, with --offload: 8GiB, 64e9");
}

absl::StatusOr<std::optional<WeightFileOptions>> WeightOffloadOf(const Settings& settings) {
  const std::string& text = settings.text("offload");
  const std::string& memory = settings.text("weight-memory");
  if (text == "none") {
    if (memory.empty()) return std::nullopt;
    return WrongFlag("--weight-memory", memory, "--offload weights:file=DIR with it");
  }
  absl::string_view folder = text;
  if (!absl::ConsumePrefix(&folder, kWeightOffload) || folder.empty()) {
    return WrongFlag("--offload", text, kForms);
  }
  const auto* const device = settings.Find("device");
  if (device != nullptr && settings.is("device", "cuda")) {
    return WrongFlag("--offload", text, "none: weights are not offloaded from GPUs yet");
  }
  if (memory.empty()) {
    return WrongFlag("--offload", text, "--weight-memory SIZE with it, such as 8GiB");
  }
  MOE_ASSIGN_OR_RETURN(const double bytes, SizeInBytes("--weight-memory", memory));
  constexpr double kMost = 0x1p60;  // more than any machine has, and whole in 64 bits
  return WeightFileOptions{.folder = std::string(folder),
                           .memory_bytes = static_cast<int64_t>(std::min(bytes, kMost))};
}

std::string TextOf(const PagingReport& report) {
  std::string text =
      fmt::format("{} in memory, {} in files", BytesText(static_cast<double>(report.memory_bytes)),
                  BytesText(static_cast<double>(report.file_bytes)));
  if (report.experts > 0) {
    text += fmt::format("; room for {} of {} experts", report.experts_in_memory, report.experts);
  }
  if (report.hits + report.misses > 0) {
    text += fmt::format(", of {} that were needed {:.1f} % were there", report.hits + report.misses,
                        100 * report.hit_rate());
  }
  return text + fmt::format("; read {}, waited {:.2f} s",
                            BytesText(static_cast<double>(report.bytes_read)), report.wait_seconds);
}

nlohmann::ordered_json JsonOf(const std::optional<PagingReport>& report) {
  if (!report.has_value()) return nullptr;
  return {{"memory_bytes", report->memory_bytes}, {"file_bytes", report->file_bytes},
          {"experts", report->experts},           {"experts_in_memory", report->experts_in_memory},
          {"expert_hits", report->hits},          {"expert_misses", report->misses},
          {"hit_rate", report->hit_rate()},       {"module_reads", report->module_reads},
          {"bytes_read", report->bytes_read},     {"wait_seconds", report->wait_seconds}};
}

}  // namespace moe::cli
