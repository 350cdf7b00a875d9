#include "moe/sweep/available_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <vector>

#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <absl/strings/string_view.h>

namespace moe::sweep {
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

struct GroupFiles {
  std::string mount;  // of the hierarchy
  const char* limit;  // names of its files
  const char* usage;
  const char* cache_key;  // in memory.stat
};

// What one control group leaves; kNoLimit where it has no limit or does not exist.
int64_t LeftIn(const std::string& folder, const GroupFiles& files) {
  const auto limit = NumberIn(absl::StrCat(folder, "/", files.limit), "");
  const auto usage = NumberIn(absl::StrCat(folder, "/", files.usage), "");
  if (!limit.has_value() || !usage.has_value()) return kNoLimit;  // "max", or no such folder
  const int64_t cache = NumberIn(absl::StrCat(folder, "/memory.stat"), files.cache_key).value_or(0);
  return std::max<int64_t>(0, *limit - *usage + std::min(cache, *usage));
}

// The least over `path` ("/a/b") and the groups above it.
int64_t LeftAbove(std::string path, const GroupFiles& files) {
  int64_t left = LeftIn(files.mount, files);
  while (path.size() > 1) {
    left = std::min(left, LeftIn(absl::StrCat(files.mount, path), files));
    path.resize(path.rfind('/'));
  }
  return left;
}

}  // namespace

int64_t AvailableMemoryBytes(const std::string& root) {
  int64_t left = kNoLimit;
  if (const auto kib = NumberIn(absl::StrCat(root, "/proc/meminfo"), "MemAvailable:")) {
    left = *kib * 1024;
  }
  std::ifstream groups(absl::StrCat(root, "/proc/self/cgroup"));
  for (std::string line; std::getline(groups, line);) {  // "9:memory:/a", "0::/a"
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3 || !absl::StartsWith(parts[2], "/")) continue;
    const std::vector<std::string> controllers = absl::StrSplit(parts[1], ',');
    if (parts[1].empty()) {
      left = std::min(left, LeftAbove(parts[2], {absl::StrCat(root, "/sys/fs/cgroup"), "memory.max",
                                                 "memory.current", "inactive_file"}));
    } else if (std::find(controllers.begin(), controllers.end(), "memory") != controllers.end()) {
      left = std::min(left, LeftAbove(parts[2], {absl::StrCat(root, "/sys/fs/cgroup/memory"),
                                                 "memory.limit_in_bytes", "memory.usage_in_bytes",
                                                 "total_inactive_file"}));
    }
  }
  return left == kNoLimit ? 0 : left;
}

}  // namespace moe::sweep
