// Work on files that the ranks of a run do at the same time, and wait for together.
#ifndef MOE_MOE_CHECKPOINT_SHARED_WORK_H_
#define MOE_MOE_CHECKPOINT_SHARED_WORK_H_

#include <string>

#include <absl/status/status.h>

#include "comm/communicator.h"
#include "kernels/base/stream.h"
#include "moe/io/file_work.h"

namespace moe {

// Ranks that wait for each other's files.
struct SharedWork {
  std::string what;  // that is waited for
  Communicator& world;
  Stream& stream;  // of the CPU
  Site site;
};

// Returns once no rank has work that has not ended; nullptr: there is none here. However long the
// slowest disk takes: a rank that waits tells the others that it is there. Every minute rank 0 logs
// that `shared.what` is waited for. Collective, blocks the host. kDeadlineExceeded as
// FileWork::Check, on the rank whose call hangs; else errors of the communicator.
absl::Status AwaitAllRanks(FileWork* mine, const SharedWork& shared);

// FileWork::Start on ranks whose `work` is not empty, then AwaitAllRanks. result = the status of
// the work here; OK: there was none.
absl::Status RunOnRanks(FileWork::Options options, FileWork::Work work, const SharedWork& shared,
                        absl::Status& result);

}  // namespace moe

#endif  // MOE_MOE_CHECKPOINT_SHARED_WORK_H_
