// Writes checkpoints (docs/checkpoint.md): each rank its shards, in the background; then rank 0 the
// manifest, and one rename that makes them all a checkpoint.
#ifndef MOE_MOE_CHECKPOINT_WRITER_H_
#define MOE_MOE_CHECKPOINT_WRITER_H_

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/time/time.h>
#include <absl/types/span.h>

#include "comm/communicator.h"
#include "kernels/base/parallel.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "moe/checkpoint/manifest.h"
#include "moe/io/file_system.h"
#include "moe/io/file_work.h"
#include "moe/state/canonical_tensor.h"

namespace moe {

struct SharedWork;

class RunLock;

struct CheckpointOptions {
  std::string folder = {};  // of the step folders: "run/checkpoints"; all ranks see the same
  int keep = 3;             // newest checkpoints that stay, >= 1
  int64_t keep_every = 0;   // steps that are a multiple of it stay, too; 0: none
  int64_t first_step = 0;  // where the run begins: 0, or the step of the checkpoint it goes on from
  // Newer checkpoints whose data a reader has found to be damaged. They are no reason to refuse the
  // run, and are set aside when it reaches their steps.
  std::vector<int64_t> damaged_steps = {};
  // Of the run that holds the folder (run_folder.h), where one does. run: the same on all ranks.
  // lock: of rank 0, still held when a checkpoint gets its name; shared with a thread that may be
  // left in a call that hangs.
  std::string run = {};
  std::shared_ptr<RunLock> lock = {};
  // The manifest's section `hash` has the hash of each float32 state. Parts of these are then whole
  // row groups (unit_grid.h): all columns, cut where UnitGrid::FirstRowOfGroup cuts. A state that
  // is not finite is not published: kDataLoss without a FileFault.
  bool hash_states = false;
  int64_t max_box_bytes = int64_t{64} << 20;
  int64_t max_shard_bytes = int64_t{4} << 30;   // of data
  ThreadPool* threads = &ThreadPool::Serial();  // that copy
  absl::Duration timeout = absl::Minutes(10);   // of a call of `files` that does not return
  FileSystem* files = &RealFileSystem();        // lives on while a call may hang in it
};

struct CheckpointState {
  int64_t step = 0;                  // optimiser steps taken; the same on all ranks
  CheckpointSections sections = {};  // those of rank 0 are written
};

// A piece of one state of one tensor that this rank writes. Over all ranks the pieces of a state
// tile the tensor.
struct StatePart {
  const CanonicalTensor* tensor = nullptr;
  const char* state = "";  // "master", "m", "v", "value", "share"
  TensorBox box = {};
  // [rows of the box, columns of the box] in host memory. float: F32; double: F64. All states of a
  // tensor have one type.
  std::variant<MatrixView<const float>, MatrixView<const double>> data = {};
};

enum class WriterPhase : uint8_t {
  kIdle,     // nothing to publish
  kWriting,  // the background thread is busy
  kWritten,  // Publish it
  kFailed,   // status() says why; Publish cleans up
};

// One a rank; for one thread. What it starts in the background touches files, never a communicator.
// All calls to `files` are made there, so that a disk that hangs holds no rank.
class CheckpointWriter {
 public:
  // Makes the folder. Rank 0 removes what stopped runs left in it: `.tmp-*`, `.trash-*`; what it
  // cannot remove, or holds files of others, it warns of. Call it on all ranks, and a collective
  // before the first Start. kInvalidArgument: options, or a `latest` that is no file.
  // kAlreadyExists: the folder has a readable checkpoint newer than `first_step`, which this run
  // would come to overwrite (named). kFailedPrecondition: under the name of such a step there is
  // what no run writes (named). kUnavailable, kPermissionDenied: the system refuses.
  // kDeadlineExceeded as CheckProgress.
  static absl::StatusOr<std::unique_ptr<CheckpointWriter>> Create(const CheckpointOptions& options,
                                                                  int rank, int ranks);
  // Gives up a write that is under way; a call that has not returned half a second later is left
  // to its thread.
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Copies the parts into one buffer, which is kept for the next time, and returns; they may then
  // change. Shards are written behind. kFailedPrecondition unless the phase is kIdle. Then, and the
  // phase becomes kFailed, kInvalidArgument: a part that does not fit its tensor;
  // kResourceExhausted: no memory, no thread. What goes wrong later is in status(). Cost: a copy of
  // the parts.
  absl::Status Start(const CheckpointState& state, absl::Span<const StatePart> mine);

