#include "moe/cli/launch/supervisor.h"

#include <algorithm>
#include <vector>

#include <absl/time/clock.h>

#include "moe/cli/base/exit_code.h"

namespace moe::launch {
namespace {

constexpr absl::Duration kLook = absl::Milliseconds(500);
// What a launcher has between SIGTERM and SIGKILL.
constexpr absl::Duration kGrace = absl::Seconds(5);

}  // namespace

Supervisor::Supervisor() {
  sigemptyset(&signals_);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2, SIGCHLD}) {
    sigaddset(&signals_, signal);
  }
  ::sigprocmask(SIG_BLOCK, &signals_, &before_);
}

Supervisor::~Supervisor() {
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
  std::vector<pid_t> ranks;
  if (engine.rank_variable != nullptr) ranks = FirstWith(engine.rank_variable, process.id());
  if (ranks.empty()) return process.Signal(signal == SIGUSR2 ? SIGUSR2 : engine.stop_signal);
  for (const pid_t rank : ranks) ::kill(rank, signal);
}

Supervisor::Ending Supervisor::Run(absl::Span<const std::string> line, const EngineTraits& engine,
                                   absl::Duration patience) {
  Process launcher = Process::Start(line, Process::Output::kShared);
  if (!launcher.started()) return {.code = 127};
  bool had_ranks = false;
  absl::Time last_rank = absl::Now(), looked = last_rank;
  for (;;) {
    Handle(Next(kLook), launcher, engine);
    if (const auto code = launcher.Ended(); code.has_value()) return {.code = *code};
    if (absl::Now() - looked < kLook) continue;
    looked = absl::Now();
    if (engine.rank_variable == nullptr) continue;
    if (!FirstWith(engine.rank_variable, launcher.id()).empty()) {
      had_ranks = true;
      last_rank = looked;
    }
    if (had_ranks && looked - last_rank > patience) break;
  }
  launcher.Signal(SIGTERM);
  launcher.WaitUntil(absl::Now() + kGrace);
  launcher.KillGroup();
  return {.code = static_cast<int>(cli::ExitCode::kTimeout), .ended = true};
}

void Supervisor::Pause(absl::Duration pause) {
  const absl::Time end = absl::Now() + pause;
  while (!stopping_ && absl::Now() < end) {
    const int signal = Next(end - absl::Now());
    stopping_ = signal != 0 && signal != SIGCHLD && signal != SIGUSR2;
  }
}

}  // namespace moe::launch
