// When a job that has ended is started again.
#ifndef MOE_MOE_CLI_LAUNCH_RESTARTS_H_
#define MOE_MOE_CLI_LAUNCH_RESTARTS_H_

#include <cstdint>
#include <optional>
#include <string>

#include <absl/status/status.h>
#include <absl/strings/string_view.h>
#include <absl/time/time.h>

#include "moe/cli/base/run_status.h"
#include "moe/cli/launch/engine.h"

namespace moe::launch {

// What a job that Slurm requeues, and so starts as another process, has to keep.
struct RequeueNote {
  int barren = 0;              // restarts, the last ones in a row, that left no newer checkpoint
  bool lacked_memory = false;  // a start of the job ended with 5

  bool operator==(const RequeueNote&) const = default;
};

struct RestartOptions {
  int most = 20;
  bool after_stop = false;  // also after exit code 11
  absl::Duration first_pause = absl::Seconds(1);
  int already = 0;            // restarts before this start of a job that Slurm has requeued
  RequeueNote note;           // of that job
  bool nine_is_loss = false;  // 9 may be the launcher's own: Open MPI's for a lost host
};

// Exit code of a run of moe train. `launcher` is what its launcher ended with: of several ranks one
// code, or a mixture. Hydra's is the bitwise or of exit codes and of the numbers of signals that
// killed ranks, so that 11 after a segmentation fault is also moe's own for a stop; torchrun's is 1
// whatever has failed. `status` is what the run itself has left in --save, nullopt if it has not
// begun: the code in it comes first, also the 0 of a complete run whose launcher failed after it. A
// run under these two that has begun and left none was lost: 7, also where Hydra's code is 0.
int CodeOfRun(int launcher, Engine engine, const std::optional<cli::RunStatus>& status);

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
      : options_(options),
        newest_(newest),
        count_(options.already),
        first_(options.already == 0),
        note_(options.note) {}

  struct Verdict {
    bool again = false;
    absl::Duration pause = {};
    std::string reason;  // "a rank or a host was lost", "nothing to go on from"
  };
  Verdict After(const Attempt& attempt);

  int count() const { return count_; }
  const RequeueNote& note() const { return note_; }

 private:
  const RestartOptions options_;
  int64_t newest_;  // step of the newest checkpoint before the current attempt
  int count_;       // restarts that count against the most
  bool first_;      // the current attempt is no restart
  RequeueNote note_;
};

// The note of this job in "FOLDER/requeue.json"; an empty one if there is none. `barren` is 0
// unless `newest` is the step that was written with it.
RequeueNote ReadRequeueNote(const std::string& folder, absl::string_view slurm_job, int64_t newest);
// Writes it. Errors of WriteText.
absl::Status WriteRequeueNote(const std::string& folder, absl::string_view slurm_job,
                              int64_t newest, const RequeueNote& note);

}  // namespace moe::launch

#endif  // MOE_MOE_CLI_LAUNCH_RESTARTS_H_
