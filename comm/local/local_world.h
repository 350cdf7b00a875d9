// Ranks as threads of one process: the default backend, nothing to install.
#ifndef MOE_COMM_LOCAL_LOCAL_WORLD_H_
#define MOE_COMM_LOCAL_LOCAL_WORLD_H_

#include <memory>
#include <vector>

#include <absl/status/status.h>
#include <absl/time/time.h>

#include "comm/communicator.h"

namespace moe {

class LocalFate;

struct LocalWorldOptions {
  int ranks = 1;
  absl::Duration timeout = absl::Seconds(60);  // kDeadlineExceeded when a peer is later than this
};

// One communicator per rank; give each to its own thread. Data moves straight from the sender's
// buffer to the receiver's, one copy. What they share lives until the last of them and of their
// enqueued work is gone. ranks >= 1.
std::vector<std::unique_ptr<Communicator>> MakeLocalWorld(const LocalWorldOptions& options);

// The same, for whoever starts the ranks: can end the world from outside and ask who ended it.
struct WatchedLocalWorld {
  std::vector<std::unique_ptr<Communicator>> ranks;
  std::shared_ptr<LocalFate> fate;  // comm/local/local_group.h
};
WatchedLocalWorld MakeWatchedLocalWorld(const LocalWorldOptions& options);

}  // namespace moe

#endif  // MOE_COMM_LOCAL_LOCAL_WORLD_H_
