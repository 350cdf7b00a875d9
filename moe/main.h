// main() of a program of one's own: ranks are threads, or under a launcher processes.
#ifndef MOE_MOE_MAIN_H_
#define MOE_MOE_MAIN_H_

#include <cstdio>
#include <cstdlib>

#include "comm/create.h"
#include "kernels/base/status_macros.h"

namespace moe {

// Runs `body` on every rank and returns main's exit code: 0, or 1 after one line on stderr with the
// rank that failed and the reason. `ranks`: threads of this process where no launcher has started
// several. For flags and deadlines of the program's own: DetectLaunch, PlanWorld and RunRanks
// (comm/create.h).
inline int Main(RankBody body, int ranks = 4) {
  const auto report = [](const absl::Status& status) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
  };
  const auto run = [&]() -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const LaunchInfo launch, DetectLaunch({}, std::getenv));
    MOE_ASSIGN_OR_RETURN(const WorldPlan plan, PlanWorld({.default_ranks = ranks}, launch));
    // With an exit code, a thread that hangs after another has failed is left.
    const auto exit_code = [](const absl::Status&) {
      return 1;
    };
    return RunRanks({.plan = plan, .report = report, .exit_code = exit_code}, body);
  };
  const absl::Status status = run();
  if (!status.ok()) report(status);
  return status.ok() ? 0 : 1;
}

}  // namespace moe

#endif  // MOE_MOE_MAIN_H_
