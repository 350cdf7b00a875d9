// Work on files that the ranks of a run do at the same time, and wait for together.
#ifndef MOE_MOE_CHECKPOINT_SHARED_WORK_H_
#define MOE_MOE_CHECKPOINT_SHARED_WORK_H_

#include <string>

#include <absl/status/status.h>

#include "comm/communicator.h"
#include "kernels/base/stream.h"
#include "moe/io/file_work.h"

namespace moe {

// Ranks that wait for each other's work on files.
struct SharedWork {
  std::string what;  // what is waited for
  Communicator& world;
  Stream& stream;  // a CPU stream
  Site site;
};

// Returns once no rank's work is unfinished; `mine` is nullptr on ranks without work. Waits as long
// as the slowest disk takes: a waiting rank keeps signalling the others that it is alive. Every
// minute rank 0 logs that `shared.what` is waited for. Collective, blocks the host.
// kDeadlineExceeded as FileWork::Check, on the rank whose call hangs; otherwise errors of the
// communicator.
absl::Status AwaitAllRanks(FileWork* mine, const SharedWork& shared);

// FileWork::Start on ranks whose `work` is not empty, then AwaitAllRanks. result = the status of
// this rank's work; OK where it is empty.
absl::Status RunOnRanks(FileWork::Options options, FileWork::Work work, const SharedWork& shared,
                        absl::Status& result);

}  // namespace moe

#endif  // MOE_MOE_CHECKPOINT_SHARED_WORK_H_
