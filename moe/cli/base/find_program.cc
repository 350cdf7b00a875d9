#include "moe/cli/base/find_program.h"

#include <filesystem>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <unistd.h>

#include "comm/create.h"

namespace moe::cli {
namespace {

bool Runs(const std::string& path) {
  return ::access(path.c_str(), X_OK) == 0 && !std::filesystem::is_directory(path);
}

}  // namespace

std::string VariableOf(absl::Span<const std::string> environment, absl::string_view name) {
  const std::string prefix = absl::StrCat(name, "=");
  for (const std::string& entry : environment) {
    if (absl::StartsWith(entry, prefix)) return entry.substr(prefix.size());
  }
  return "";
}

std::string FindProgram(const std::string& name, absl::string_view path) {
  if (absl::StrContains(name, "/")) return Runs(name) ? name : "";
  for (const absl::string_view folder : absl::StrSplit(path, ':', absl::SkipEmpty())) {
    const std::string candidate = absl::StrCat(folder, "/", name);
    if (Runs(candidate)) return candidate;
  }
  return "";
}

std::string FindMpiLauncher(absl::string_view path) {
  for (const std::string& name :
       {absl::StrCat("mpirun.", LinkedMpi()), std::string("mpirun"), std::string("mpiexec")}) {
    const std::string program = FindProgram(name, path);
    if (!program.empty()) return program;
  }
  return "";
}

}  // namespace moe::cli
