// Writes checkpoints (docs/checkpoint.md): each rank writes its shards in the background; then rank
// 0 writes the manifest, and one rename makes all of it a checkpoint.
#ifndef MOE_MOE_CHECKPOINT_WRITER_H_
#define MOE_MOE_CHECKPOINT_WRITER_H_

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/time/time.h>
#include <absl/types/span.h>

#include "comm/communicator.h"
#include "kernels/base/buffer.h"
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
  std::string folder = {};  // parent of the step folders: "run/checkpoints"; the same on all ranks
  int keep = 3;             // newest checkpoints that stay, >= 1
  int64_t keep_every = 0;   // steps that are a multiple of it stay, too; 0: none
  // Step at which the run begins: 0, or that of the checkpoint it resumes from.
  int64_t first_step = 0;
  // Steps of newer checkpoints whose data a reader found to be damaged. They are no reason to
  // refuse the run, and are set aside when the run reaches their steps.
  std::vector<int64_t> damaged_steps = {};
  // The run that holds the folder (run_folder.h), if one does. run: its identifier, the same on all
  // ranks. lock: its lock on rank 0, which must still be held when a checkpoint is renamed; shared
  // with a thread that may remain in a call that hangs.
  std::string run = {};
  std::shared_ptr<RunLock> lock = {};
  // Whether the manifest's section `hash` holds the hash of each float32 state. Parts of these
  // states are then whole row groups (unit_grid.h): all columns, cut where
  // UnitGrid::FirstRowOfGroup cuts. A state that is not finite is not published: kDataLoss without
  // a FileFault.
  bool hash_states = false;
  int64_t max_box_bytes = int64_t{64} << 20;
  int64_t max_shard_bytes = int64_t{4} << 30;   // bytes of data in a shard
  ThreadPool* threads = &ThreadPool::Serial();  // threads that copy
  // Memory of the copy of what this rank writes; nullptr: CpuMemory().
  std::shared_ptr<MemoryResource> copy_memory = {};
  absl::Duration timeout = absl::Minutes(10);  // limit for one call of `files`
  FileSystem* files = &RealFileSystem();       // must outlive every call that may hang in it
};

struct CheckpointState {
  int64_t step = 0;                  // optimiser steps taken; the same on all ranks
  CheckpointSections sections = {};  // those of rank 0 are written
};

// A part of one state of one tensor that this rank writes. Over all ranks the parts of a state tile
// the tensor.
struct StatePart {
  const CanonicalTensor* tensor = nullptr;
  const char* state = "";  // "master", "m", "v", "value", "share"
  TensorBox box = {};
  // [rows of the box, columns of the box] in host memory; null where only the shape is named.
  // float: F32; double: F64. All states of a tensor have one type.
  std::variant<MatrixView<const float>, MatrixView<const double>> data = {};
};

// Receives some parts, whose values are valid until it returns.
using VisitParts = absl::FunctionRef<absl::Status(absl::Span<const StatePart> parts)>;

enum class WriterPhase : uint8_t {
  kIdle,     // nothing to publish
  kWriting,  // the background thread is busy
  kWritten,  // ready for Publish
  kFailed,   // status() holds the reason; Publish cleans up
};

// One per rank; used by one thread. Its background work accesses files, never a communicator. All
// calls to `files` are made there, so that a disk that hangs blocks no rank.
class CheckpointWriter {
 public:
  // Creates the folder. Rank 0 removes leftovers of stopped runs: `.tmp-*`, `.trash-*`; it warns of
  // leftovers that cannot be removed or that hold foreign files. To be called on all ranks, with a
  // collective before the first Start. kInvalidArgument: options, or a `latest` that is no file.
  // kAlreadyExists: the folder holds a readable checkpoint newer than `first_step`, which this run
  // would overwrite (named). kFailedPrecondition: the name of such a step holds what no run writes
  // (named). kUnavailable, kPermissionDenied: the system refuses. kDeadlineExceeded as
  // CheckProgress.
  static absl::StatusOr<std::unique_ptr<CheckpointWriter>> Create(const CheckpointOptions& options,
                                                                  int rank, int ranks);
  // Abandons a write that is under way; a call that has not returned half a second later is left to
  // its thread.
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Copies the parts into one buffer, which is kept for the next Start, and returns; the parts may
  // then change. Shards are written in the background. kFailedPrecondition unless the phase is
  // kIdle. With these errors the phase becomes kFailed: kInvalidArgument, a part that does not fit
  // its tensor; kResourceExhausted, no memory, no thread. Later errors are in status(). Cost: a
  // copy of the parts.
  absl::Status Start(const CheckpointState& state, absl::Span<const StatePart> mine) {
    return Start(state, mine, [mine](VisitParts visit) { return visit(mine); });
  }
  // The same for parts that are not in memory all at once: `shapes` names all, and `read` visits
  // them in that order with their values. Its errors become the phase kFailed, too.
  using ReadParts = absl::FunctionRef<absl::Status(VisitParts visit)>;
  absl::Status Start(const CheckpointState& state, absl::Span<const StatePart> shapes,
                     ReadParts read);

