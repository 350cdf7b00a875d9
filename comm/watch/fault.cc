#include "comm/watch/fault.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <stdexcept>
#include <thread>

#include <absl/strings/str_cat.h>
#include <absl/time/clock.h>
#include <unistd.h>

#include "comm/wait_report.h"
#include "kernels/base/log.h"

namespace moe {
namespace {

// Ends the process by `signal`, whoever handles it.
void DieBy(int signal) {
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

}  // namespace

bool Fault::ComesTo(int rank) const {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

void Inject(FaultKind kind, int rank, const Site& site) {
  const std::string what = absl::StrCat(DescribePlace(rank, "", site),
                                        ": injected fault: ", NameOf(kind, kFaultKindWords));
  if (kind == FaultKind::kSlow) {
    absl::SleepFor(kSlowPause);
    return;
  }
  Log(LogLevel::kWarning, what);
  if (ReplacementOf(kind).has_value()) return;
  if (kind == FaultKind::kThrow) throw std::runtime_error(what);
  if (kind == FaultKind::kExit) _exit(kFaultExitCode);
  if (kind == FaultKind::kKill) DieBy(SIGKILL);
  if (kind == FaultKind::kSegv) DieBy(SIGSEGV);
  if (kind == FaultKind::kStop) {
    std::raise(SIGSTOP);
    return;
  }
  while (true) std::this_thread::sleep_for(std::chrono::hours(1));
}

}  // namespace moe
