#include "comm/wait_report.h"

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <unistd.h>

namespace moe {

std::string DescribePhase(const CommPhase& phase) {
  std::string text = phase.name == nullptr ? "" : phase.name;
  const auto add = [&text](absl::string_view name, int64_t value) {
    if (value >= 0) absl::StrAppend(&text, text.empty() ? "" : ", ", name, " ", value);
  };
  add("layer", phase.layer);
  add("step", phase.step);
  return text;
}

std::string DescribePlace(int world_rank, absl::string_view operation, const CommPhase& phase) {
  char host[256] = "?";
  (void)gethostname(host, sizeof(host) - 1);
  const std::string doing = DescribePhase(phase);
  return absl::StrCat("rank ", world_rank, " on host ", host, " in ", operation,
                      doing.empty() ? "" : " (", doing, doing.empty() ? "" : ")");
}

absl::Status LateError(absl::string_view place, const std::vector<int>& missing,
                       absl::Duration waited, absl::Duration timeout) {
  return absl::DeadlineExceededError(absl::StrCat(
      place, ": waited ", absl::FormatDuration(absl::Trunc(waited, absl::Milliseconds(1))), " for ",
      missing.size() == 1 ? "rank " : "ranks ", absl::StrJoin(missing, ", "), ", deadline ",
      absl::FormatDuration(timeout)));
}

}  // namespace moe
