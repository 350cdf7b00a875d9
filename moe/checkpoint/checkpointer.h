// When a run saves, and how its ranks agree on it.
#ifndef MOE_MOE_CHECKPOINT_CHECKPOINTER_H_
#define MOE_MOE_CHECKPOINT_CHECKPOINTER_H_

#include <cstdint>
#include <memory>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include "moe/checkpoint/stop_signal.h"
#include "moe/checkpoint/training_state.h"
#include "moe/checkpoint/writer.h"
#include "moe/run/context.h"

namespace moe {

struct CheckpointerOptions {
  CheckpointOptions writer = {};
  bool asynchronous = true;  // false: every step waits until its checkpoint is on the disk
  int64_t interval = 0;      // steps between checkpoints; 0: only at the end, or when asked to stop
  int max_failures = 3;      // number of failures in a row that end the run
  const StopSignal* stop = nullptr;
};

// Values that ranks exchange in a step, as sums over the ranks: they travel with the step's other
// sums, so they cost no collective of their own.
struct CheckpointVotes {
  int64_t stop = 0;     // ranks that were asked to stop
  int64_t writing = 0;  // ranks whose shards are still being written
};

// One a rank. Each step: Votes, summed over the world, then AfterStep with the sums; at the end
// Finish.
class Checkpointer {
 public:
  // Collective over the world, blocks. Errors of CheckpointWriter::Create, the same on every rank.
  static absl::StatusOr<std::unique_ptr<Checkpointer>> Create(const CheckpointerOptions& options,
                                                              TrainingState& state,
                                                              const Context& context);

  CheckpointVotes Votes() const;
  // Publishes what all ranks have written, and begins to save `step` if it is due; when a rank was
  // asked to stop, saves it before returning. `describe` returns the manifest's sections about the
  // run. A failed write costs its checkpoint and is logged; kUnavailable after max_failures in a
  // row, or when the last one failed. kDeadlineExceeded, on the rank whose disk hangs, as
  // CheckpointWriter::CheckProgress. Collective, otherwise the same status on every rank.
  using Describe = absl::FunctionRef<CheckpointSections()>;
  absl::Status AfterStep(int64_t step, const CheckpointVotes& all, Describe describe);
  // Saves `step` unless it has been, and returns when it is on the disk. Collective.
  absl::Status Finish(int64_t step, Describe describe);

  int64_t saved_step() const { return saved_step_; }  // the newest on the disk; -1: none
  int64_t failures() const { return failures_; }      // saves that failed

 private:
  Checkpointer(const CheckpointerOptions& options, TrainingState& state, const Context& context)
      : options_(options), state_(state), context_(context) {}
  absl::Status Begin(int64_t step, Describe describe);
  absl::Status Publish();

  const CheckpointerOptions options_;
  TrainingState& state_;
  const Context context_;
  std::unique_ptr<CheckpointWriter> writer_;
  int64_t writing_step_ = -1;  // begun and not published; -1: none
  int64_t saved_step_ = -1;
  int64_t failures_ = 0;
  int failures_in_a_row_ = 0;
  absl::Status failure_;  // the last one
};

}  // namespace moe

#endif  // MOE_MOE_CHECKPOINT_CHECKPOINTER_H_
