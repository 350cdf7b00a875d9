// DIR/status.json: where a run of moe train is, for moe status.
#ifndef MOE_MOE_CLI_BASE_RUN_STATUS_H_
#define MOE_MOE_CLI_BASE_RUN_STATUS_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/time/time.h>

#include "kernels/base/choice.h"
#include "moe/checkpoint/run_lock.h"
#include "moe/io/file_system.h"
#include "moe/lm/training_loop.h"

namespace moe::cli {

inline constexpr char kStatusName[] = "status.json";

// What a run says of itself. What it cannot say, because its process was killed or hangs, follows
// from `process` and `updated`.
enum class RunState : uint8_t { kRunning, kComplete, kStopped, kFailed };
inline constexpr Choice<RunState> kRunStateWords[] = {{"running", RunState::kRunning},
                                                      {"complete", RunState::kComplete},
                                                      {"stopped", RunState::kStopped},
                                                      {"failed", RunState::kFailed}};

struct RunStatus {
  RunState state = RunState::kRunning;
  int exit_code = 0;       // of a run that has ended
  std::string error;       // the line with which it ended; empty: none
  int64_t step = 0;        // that was taken last
  int64_t first_step = 0;  // of the checkpoint that it resumed from; 0: from the beginning
  int64_t steps = 0;
  std::optional<double> loss, val_loss;  // the last ones
  double tokens_per_s = 0;               // of the last step, as the next
  double step_ms = 0;
  absl::Time updated = absl::InfinitePast();  // the last progress, by the clock of rank 0's host
  LockHolder process;                         // of rank 0
  std::string user;                           // who started it
  int ranks = 1, hosts = 1;
  std::string backend;
  std::string save;     // absolute path of --save; empty: nothing is saved
  std::string command;  // as it was started
  std::string version, commit;
};

// An object on one line, with the line's end:
//   schema ("moe.status/1"), state, exit_code (null while it runs), error, step, first_step, steps,
//   loss, val_loss, tokens_per_s, step_ms, updated (UTC), user, ranks, hosts, backend, save,
//   command, version, commit, process {run, host, pid, since, ...: LockText}
std::string StatusText(const RunStatus& status);
// kDataLoss says what is wrong with the text.
absl::StatusOr<RunStatus> ParseStatus(absl::string_view text);

// "DIR/status.json".
std::string StatusPathIn(absl::string_view folder);

// Name of the user of this process, or its number.
std::string UserName();

// Writes the status of a run into folders, whole or not at all, on a thread of its own: no step
// waits for the disk, which may hang. A status that cannot be written is no reason to fail: the
// first time is a warning. Thread-safe.
class StatusFile {
 public:
  // Shortest time between two writes of a run that goes on.
  static constexpr absl::Duration kInterval = absl::Seconds(1);
  // Longest wait of End: a disk that hangs must not keep a failure from being reported. Half of
  // what threads that have failed have for their report (comm/create.cc).
  static constexpr absl::Duration kLongestEnd = absl::Milliseconds(500);

  // `folders`: of --out and --save; the same one is written once. `files` must stay valid while a
  // call may hang in it.
  StatusFile(RunStatus start, const std::vector<std::string>& folders,
             FileSystem& files = RealFileSystem());
  ~StatusFile();  // waits for what is unwritten, at most kLongestEnd; not at all after End
  StatusFile(const StatusFile&) = delete;
  StatusFile& operator=(const StatusFile&) = delete;

  // The run has begun, in a world of `hosts`. Rank 0 replaces the status of an earlier run.
  void Begin(int64_t first_step, int hosts, int rank);
  void Show(const lm::StepMetrics& metrics);
  // The run has ended, as the status of the command reports. A run that has not begun writes
  // nothing. Returns once this is written, or kLongestEnd is over. Of several ends the first stays:
  // later ones are its echoes. A rank that is not in the process of rank 0 completes what rank 0
  // has written, where it sees the same folders. Rank 0 leaves a status that another process has
  // ended, unless that happens between its look at the file and the renaming.
  void End(const absl::Status& status);

 private:
  struct Writer;  // shared with the thread that writes, which may be left in a call that hangs

  void Post();  // now_ is to be written, in place of what has not been written yet
  void Await() noexcept;

  const std::shared_ptr<Writer> writer_;
  std::mutex mu_;
  RunStatus now_;  // guarded by mu_, as is all below
  bool begun_ = false, owns_ = false, ended_ = false;
};

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_RUN_STATUS_H_
