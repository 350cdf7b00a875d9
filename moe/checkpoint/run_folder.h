// The folder of a run's checkpoints, as the ranks of one run hold it together.
#ifndef MOE_MOE_CHECKPOINT_RUN_FOLDER_H_
#define MOE_MOE_CHECKPOINT_RUN_FOLDER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/time/time.h>

#include "comm/communicator.h"
#include "kernels/base/stream.h"
#include "moe/checkpoint/run_lock.h"
#include "moe/io/file_system.h"
#include "moe/io/file_work.h"

namespace moe {

struct RunFolderOptions {
  std::string folder;                       // parent of the step folders, as this rank spells it
  absl::Duration beat = absl::Seconds(10);  // interval between touches of the lock
  // Longest time until a host sees what another host has written.
  absl::Duration sight = absl::Seconds(5);
  absl::Duration timeout = absl::Minutes(10);  // limit for one call of `files`
  FileSystem* files = &RealFileSystem();       // must outlive every call that may hang in it
};

// One per rank; rank 0's holds the lock. Files are accessed in the background: kDeadlineExceeded,
// on the rank whose call to the file system hangs, names the call.
class RunFolder {
 public:
  // Creates the folder, takes its lock, and checks that all ranks see one folder, by a file that
  // rank 0 writes there, and can write to it. Waits while a holder of the lock that may have ended
  // is watched. Collective, blocks the host; `stream` is a CPU stream. Returns the same status on
  // all ranks: kInvalidArgument, another run holds the folder, or ranks (named, with their hosts)
  // do not see it; kUnavailable, kPermissionDenied with FileFault::kWrite: a rank cannot write
  // there.
  static absl::StatusOr<std::unique_ptr<RunFolder>> Open(const RunFolderOptions& options,
                                                         Communicator& world, Stream& stream);

  // Checks that there is room for `count` more checkpoints, of which this rank writes `my_bytes`
  // each. Collective, blocks the host. kUnavailable with FileFault::kWrite, on all ranks, if there
  // is not.
  absl::Status CheckRoom(int64_t my_bytes, int64_t count, Communicator& world, Stream& stream);

  // Identifier of this run, the same on all ranks: 16 hexadecimal digits.
  const std::string& run() const { return run_; }
  // Lock of rank 0; nullptr on other ranks.
  const std::shared_ptr<RunLock>& lock() const { return lock_; }

 private:
  RunFolder(RunFolderOptions options, int rank) : options_(std::move(options)), rank_(rank) {}

  absl::Status Take(Communicator& world, Stream& stream);
  absl::Status ShareRun(Communicator& world, Stream& stream);
  absl::Status Prove(Communicator& world, Stream& stream);
  std::string ProbePath(int rank) const;
  // RunOnRanks (shared_work.h).
  absl::Status Together(FileWork::Work work, Communicator& world, Stream& stream,
                        absl::Status& result) const;

  const RunFolderOptions options_;
  const int rank_;
  std::string run_;
  std::shared_ptr<RunLock> lock_;
};

// Largest number of checkpoints that a run with `saves` more saves needs room for at once, beside
// the `there` in its folder: the new one is written before the oldest is removed.
int64_t CheckpointsToCome(int64_t there, int64_t saves, int64_t keep);

}  // namespace moe

#endif  // MOE_MOE_CHECKPOINT_RUN_FOLDER_H_
