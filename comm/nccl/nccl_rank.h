// What the communicators of one rank share: whether its world lives, and the thread that watches
// over their waits.
#ifndef MOE_COMM_NCCL_NCCL_RANK_H_
#define MOE_COMM_NCCL_NCCL_RANK_H_

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <absl/status/status.h>
#include <absl/time/time.h>

#include "comm/local/local_group.h"
#include "comm/nccl/nccl_api.h"
#include "kernels/base/stream.h"

namespace moe {

class NcclLane;

// Nothing of CUDA or NCCL wakes a host thread that waits for a stream in which a peer is missing.
// So host threads wait as CUDA has them wait, and one thread per rank looks after all of its lanes:
// when an operation is late or NCCL reports an error, it ends the world and aborts every lane, upon
// which NCCL's kernels leave the streams and the waits return. An abort that does not return within
// another timeout is left behind.
class NcclRank {
 public:
  // `fate`: ranks that are threads of one process share one, so that one's failure ends all waits.
  NcclRank(const NcclApi& api, int device, int world_rank, absl::Duration timeout,
           int stream_lane_blocks, std::shared_ptr<LocalFate> fate);
  ~NcclRank();
  NcclRank(const NcclRank&) = delete;
  NcclRank& operator=(const NcclRank&) = delete;

  const NcclApi& api() const { return api_; }
  int device() const { return device_; }
  int world_rank() const { return world_rank_; }
  absl::Duration timeout() const { return timeout_; }
  // Bound of the blocks of a kernel in the streams of callers.
  int stream_lane_blocks() const { return stream_lane_blocks_; }
  const std::shared_ptr<StreamGuard>& guard() const { return guard_; }

  bool dead() const { return fate_->dead(); }
  absl::Status status() const { return guard_->status(); }
  // Ends the world; what all calls return from now on.
  absl::Status Kill(absl::Status reason);

  // From Add to Remove the lane is watched. Remove waits for a look at it to end.
  void Add(NcclLane* lane);
  void Remove(NcclLane* lane);
  // A lane has an operation to watch. Cheap.
  void Wake();

 private:
  void Watch();
  bool LookAtLanes(std::unique_lock<std::mutex>& lock);

  const NcclApi& api_;
  const int device_;
  const int world_rank_;
  const absl::Duration timeout_;
  const int stream_lane_blocks_;
  const std::shared_ptr<LocalFate> fate_;
  const std::shared_ptr<StreamGuard> guard_;
  std::atomic<bool> busy_{false};  // operations may be under way
  std::mutex mu_;
  std::condition_variable changed_;
  std::vector<NcclLane*> lanes_;  // guarded by mu_
  bool stopping_ = false;         // guarded by mu_
  bool killed_ = false;           // guarded by mu_; the watch has not looked since
  std::thread thread_;            // last: starts when the above exists
};

}  // namespace moe

#endif  // MOE_COMM_NCCL_NCCL_RANK_H_
