#include "moe/cli/launch/supervisor.h"

#include <algorithm>
#include <vector>

#include <absl/time/clock.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "moe/cli/base/exit_code.h"

namespace moe::launch {
namespace {

constexpr absl::Duration kLook = absl::Milliseconds(500);
constexpr absl::Duration kLongestLook = absl::Seconds(5);
// What a launcher has between SIGTERM and SIGKILL, and its ranks after its end.
constexpr absl::Duration kGrace = absl::Seconds(5);
constexpr absl::Duration kLongestKill = absl::Seconds(1);  // a process in a call may not die

// Returns once this process has no descendants, of which those that live on at the deadline are
// killed.
void EndDescendants(absl::Time deadline) {
  for (;;) {
    pid_t reaped = 0;
    do reaped = ::waitpid(-1, nullptr, WNOHANG);
    while (reaped > 0);
    const absl::Time now = absl::Now();
    if (reaped < 0 || now > deadline + kLongestKill) return;
    if (now >= deadline) {
      for (const pid_t left : DescendantsOf(::getpid())) ::kill(left, SIGKILL);
    }
    absl::SleepFor(absl::Milliseconds(50));
  }
}

}  // namespace

Supervisor::Supervisor() {
  sigemptyset(&signals_);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2, SIGCHLD}) {
    struct sigaction action = {};
    ::sigaction(signal, nullptr, &action);
    // A signal that is ignored from the start (nohup) remains ignored.
    if (signal == SIGCHLD || action.sa_handler != SIG_IGN) sigaddset(&signals_, signal);
  }
  ::sigprocmask(SIG_BLOCK, &signals_, &before_);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
}

Supervisor::~Supervisor() {
  ::prctl(PR_SET_CHILD_SUBREAPER, 0);
  ::sigprocmask(SIG_SETMASK, &before_, nullptr);
}

int Supervisor::Next(absl::Duration wait) const {
  const timespec limit = absl::ToTimespec(std::max(wait, absl::ZeroDuration()));
  return std::max(0, ::sigtimedwait(&signals_, nullptr, &limit));
}

void Supervisor::Handle(int signal, const Process& process, const EngineTraits& engine) {
  if (signal == 0 || signal == SIGCHLD) return;
  if (signal != SIGUSR2) {
    if (stopping_) return process.KillGroup();
    stopping_ = true;
    signal = SIGUSR1;
  }
  bool any = false;
  if (engine.rank_variable != nullptr) {
    for (const pid_t rank : DescendantsWith(engine.rank_variable, process.id())) {
      any |= Catches(rank, signal) && ::kill(rank, signal) == 0;
    }
  }
  // SIGUSR2 would end launchers.
  if (!any && signal != SIGUSR2) process.Signal(engine.stop_signal);
}

Supervisor::Ending Supervisor::Run(absl::Span<const std::string> line, const EngineTraits& engine,
                                   absl::Duration patience, const std::function<bool()>& over) {
  Process launcher = Process::Start(line, Process::Output::kShared);
  if (!launcher.started()) return {.code = 127};
  const absl::Duration often = std::clamp(patience / 4, kLook, kLongestLook);
  bool had_ranks = false;
  absl::Time last_rank = absl::Now(), looked = last_rank;
  for (;;) {
    Handle(Next(kLook), launcher, engine);
    if (const auto code = launcher.Ended(); code.has_value()) {
      EndDescendants(absl::Now() + kGrace);
      return {.code = *code};
    }
    if (absl::Now() - looked < often) continue;
    looked = absl::Now();
    const bool here = engine.rank_variable != nullptr &&
                      !DescendantsWith(engine.rank_variable, launcher.id()).empty();
    had_ranks |= here;
    if (here || (!had_ranks && !over())) last_rank = looked;
    if (looked - last_rank > patience) break;
  }
  launcher.Signal(SIGTERM);
  launcher.WaitUntil(absl::Now() + kGrace);
  launcher.KillGroup();
  launcher.WaitUntil(absl::InfiniteFuture());
  EndDescendants(absl::Now());
  return {.code = static_cast<int>(cli::ExitCode::kTimeout), .ended = true};
}

void Supervisor::Pause(absl::Duration pause) {
  const absl::Time end = absl::Now() + pause;
  do {
    const int signal = Next(end - absl::Now());
    stopping_ |= signal != 0 && signal != SIGCHLD && signal != SIGUSR2;
  } while (!stopping_ && absl::Now() < end);
}

}  // namespace moe::launch
