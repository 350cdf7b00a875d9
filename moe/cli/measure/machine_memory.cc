#include "moe/cli/measure/machine_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <vector>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_split.h>
#include <absl/strings/string_view.h>

#include "kernels/base/machine_limits.h"

namespace moe::measure {

namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

// The number behind `key` in a file of lines "key number [unit]"; of a file with one number: key
// "".
std::optional<int64_t> NumberIn(const std::string& path, absl::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    const size_t at = key.empty() ? 0 : 1;
    int64_t number = 0;
    if (words.size() > at && (key.empty() || words[0] == key) &&
        absl::SimpleAtoi(words[at], &number)) {
      return number;
    }
  }
  return std::nullopt;
}

std::optional<int64_t> LimitOf(const ControlGroup& group) {
  return NumberIn(
      absl::StrCat(group.folder, group.version_2 ? "/memory.max" : "/memory.limit_in_bytes"), "");
}

// Memory that one control group leaves; kNoLimit if it has no limit or does not exist.
int64_t LeftIn(const ControlGroup& group) {
  const auto limit = LimitOf(group);
  const auto usage = NumberIn(
      absl::StrCat(group.folder, group.version_2 ? "/memory.current" : "/memory.usage_in_bytes"),
      "");
  if (!limit.has_value() || !usage.has_value()) return kNoLimit;  // "max", or no such folder
  const int64_t cache = NumberIn(absl::StrCat(group.folder, "/memory.stat"),
                                 group.version_2 ? "inactive_file" : "total_inactive_file")
                            .value_or(0);
  return std::max<int64_t>(0, *limit - *usage + std::min(cache, *usage));
}

std::string Mib(double bytes) {
  return absl::StrFormat("%.0f MiB", bytes / 0x1p20);
}

}  // namespace

int64_t AvailableMemoryBytes(const std::string& root) {
  int64_t left = kNoLimit;
  if (const auto kib = NumberIn(absl::StrCat(root, "/proc/meminfo"), "MemAvailable:")) {
    left = *kib * 1024;
  }
  for (const ControlGroup& group : ControlGroupsOf("memory", root)) {
    left = std::min(left, LeftIn(group));
  }
  return left == kNoLimit ? 0 : left;
}

int64_t TotalMemoryBytes(const std::string& root) {
  const int64_t limit = MemoryLimitBytes(root);
  const auto kib = NumberIn(absl::StrCat(root, "/proc/meminfo"), "MemTotal:");
  if (!kib.has_value()) return limit;
  return limit > 0 ? std::min(limit, *kib * 1024) : *kib * 1024;
}

int64_t MemoryLimitBytes(const std::string& root) {
  int64_t least = kNoLimit;
  for (const ControlGroup& group : ControlGroupsOf("memory", root)) {
    least = std::min(least, LimitOf(group).value_or(kNoLimit));
  }
  return least == kNoLimit ? 0 : least;
}

std::string TooBig(const plan::MemoryEstimate& estimate, int ranks, int64_t available_bytes,
                   std::optional<double> max_mib) {
  const double needed = estimate.total_bytes() * ranks;
  const auto available = static_cast<double>(available_bytes);
  std::string limit;
  if (max_mib.has_value() && needed > *max_mib * 0x1p20) {
    limit = absl::StrFormat("--max-memory %.15g MiB", *max_mib);
  } else if (available_bytes > 0 && needed > available) {
    limit = absl::StrCat("the ", Mib(available), " that are available");
  } else {
    return "";
  }
  return absl::StrCat("needs about ", Mib(needed), " for ", ranks, " ranks of this machine (",
                      Mib(estimate.state_bytes()), " of parameters, gradients and optimiser, ",
                      Mib(estimate.workspace_bytes), " of activations each), expected at most ",
                      limit);
}

}  // namespace moe::measure
