// Runs jobs: passes signals on, and ends launchers that do not end.
#ifndef MOE_MOE_CLI_LAUNCH_SUPERVISOR_H_
#define MOE_MOE_CLI_LAUNCH_SUPERVISOR_H_

#include <csignal>
#include <functional>
#include <optional>
#include <string>

#include <absl/time/time.h>
#include <absl/types/span.h>

#include "moe/cli/launch/engine.h"
#include "moe/cli/launch/process.h"

namespace moe::launch {

// While it lives, signals of this process wait until a function of this class takes them, and
// processes that have lost their parent become children of this one, instead of process 1's. One at
// a time, before any thread starts.
class Supervisor {
 public:
  Supervisor();
  ~Supervisor();
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  struct Ending {
    int code = 0;        // of the launcher, as shells have it
    bool ended = false;  // the launcher went on without ranks, and was ended; code 8
  };
  // Runs `line` to its end. The first SIGTERM, SIGINT, SIGHUP or SIGUSR1 lets the ranks save and
  // end with 11: those of this host that catch it receive SIGUSR1 themselves, since Hydra's exit
  // code is 0 at times after it has passed one on; without such ranks the launcher receives the
  // engine's stop signal. The second kills the job. SIGUSR2 reaches the ranks of this host alone.
  // A launcher whose ranks on this host have all gone, or that never had one here and `over`
  // reports the end of the run, is ended if it runs on for `patience`: Open MPI's waits for a host
  // that is cut off until TCP gives up. What a launcher leaves on this host (ranks, the ssh to a
  // host that is cut off) is killed, 5 s after the end of a launcher that ended by itself, or at
  // the second signal. No other process of this one runs meanwhile.
  Ending Run(absl::Span<const std::string> line, const EngineTraits& engine,
             absl::Duration patience, const std::function<bool()>& over);

  // Returns when it is over, or at once if the job shall stop; takes signals that wait in any case.
  void Pause(absl::Duration pause);

  // Whether a signal has asked for the end.
  bool stopping() const { return stopping_; }

 private:
  // The next signal, or 0 after `wait`.
  int Next(absl::Duration wait) const;
  // Whether the signal asks for the end, and one before it has.
  bool AsksAgain(int signal);
  void Handle(int signal, const Process& process, const EngineTraits& engine);
  // Returns once this process has no descendants. Those that live on at the deadline, or when a
  // signal asks for the end again, are killed.
  void EndDescendants(absl::Time deadline);

  sigset_t signals_, before_;
  bool stopping_ = false;
};

}  // namespace moe::launch

#endif  // MOE_MOE_CLI_LAUNCH_SUPERVISOR_H_
