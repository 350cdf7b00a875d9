// What moe status concludes from a run's status.json and from the process that wrote it.
#ifndef MOE_MOE_CLI_STATUS_RUN_VIEW_H_
#define MOE_MOE_CLI_STATUS_RUN_VIEW_H_

#include <cstdint>
#include <optional>
#include <string>

#include <absl/status/status.h>
#include <absl/time/time.h>

#include "kernels/base/choice.h"
#include "moe/checkpoint/run_lock.h"
#include "moe/cli/base/run_status.h"

namespace moe::cli {

// kNone: its status cannot be read.
enum class Condition : uint8_t { kRunning, kStalled, kLost, kComplete, kStopped, kFailed, kNone };
inline constexpr Choice<Condition> kConditionWords[] = {
    {"running", Condition::kRunning}, {"stalled", Condition::kStalled},
    {"lost", Condition::kLost},       {"complete", Condition::kComplete},
    {"stopped", Condition::kStopped}, {"failed", Condition::kFailed},
    {"none", Condition::kNone}};

struct SavedStep {
  int64_t step = -1;                          // of the newest checkpoint; -1: there is none
  absl::Time created = absl::InfinitePast();  // unknown: in the infinite past
};

struct RunView {
  std::string path;  // as the user named the run
  RunStatus status = {};
  Condition condition = Condition::kRunning;
  absl::Status read = absl::OkStatus();  // of kNone, which has no status: what is wrong
  SavedStep saved = {};
  absl::Duration age = absl::ZeroDuration();            // since the last progress, or since the end
  absl::Duration saved_age = absl::InfiniteDuration();  // infinite: unknown
  absl::Duration eta = absl::InfiniteDuration();  // likewise, and of a run that is not running
};

// `sign` is that of status.process. A run that has not ended is lost where its process has; it is
// stalled without progress for longer than `limit`, by default 120 s or 10 steps, the longer.
RunView ViewOf(std::string path, RunStatus status, Sign sign, const SavedStep& saved,
               std::optional<absl::Duration> limit, absl::Time now);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_STATUS_RUN_VIEW_H_
