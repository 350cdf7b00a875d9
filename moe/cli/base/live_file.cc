#include "moe/cli/base/live_file.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <vector>

#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>

namespace moe::cli {

namespace fs = std::filesystem;

std::error_code ReplaceLiveFile(const std::string& path, absl::string_view run,
                                absl::string_view text, FileSystem& files) {
  const std::string unfinished = absl::StrCat(path, ".", run);
  int file = -1;
  std::error_code error = files.Create(unfinished, file);
  if (error.value() == EEXIST) {  // an earlier write, of this process, that failed
    (void)files.Unlink(unfinished);
    error = files.Create(unfinished, file);
  }
  if (error) return error;
  error = WriteAll(file, {reinterpret_cast<const uint8_t*>(text.data()), text.size()}, files);
  const std::error_code closed = files.Close(file);
  if (!error) error = closed;
  if (!error) error = files.Rename(unfinished, path);
  if (error) (void)files.Unlink(unfinished);
  return error;
}

void RemoveUnfinished(const std::string& path, FileSystem& files) {
  constexpr size_t kRunDigits = 16;
  const fs::path whole(path);
  const fs::path folder = whole.has_parent_path() ? whole.parent_path() : ".";
  const std::string begin = whole.filename().string() + ".";
  std::vector<std::string> names;
  if (files.List(folder.string(), names)) return;
  for (const std::string& name : names) {
    if (name.size() != begin.size() + kRunDigits || !absl::StartsWith(name, begin)) continue;
    if (!std::all_of(name.begin() + begin.size(), name.end(), absl::ascii_isxdigit)) continue;
    (void)files.Unlink((folder / name).string());
  }
}

}  // namespace moe::cli
