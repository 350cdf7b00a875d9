// What one rank of a group owns under MPI, and the reductions over it.
#ifndef MOE_COMM_MPI_MPI_GROUP_H_
#define MOE_COMM_MPI_MPI_GROUP_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/time/time.h>
#include <absl/types/span.h>

#include <mpi.h>

#include "comm/communicator.h"
#include "comm/mpi/mpi_lane.h"
#include "kernels/base/buffer.h"

namespace moe {

enum MpiTag : int {
  kMeet = 1,
  kSplit,
  kRollCall,
  kAllToAllV,
  kAllGather,
  kReduce,
  kSendRecv,
  kPeerMemory
};

// Elements (or bytes) of one call of the MPI library: it shows no progress before it ends, so that
// each of them has the whole deadline.
inline constexpr int64_t kMpiLibraryCount = int64_t{1} << 23;

// Shared with the tasks that are still in a stream. All functions are collective, block, and run on
// the stream's thread.
class MpiGroup {
 public:
  MpiGroup(MPI_Comm stream_comm, MPI_Comm host_comm, const std::vector<int>& world_ranks,
           absl::Duration timeout, std::shared_ptr<LocalFate> fate)
      : stream(stream_comm, world_ranks, timeout, fate),
        host(host_comm, world_ranks, timeout, std::move(fate)),
        hosts(world_ranks.size()) {}

  // In a dead world messages may still arrive in the scratch: it is not given to anybody else.
  ~MpiGroup() {
    if (stream.fate()->dead()) (void)new Buffer(std::move(scratch_));
  }
  MpiGroup(const MpiGroup&) = delete;
  MpiGroup& operator=(const MpiGroup&) = delete;

  // Communicator::DoCollective.
  absl::Status Collective(const CollectiveCall& call);

  void SetHostNames(const MpiLane::HostNames& names) {
    stream.set_host_names(names);
    host.set_host_names(names);
  }

  MpiLane stream;  // collectives: used by the stream's thread
  MpiLane host;    // Barrier, Split: used by the host thread, maybe at the same time

  // HostId() of every rank.
  std::vector<uint64_t> hosts;
  bool one_host() const {
    return hosts.front() != 0 && std::count(hosts.begin(), hosts.end(), hosts.front()) ==
                                     static_cast<int64_t>(hosts.size());
  }

 private:
  // MPI does not compare arguments: ranks show each other theirs, which also tells who is missing
  // and lets the library's operation start with everyone there. kInvalidArgument if they differ.
  absl::Status RollCall(const CollectiveCall& call);

  // out[i] = parts[own rank][i] of every rank, summed in rank order: parts[r] (counts[r] elements)
  // goes to rank r, a segment at a time. `out` may be parts[own rank].
  absl::Status SumParts(const CollectiveCall& call, const std::byte* const* parts,
                        absl::Span<const int64_t> counts, std::byte* out);

  // SumParts, then everyone gets every part: rank order, 2*S*(R-1)/R bytes.
  absl::Status AllReduceInRankOrder(const CollectiveCall& call);
  absl::Status ReduceScatter(const CollectiveCall& call);
  absl::Status AllToAllV(const CollectiveCall& call);
  // A roll call, then MPI_Iallreduce (no 16-bit types) or MPI_Ibcast.
  absl::Status ByLibrary(const CollectiveCall& call);

  // Elements [PartBegin(r), PartBegin(r + 1)) of `count` are the part that rank r sums.
  int64_t PartBegin(int64_t count, int r) const {
    const int ranks = stream.size();
    return count / ranks * r + std::min<int64_t>(count % ranks, r);
  }

  Buffer scratch_;  // one segment from each rank
};

// Communicator::AllocatePeerBuffer: collective over `host`, whose ranks are processes of one host.
// Each makes a file without a name in memory, which the others map by way of /proc, so that nothing
// is left behind by a process that dies.
// Errors, on all ranks alike: kUnimplemented, naming who cannot map whose memory (containers with
// process ids of their own, other users); kResourceExhausted; those of `host`.
absl::StatusOr<std::shared_ptr<PeerBuffer>> AllocateMpiPeerBuffer(MpiLane& host, int64_t bytes,
                                                                  const Site& site);

}  // namespace moe

#endif  // MOE_COMM_MPI_MPI_GROUP_H_
