// Transfers over one MPI communicator, polled against a deadline that progress puts off.
#ifndef MOE_COMM_MPI_MPI_LANE_H_
#define MOE_COMM_MPI_MPI_LANE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/time/time.h>

#include <mpi.h>

#include "comm/communicator.h"
#include "comm/local/local_group.h"

namespace moe {

// OK for MPI_SUCCESS, else kUnavailable: "<what>: <MPI's text>".
absl::Status FromMpi(int code, absl::string_view what);

// What is running, for matching and for the message of a wait that fails.
struct MpiCall {
  const char* operation = "";
  int tag = 0;  // one per kind of operation: different collectives never meet
  Site site;
};

// One thread at a time. Owns `comm`.
class MpiLane {
 public:
  // world_ranks[r] names rank r in messages.
  MpiLane(MPI_Comm comm, std::vector<int> world_ranks, absl::Duration timeout,
          std::shared_ptr<LocalFate> fate);
  ~MpiLane();
  MpiLane(const MpiLane&) = delete;
  MpiLane& operator=(const MpiLane&) = delete;

  MPI_Comm comm() const { return comm_; }
  int rank() const { return rank_; }
  int size() const { return static_cast<int>(world_ranks_.size()); }
  const std::vector<int>& world_ranks() const { return world_ranks_; }
  // The hosts of all ranks of the world, for messages; nullptr: not known yet.
  using HostNames = std::shared_ptr<const std::vector<std::string>>;
  const HostNames& host_names() const { return host_names_; }
  void set_host_names(HostNames names) { host_names_ = std::move(names); }
  absl::Duration timeout() const { return timeout_; }
  int64_t lingered_ns() const { return lingered_ns_; }  // Communicator::lingered_ns
  // The world of this process, which its groups share: the first reason to end it wins.
  const std::shared_ptr<LocalFate>& fate() const { return fate_; }
  // Ends the world; returns what all calls return from now on.
  absl::Status Kill(absl::Status reason);

  // Begin, then any number of Send and Receive (0 bytes are sent too), then Finish, which returns
  // when all are done. Sizes that disagree are kInvalidArgument there; errors end the world.
  void Begin(const MpiCall& call);
  void Send(int peer, const void* data, int64_t bytes);
  void Receive(int peer, void* data, int64_t bytes);
  absl::Status Finish();

  // Begin .. Finish with nothing but one operation of the MPI library: `start(&request)`.
  template <typename Start>
  absl::Status Run(const MpiCall& call, Start start) {
    if (fate_->dead()) return status();
    Begin(call);
    MPI_Request request = MPI_REQUEST_NULL;
    const int code = start(&request);
    Started(code, {.peer = -1, .total = 0, .begin = 0, .bytes = 0, .receives = false}, request);
    return Finish();
  }

  // Returns when every rank has called it.
  absl::Status Meet(const MpiCall& call);

  // Shows `mine` [bytes] to all ranks: all [R * bytes], in rank order. Small parts arrive in memory
  // of the lane's own: after a failure, `all` may be on a stack that is gone when a message
  // arrives.
  absl::Status Gather(const MpiCall& call, const void* mine, void* all, int64_t bytes);

 private:
  absl::Status status() const { return fate_->StatusOf(world_ranks_[rank_]); }

  // A piece of what one Send or Receive moves.
  struct Transfer {
    int peer;              // -1: an operation of the library
    int64_t total, begin;  // bytes of the whole transfer; where in it the piece begins
    int64_t bytes;
    bool receives;
  };

  // Calls start(begin, bytes, &request) for every piece of `total` bytes.
  template <typename Start>
  void StartPieces(int peer, int64_t total, bool receives, Start start);

  void Started(int code, const Transfer& transfer, MPI_Request request);
  absl::Status Poll();
  absl::Status Test(size_t i, int* done);
  // Tests requests from `first` on; whether one of them has ended since they were last tested.
  absl::StatusOr<bool> AnyEnded(size_t first);
  absl::Status Disagree(const Transfer& transfer, absl::string_view sent) const;
  absl::Status Late(size_t first, absl::Duration waited) const;
  void LeaveRequests();

  const MPI_Comm comm_;
  const std::vector<int> world_ranks_;
  const absl::Duration timeout_;
  const std::shared_ptr<LocalFate> fate_;
  int rank_ = 0;
  HostNames host_names_;

  // The call between Begin and Finish; entry i of both vectors is one transfer.
  MpiCall call_;
  absl::Status started_;  // first error of starting
  std::vector<Transfer> transfers_;
  std::vector<MPI_Request> requests_;
  int64_t lingered_ns_ = 0;
  std::vector<std::byte> cards_;  // where small parts of Gather arrive
};

}  // namespace moe

#endif  // MOE_COMM_MPI_MPI_LANE_H_
