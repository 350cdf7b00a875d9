// When a job that has ended is started again.
#ifndef MOE_MOE_CLI_LAUNCH_RESTARTS_H_
#define MOE_MOE_CLI_LAUNCH_RESTARTS_H_

#include <cstdint>
#include <string>

#include <absl/time/time.h>

namespace moe::launch {

struct RestartOptions {
  int most = 20;
  bool after_stop = false;  // also after exit code 11
  absl::Duration first_pause = absl::Seconds(1);
  int already = 0;  // restarts before: those of a job that Slurm has requeued
  // Whether 9 may be the launcher's own: Open MPI's for a host, Hydra's for a rank that is killed.
  bool nine_is_loss = false;
};

// How a job ended.
struct Attempt {
  int code = 0;
  absl::Duration ran = {};
  int64_t newest = -1;  // step of the newest checkpoint after it; -1: none
};

// Decides by exit code: a lost rank, host or launcher is worth another start, wrong flags are not;
// lack of memory is worth one. Restarts are counted, and each hour of a job that left a newer
// checkpoint takes one from the count. The pause before a restart doubles with the count, from
// first_pause to 5 minutes. Two restarts in a row without a newer checkpoint are the last.
class Restarts {
 public:
  Restarts(const RestartOptions& options, int64_t newest)
      : options_(options), newest_(newest), count_(options.already) {}

  struct Verdict {
    bool again = false;
    absl::Duration pause = {};
    std::string reason;  // "a rank or a host was lost", "nothing to go on from"
  };
  Verdict After(const Attempt& attempt);

  int count() const { return count_; }

 private:
  const RestartOptions options_;
  int64_t newest_;    // step of the newest checkpoint before the current attempt
  int count_;         // restarts that count against the most
  int attempts_ = 0;  // that have ended
  int barren_ = 0;    // attempts in a row without a newer checkpoint
  bool lacked_memory_ = false;
};

}  // namespace moe::launch

#endif  // MOE_MOE_CLI_LAUNCH_RESTARTS_H_
