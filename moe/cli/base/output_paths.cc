#include "moe/cli/base/output_paths.h"

#include <filesystem>
#include <system_error>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/base/layer_settings.h"
#include "moe/cli/base/program.h"

namespace moe::cli {
namespace {

namespace fs = std::filesystem;

bool SameFile(const std::string& a, const std::string& b) {
  if (a.empty() || b.empty()) return false;
  std::error_code neither_exists, ignored;
  if (WrittenInPlace(a)) return false;  // nothing is overwritten
  if (fs::equivalent(a, b, neither_exists)) return true;
  if (!neither_exists) return false;
  const fs::path of_a = fs::weakly_canonical(fs::absolute(a, ignored), ignored);
  return !of_a.empty() && of_a == fs::weakly_canonical(fs::absolute(b, ignored), ignored);
}

}  // namespace

absl::Status CheckOutputPaths(absl::Span<const FlagPath> inputs,
                              absl::Span<const FlagPath> outputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    const FlagPath& output = outputs[i];
    const auto check = [&](absl::Span<const FlagPath> others) -> absl::Status {
      for (const FlagPath& other : others) {
        if (!SameFile(output.path, other.path)) continue;
        return WrongFlag(output.flag, output.path, absl::StrCat("another file than ", other.flag));
      }
      return absl::OkStatus();
    };
    MOE_RETURN_IF_ERROR(check(inputs));
    MOE_RETURN_IF_ERROR(check(outputs.first(i)));
  }
  return absl::OkStatus();
}

}  // namespace moe::cli
