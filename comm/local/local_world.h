// Ranks as threads of one process: the default backend, nothing to install.
#ifndef MOE_COMM_LOCAL_LOCAL_WORLD_H_
#define MOE_COMM_LOCAL_LOCAL_WORLD_H_

#include <memory>
#include <vector>

#include <absl/time/time.h>

#include "comm/communicator.h"

namespace moe {

class LocalFate;

struct LocalWorldOptions {
  int ranks = 1;
  absl::Duration timeout = absl::Seconds(60);  // kDeadlineExceeded when a peer is later than this
  // For whoever starts the ranks: ends the world from outside and says who ended it
  // (comm/local/local_group.h). nullptr: the world's own.
  std::shared_ptr<LocalFate> fate = nullptr;
};

// One communicator per rank; give each to its own thread. Data moves straight from the sender's
// buffer to the receiver's, one copy. What they share lives until the last of them and of their
// enqueued work is gone. ranks >= 1.
std::vector<std::unique_ptr<Communicator>> MakeLocalWorld(const LocalWorldOptions& options);

}  // namespace moe

#endif  // MOE_COMM_LOCAL_LOCAL_WORLD_H_