  WriterPhase phase() const;
  // Status of the write since the last Start: OK while it runs. kUnavailable, kPermissionDenied:
  // names path and cause. kInvalidArgument: names of tensors or states, or sections that a manifest
  // does not accept.
  absl::Status status() const;
  // To be called by a caller that does other work while the phase is kWriting: kDeadlineExceeded
  // names rank, host and the call to the file system that has not returned within
  // CheckpointOptions::timeout. Logs such a line every minute before that.
  absl::Status CheckProgress();

  // Makes the shards that all ranks wrote since Start a checkpoint, or, if any rank failed, removes
  // them. Waits for shards that are still being written, however long: ranks keep signalling each
  // other that they are alive. The phase is kIdle afterwards. Collective, blocks the host; `stream`
  // is a CPU stream. kDeadlineExceeded, on the rank whose call hangs, as CheckProgress; otherwise
  // the same status on all ranks: OK, and the checkpoint is on the disk; that of the first rank
  // that failed, "rank 3: ..."; kFailedPrecondition, a rank without a Start, a link in place of a
  // path to be written, or content under the checkpoint's name that no run writes;
  // kInvalidArgument, parts that do not tile their tensors or ranks at different steps; kDataLoss,
  // rank 0 cannot read what all have written, for example where ranks see several folders;
  // kUnavailable, another run has taken the lock; kAlreadyExists, a readable checkpoint of this
  // step or a later one exists. Failures after the checkpoint is on the disk (`latest`, removal of
  // old checkpoints) are only warnings. All these errors except that deadline and the
  // communicator's own carry FileFault::kWrite (moe/io/file.h). Cost on the wire: the tables of
  // boxes, about 100 bytes a box.
  absl::Status Publish(Communicator& world, Stream& stream);

 private:
  struct Job;  // what is written, and its source
  CheckpointWriter(const CheckpointOptions& options, int rank, int ranks);

  // Create's work on the disk.
  static absl::Status Prepare(const CheckpointOptions& options, int rank);
  // Whether the folder of a step holds a checkpoint that must not be replaced. An error of the
  // system leaves that unknown.
  static absl::StatusOr<bool> IsTaken(const CheckpointOptions& options, int64_t step);
  // For a step that is not taken: kFailedPrecondition if its name holds more than a damaged
  // checkpoint.
  static absl::Status CheckIsNotForeign(const CheckpointOptions& options, int64_t step);
  // State that publications share: options and warnings of rank 0, used in its background.
  struct Publication {
    CheckpointOptions options;          // without damaged steps that were written anew
    std::set<std::string> warned = {};  // warnings of retention already given
  };
  static absl::Status PublishTables(Publication& publication, absl::Span<const std::string> tables);
  static absl::Status WriteLatestAndRetain(Publication& publication,
                                           const CheckpointManifest& manifest);
  // Sets aside a folder under the name of `step` that no reader accepts. kAlreadyExists: a
  // checkpoint of this step or a later one exists and is not this run's. Errors of
  // CheckIsNotForeign.
  static absl::Status FreeName(const CheckpointOptions& options, int64_t step);
  // Moves the table of what was written out.
  std::string TakeTable();
  FileWork::Options WorkOptions() const;
  Site SiteOfSave() const { return {.name = "checkpoint", .step = step_}; }
  // The ranks that wait for "the checkpoint of step 20".
  SharedWork SharedOver(Communicator& world, Stream& stream) const;

  const CheckpointOptions options_;
  const int rank_;
  const int ranks_;
  int64_t step_ = 0;  // step of the last Start
  bool started_ = false;
  absl::Status begun_;  // status of Start
  // Shared with a thread that may remain in a call that hangs.
  const std::shared_ptr<Job> job_;
  const std::shared_ptr<Publication> publication_;
  std::unique_ptr<FileWork> work_;  // nullptr: no work was started. Last: its thread stops first
};

}  // namespace moe

#endif  // MOE_MOE_CHECKPOINT_WRITER_H_
