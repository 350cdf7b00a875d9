// One NCCL communicator, whose every wait has a deadline.
#ifndef MOE_COMM_NCCL_NCCL_LANE_H_
#define MOE_COMM_NCCL_NCCL_LANE_H_

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/time/time.h>

#include "comm/communicator.h"
#include "comm/nccl/nccl_api.h"
#include "comm/nccl/nccl_rank.h"
#include "comm/patience.h"
#include "kernels/base/stream.h"

namespace moe {

// What is under way, for the message of a wait that fails.
struct NcclCall {
  std::string operation;  // owned: the operation outlives the call
  Site site;
  std::vector<int> peers = {};  // ranks waited for; empty: NCCL reports none, so all others
  std::optional<absl::Duration> timeout = {};  // in place of the rank's
};

// NCCL's communicator, which ends in an abort on a thread of its own if it must. That thread owns
// the handle, too, because ncclCommAbort may hang, and the lane does not wait for that.
class NcclHandle : public std::enable_shared_from_this<NcclHandle> {
 public:
  // `name`: for the log.
  NcclHandle(const NcclApi& of_library, int of_device, ncclComm_t made_by_split, std::string name)
      : comm(made_by_split), api_(of_library), device_(of_device), name_(std::move(name)) {}

  // Begins to end what is under way, unless that has begun or nothing has joined.
  void BeginAbort();
  // Waits for the end of an abort that has begun, at most `timeout` from its begin. What takes
  // longer is left behind, with a line in the log.
  void AwaitAbort(absl::Duration timeout);

  std::mutex mu;    // whoever holds it may be inside NCCL
  ncclComm_t comm;  // guarded by mu; nullptr: an abort has begun
  // Where NCCL puts a communicator that it makes, if need be long after the call, and when it
  // fails, too: until `comm` has been aborted. guarded by mu but for NCCL's own write.
  ncclComm_t made = nullptr;

 private:
  void Abort(ncclComm_t aborted);

  const NcclApi& api_;
  const int device_;
  const std::string name_;
  std::condition_variable changed_;
  std::chrono::steady_clock::time_point begun_;  // guarded by mu
  bool ended_ = true;                            // guarded by mu; no abort is under way
  bool left_ = false;                            // guarded by mu; nobody waits for the end any more
};

// Used by one host thread at a time, apart from Look and handle(). Created non-blocking: NCCL's
// calls return at once, and their work goes into the stream when the lane has heard that they have
// ended. A lock keeps every other thread out of NCCL meanwhile, the one that aborts above all.
class NcclLane {
 public:
  using Start = absl::FunctionRef<ncclResult_t(ncclComm_t comm, cudaStream_t stream)>;

  // Collective over the ranks that have `id`. `most_blocks`: bound of the blocks of a kernel.
  // kDeadlineExceeded when one of them does not come.
  static absl::StatusOr<std::unique_ptr<NcclLane>> Join(std::shared_ptr<NcclRank> rank,
                                                        const ncclUniqueId& id,
                                                        const NcclCall& call,
                                                        std::vector<int> world_ranks, int own,
                                                        int most_blocks);
  ~NcclLane();
  NcclLane(const NcclLane&) = delete;
  NcclLane& operator=(const NcclLane&) = delete;

  NcclRank& rank() const { return *rank_; }
  const std::vector<int>& world_ranks() const { return world_ranks_; }
  int own() const { return own_; }  // rank in this lane
  int size() const { return static_cast<int>(world_ranks_.size()); }

  // Collective, with nothing under way. Ranks with equal color >= 0 form a lane; color -1 returns
  // nullptr. `members`: world ranks of the lane; this one is the lane's rank `own`. `most_blocks`
  // as for Join.
  absl::StatusOr<std::unique_ptr<NcclLane>> Split(const NcclCall& call, int color,
                                                  std::vector<int> members, int own,
                                                  int most_blocks);

  // `start` makes NCCL calls that go into `stream`, of this rank's device. Returns when they are in
  // it. From then on the lane's thread watches them, and an error is the stream's.
  absl::Status Launch(const NcclCall& call, Stream& stream, Start start);

  // Called by the watching thread. An error if something is late or NCCL reports one; sets *any
  // while something is under way.
  absl::Status Look(bool* any);
  // After its abort the lane is of no use.
  const std::shared_ptr<NcclHandle>& handle() const { return handle_; }

 private:
  struct Operation {
    NcclCall call;
    cudaEvent_t begin = nullptr, end = nullptr;
    std::optional<Patience> patience;  // since it was seen to have begun
  };

  NcclLane(std::shared_ptr<NcclRank> rank, ncclComm_t comm, std::vector<int> world_ranks, int own);

  // Waits until NCCL has released everything; returns whether it did so in time. If not, the
  // world lives on without this lane.
  bool Finalize();
  absl::StatusOr<Operation> Begin(const NcclCall& call, cudaStream_t stream);
  absl::Status Post(const NcclCall& call, cudaStream_t stream, Start start);
  absl::Status WaitUntilPosted(const NcclCall& call);
  absl::Status Fail(const NcclCall& call, ncclResult_t result);
  absl::Status Late(const NcclCall& call, absl::Duration waited) const;
  std::string Place(const NcclCall& call) const;
  absl::Duration TimeoutOf(const NcclCall& call) const {
    return call.timeout.value_or(rank_->timeout()) + call.site.grace;
  }
  absl::Status Drop(bool* any);
  void Abort();

  const std::shared_ptr<NcclRank> rank_;
  const std::vector<int> world_ranks_;
  const int own_;
  const std::shared_ptr<NcclHandle> handle_;
  std::mutex& mu_;                    // the handle's
  std::deque<Operation> operations_;  // guarded by mu_; oldest first
  std::vector<cudaEvent_t> idle_;     // guarded by mu_; events to use again
};

}  // namespace moe

#endif  // MOE_COMM_NCCL_NCCL_LANE_H_
