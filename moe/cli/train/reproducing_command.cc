#include "moe/cli/train/reproducing_command.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/strip.h>

#include "kernels/base/status_macros.h"

namespace moe::cli {
namespace {

// `path`, or "path-2", "path-3" ... where something is there by now.
std::string FreePath(const std::string& path) {
  std::string free = path;
  std::error_code ignored;
  for (int n = 2; std::filesystem::exists(free, ignored); ++n) free = absl::StrCat(path, "-", n);
  return free;
}

}  // namespace

std::string ReproducingCommand(const Invocation& invocation, Settings settings,
                               const Launch& launch, const std::optional<BFloat16Order>& order) {
  const auto replace = [&](const char* name, std::string text) {
    const Setting& setting = *settings.Find(name);
    MOE_CHECK(settings.Set(setting, {std::move(text)}, Origin::kFlag, "").ok());
  };
  if (order.has_value()) replace("bf16-order", NameOf(*order, kBFloat16OrderWords));
  const std::string out = settings.text("out"), free_out = FreePath(out);
  if (!out.empty()) replace("out", free_out);
  const std::string events = settings.text("tensorboard-dir");
  if (!events.empty()) replace("tensorboard-dir", FreePath(events));
  const std::string save = settings.text("save");
  absl::string_view below = save;
  if (!out.empty() && absl::ConsumePrefix(&below, absl::StrCat(out, "/"))) {
    replace("save", absl::StrCat(free_out, "/", below));
  } else if (!save.empty()) {
    replace("save", FreePath(save));
  }
  const auto skip = [&](const Setting& s) {
    return s.name == "quiet" || s.name == "verbose" || s.name == "color" || s.name == "output" ||
           s.name == "log-interval" || s.name == "resume" ||
           (s.name == "ranks" && launch.plan.processes());
  };
  return absl::StrCat(LauncherText(launch), ShellQuote(invocation.program), " train",
                      FlagsOf(settings, skip));
}

}  // namespace moe::cli
