#include "moe/cli/launch/supervisor.h"

#include <algorithm>
#include <utility>

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

// Reaps processes that have lost their parent. The launcher, once it has ended, is left.
void ReapOrphans(pid_t launcher) {
  for (;;) {
    siginfo_t ended = {};
    const int rc = ::waitid(P_ALL, 0, &ended, WEXITED | WNOHANG | WNOWAIT);
    if (rc != 0 || ended.si_pid == 0 || ended.si_pid == launcher) return;
    ::waitpid(ended.si_pid, nullptr, WNOHANG);
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

bool Supervisor::AsksAgain(int signal) {
  if (signal == 0 || signal == SIGCHLD || signal == SIGUSR2) return false;
  return std::exchange(stopping_, true);
}

void Supervisor::Handle(int signal, const Process& process, const EngineTraits& engine) {
  if (signal == 0 || signal == SIGCHLD) return;
  if (AsksAgain(signal)) return process.KillGroup();
  if (signal != SIGUSR2) signal = SIGUSR1;
  bool any = false;
  if (engine.rank_variable != nullptr) {
    for (const pid_t rank : DescendantsWith(engine.rank_variable, process.id())) {
      any |= Catches(rank, signal) && ::kill(rank, signal) == 0;
    }
  }
  // SIGUSR2 would end launchers.
  if (!any && signal != SIGUSR2) process.Signal(engine.stop_signal);
}

void Supervisor::EndDescendants(absl::Time deadline) {
  for (;;) {
    pid_t reaped = 0;
    do reaped = ::waitpid(-1, nullptr, WNOHANG);
    while (reaped > 0);
    const absl::Time now = absl::Now();
    if (reaped < 0 || now > deadline + Process::kLongestKill) return;
    if (now >= deadline) {
      for (const pid_t left : DescendantsOf(::getpid())) ::kill(left, SIGKILL);
    }
    if (AsksAgain(Next(absl::Milliseconds(50)))) deadline = std::min(deadline, absl::Now());
  }
}

Supervisor::Ending Supervisor::Run(absl::Span<const std::string> line, const EngineTraits& engine,
                                   absl::Duration patience, const std::function<bool()>& over) {
  Process launcher = Process::Start(line, Process::Output::kShared);
  if (!launcher.started()) return {.code = 127};
  const absl::Duration often = std::clamp(patience / 4, kLook, kLongestLook);
  bool had_ranks = false, is_over = false;
  absl::Time last_rank = absl::Now(), looked = last_rank, asked = last_rank;
  for (;;) {
    Handle(Next(kLook), launcher, engine);
    ReapOrphans(launcher.id());
    if (const auto code = launcher.Ended(); code.has_value()) {
      EndDescendants(absl::Now() + kGrace);
      return {.code = *code};
    }
    // Ranks may live for less than `often`.
    if (absl::Now() - looked < (had_ranks ? often : kLook)) continue;
    looked = absl::Now();
    const bool here = engine.rank_variable != nullptr &&
                      !DescendantsWith(engine.rank_variable, launcher.id()).empty();
    had_ranks |= here;
    if (!had_ranks && looked - asked >= often) {
      asked = looked;
      is_over = over();
    }
    if (here || (!had_ranks && !is_over)) last_rank = looked;
    if (looked - last_rank > patience) break;
  }
  launcher.Signal(SIGTERM);
  const absl::Time deadline = absl::Now() + kGrace;
  while (!launcher.Ended().has_value() && absl::Now() < deadline) {
    if (AsksAgain(Next(absl::Milliseconds(50)))) break;
  }
  launcher.KillGroup();
  launcher.WaitUntil(absl::Now() + Process::kLongestKill);
  EndDescendants(absl::Now());
  return {.code = static_cast<int>(cli::ExitCode::kTimeout), .ended = true};
}

void Supervisor::Pause(absl::Duration pause) {
  const absl::Time end = absl::Now() + pause;
  int signal = 0;
  do {
    signal = Next(stopping_ ? absl::ZeroDuration() : end - absl::Now());
    AsksAgain(signal);
  } while (signal != 0 || (!stopping_ && absl::Now() < end));
}

}  // namespace moe::launch