  WriterPhase phase() const;
  // Of the write since the last Start: OK while it goes on. kUnavailable, kPermissionDenied: names
  // path and cause. kInvalidArgument: names of tensors or states, sections that no manifest takes.
  absl::Status status() const;
  // For whoever does other things while the phase is kWriting: kDeadlineExceeded names rank, host
  // and the call to the file system that has not returned within CheckpointOptions::timeout. Logs
  // such a line every minute before.
  absl::Status CheckProgress();

  // Makes the shards that all ranks wrote since Start a checkpoint, or, if any rank failed, removes
  // them. Waits for the shards that are still being written, however long: ranks tell each other
  // that they are there. Then the phase is kIdle. Collective, blocks the host; `stream` is one of
  // the CPU. kDeadlineExceeded, on the rank whose call hangs, as CheckProgress; else the same
  // status on all ranks: OK, and the checkpoint is on the disk; that of the first rank that failed,
  // "rank 3: ..."; kFailedPrecondition, a rank without a Start, a link in the place of what it
  // writes to, or under the checkpoint's name what no run writes; kInvalidArgument, if the parts do
  // not tile their tensors or ranks are at different steps; kDataLoss, rank 0 cannot read what all
  // have written, as where they see several folders; kUnavailable, another run has taken the lock;
  // kAlreadyExists, a readable checkpoint of this step or a later one is there. What comes after
  // the checkpoint is on the disk (`latest`, removal of old ones) only warns. These, but neither
  // that deadline nor the communicator's own errors, carry FileFault::kWrite (moe/io/file.h).
  // Cost on the wire: the tables of boxes, about 100 bytes a box.
  absl::Status Publish(Communicator& world, Stream& stream);

 private:
  struct Job;  // what is written, and where it comes from
  CheckpointWriter(const CheckpointOptions& options, int rank, int ranks);

  // Create, on the disk.
  static absl::Status Prepare(const CheckpointOptions& options, int rank);
  // Whether the folder of a step holds a checkpoint that must not be replaced. Errors of the
  // system: nobody knows.
  static absl::StatusOr<bool> IsTaken(const CheckpointOptions& options, int64_t step);
  // kFailedPrecondition, of a step that is not taken: what has its name holds more than a damaged
  // checkpoint.
  static absl::Status CheckIsNotForeign(const CheckpointOptions& options, int64_t step);
  // What publications need, and leave to those that follow: rank 0's, for its background.
  struct Publication {
    CheckpointOptions options;          // damaged steps that are written anew leave it
    std::set<std::string> warned = {};  // lines of retention
  };
  static absl::Status PublishTables(Publication& publication, absl::Span<const std::string> tables);
  static absl::Status WriteLatestAndRetain(Publication& publication,
                                           const CheckpointManifest& manifest);
  // Sets aside what no reader takes under the name of `step`. kAlreadyExists: a checkpoint of this
  // step or of a later one is there, which is not this run's. Errors of CheckIsNotForeign.
  static absl::Status FreeName(const CheckpointOptions& options, int64_t step);
  // The table of what was written, for good.
  std::string TakeTable();
  FileWork::Options WorkOptions() const;
  Site SiteOfSave() const { return {.name = "checkpoint", .step = step_}; }
  // The ranks that wait for "the checkpoint of step 20".
  SharedWork SharedOver(Communicator& world, Stream& stream) const;

  const CheckpointOptions options_;
  const int rank_;
  const int ranks_;
  int64_t step_ = 0;  // of the last Start
  bool started_ = false;
  absl::Status begun_;  // of Start
  // Shared with a thread that may be left with them.
  const std::shared_ptr<Job> job_;
  const std::shared_ptr<Publication> publication_;
  std::unique_ptr<FileWork> work_;  // nullptr: none was begun. Last: its thread stops first
};

}  // namespace moe

#endif  // MOE_MOE_CHECKPOINT_WRITER_H_
