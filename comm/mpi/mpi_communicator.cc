#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "comm/hosts.h"
#include "comm/mpi/mpi_group.h"
#include "comm/mpi/mpi_lane.h"
#include "comm/mpi/mpi_world.h"
#include "comm/patience.h"
#include "comm/wait_report.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

class MpiCommunicator final : public Communicator {
 public:
  explicit MpiCommunicator(std::shared_ptr<MpiGroup> group) : group_(std::move(group)) {}

  int rank() const override { return group_->stream.rank(); }
  int size() const override { return group_->stream.size(); }
  absl::string_view backend() const override { return "mpi"; }
  absl::Duration timeout() const override { return group_->stream.timeout(); }
  int64_t lingered_ns() const override { return group_->stream.lingered_ns(); }
  int world_rank(int r) const override { return group_->host.world_ranks()[r]; }
  bool has_peer_memory(DeviceKind kind) const override {
    return kind == DeviceKind::kCpu && group_->one_host();
  }
  void Abort(absl::Status reason) override {
    (void)group_->host.Kill(absl::AbortedError(absl::StrCat(
        "rank ", group_->host.world_ranks()[rank()], " aborted: ", reason.ToString())));
  }

 protected:
  absl::Status DoCollective(CollectiveCall call, Stream& stream) override;
  absl::Status DoSendRecv(SendRecvOps ops, Stream& stream, const Site& site) override;
  absl::Status DoFence(Stream& stream, const Site& site) override;
  absl::Status DoBarrier() override { return group_->host.Meet({"Barrier", kMeet, {}}); }
  absl::StatusOr<std::unique_ptr<Communicator>> DoSplit(int color, int key) override;
  absl::StatusOr<std::shared_ptr<PeerBuffer>> DoAllocatePeerBuffer(int64_t bytes,
                                                                   MemoryResource& memory,
                                                                   const Site& site) override;

 private:
  const std::shared_ptr<MpiGroup> group_;
};

absl::Status MpiCommunicator::DoCollective(CollectiveCall call, Stream& stream) {
  return stream.Enqueue(
      [group = group_, call = std::move(call)] { return group->Collective(call); });
}

absl::Status MpiCommunicator::DoSendRecv(SendRecvOps ops, Stream& stream, const Site& site) {
  return stream.Enqueue([group = group_, site, ops = std::move(ops)] {
    group->stream.Begin({"SendRecv", kSendRecv, site});
    for (const SendRecvOp& op : ops) {
      if (op.recv != nullptr) group->stream.Receive(op.peer, op.recv, op.bytes);
    }
    for (const SendRecvOp& op : ops) {
      if (op.send != nullptr) group->stream.Send(op.peer, op.send, op.bytes);
    }
    return group->stream.Finish();
  });
}

absl::Status MpiCommunicator::DoFence(Stream& stream, const Site& site) {
  return stream.Enqueue([group = group_, site]() -> absl::Status {
    // Peers see through their own mappings what stands before; messages tell them when.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    MOE_RETURN_IF_ERROR(group->stream.Meet({"Fence", kMeet, site}));
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return absl::OkStatus();
  });
}

absl::StatusOr<std::shared_ptr<PeerBuffer>> MpiCommunicator::DoAllocatePeerBuffer(
    int64_t bytes, MemoryResource& memory, const Site& site) {
  if (!has_peer_memory(memory.device().kind)) {
    return Communicator::DoAllocatePeerBuffer(bytes, memory, site);
  }
  return AllocateMpiPeerBuffer(group_->host, bytes, site);
}

absl::Status MakeSilent(MPI_Comm comm) {
  return FromMpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
}

absl::StatusOr<std::unique_ptr<Communicator>> MpiCommunicator::DoSplit(int color, int key) {
  MOE_ASSIGN_OR_RETURN(const CallCard mine, SplitCard(color, key));
  std::vector<CallCard> all(size());
  MpiLane& host = group_->host;
  // MPI_Comm_split has no deadline: it starts when everybody is known to be there.
  MOE_RETURN_IF_ERROR(host.Gather({"Split", kSplit, {}}, &mine, all.data(), sizeof(CallCard)));
  std::vector<int> members = MembersOf(color, all);
  std::vector<uint64_t> hosts;
  for (int& member : members) {
    hosts.push_back(group_->hosts[member]);
    member = host.world_ranks()[member];
  }
  MPI_Comm comms[2] = {MPI_COMM_NULL, MPI_COMM_NULL};
  for (MPI_Comm& comm : comms) {
    const absl::Status split = FromMpi(
        MPI_Comm_split(host.comm(), color < 0 ? MPI_UNDEFINED : color, key, &comm), "Split");
    if (!split.ok()) return host.Kill(split);
    if (color >= 0) MOE_RETURN_IF_ERROR(MakeSilent(comm));
  }
  if (color < 0) return nullptr;
  auto group = std::make_shared<MpiGroup>(comms[0], comms[1], members, timeout(), host.fate());
  group->hosts = std::move(hosts);
  group->SetHostNames(host.host_names());
  return std::make_unique<MpiCommunicator>(std::move(group));
}

// All ranks of the caller's communicator are there, or kDeadlineExceeded: what follows
// (MPI_Comm_dup) has no deadline of its own.
absl::Status MeetOn(MPI_Comm comm, int rank, absl::Duration timeout) {
  MPI_Request request = MPI_REQUEST_NULL;
  MOE_RETURN_IF_ERROR(FromMpi(MPI_Ibarrier(comm, &request), "MPI_Ibarrier"));
  Patience patience(timeout);
  while (true) {
    int done = 0;
    MOE_RETURN_IF_ERROR(FromMpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Ibarrier"));
    if (done != 0) return absl::OkStatus();
    if (patience.IsOver(false)) {
      return absl::DeadlineExceededError(absl::StrCat(DescribePlace(rank, "MakeMpiWorld", {}),
                                                      ": not all ranks came in ",
                                                      absl::FormatDuration(timeout)));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

// kFailedPrecondition unless streams may call MPI now.
absl::Status CheckMpiRuns() {
  const auto refused = [](const char* what) {
    return absl::FailedPreconditionError(absl::StrCat("MakeMpiWorld: MPI ", what));
  };
  int initialized = 0, finalized = 0, level = MPI_THREAD_SINGLE;
  MOE_RETURN_IF_ERROR(FromMpi(MPI_Initialized(&initialized), "MPI_Initialized"));
  MOE_RETURN_IF_ERROR(FromMpi(MPI_Finalized(&finalized), "MPI_Finalized"));
  if (initialized == 0) return refused("is not initialised, expected MPI_Init_thread before");
  if (finalized != 0) return refused("has ended, expected a world before MPI_Finalize");
  MOE_RETURN_IF_ERROR(FromMpi(MPI_Query_thread(&level), "MPI_Query_thread"));
  if (level >= MPI_THREAD_MULTIPLE) return absl::OkStatus();
  return refused("was not initialised with MPI_THREAD_MULTIPLE, which streams need");
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> MakeMpiWorld(const MpiWorldOptions& options) {
  MOE_RETURN_IF_ERROR(CheckMpiRuns());
  const MPI_Comm comm = MPI_Comm_f2c(static_cast<MPI_Fint>(options.comm));
  if (comm == MPI_COMM_NULL) {
    return absl::InvalidArgumentError(
        "MakeMpiWorld: the communicator is MPI_COMM_NULL, expected one with this rank");
  }
  int rank = 0;
  int size = 1;
  MOE_RETURN_IF_ERROR(FromMpi(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank"));
  MOE_RETURN_IF_ERROR(FromMpi(MPI_Comm_size(comm, &size), "MPI_Comm_size"));
  MOE_RETURN_IF_ERROR(MeetOn(comm, rank, options.start_timeout.value_or(options.timeout)));
  MPI_Comm own[2] = {MPI_COMM_NULL, MPI_COMM_NULL};
  for (MPI_Comm& duplicate : own) {
    MOE_RETURN_IF_ERROR(FromMpi(MPI_Comm_dup(comm, &duplicate), "MPI_Comm_dup"));
    MOE_RETURN_IF_ERROR(MakeSilent(duplicate));
  }
  std::vector<int> world_ranks(size);
  for (int r = 0; r < size; ++r) world_ranks[r] = r;
  auto group = std::make_shared<MpiGroup>(own[0], own[1], world_ranks, options.timeout,
                                          std::make_shared<LocalFate>());
  struct Host {
    uint64_t id = 0;
    char name[72] = {};  // 64 characters at most
  };
  Host mine = {.id = HostId()};
  std::strncpy(mine.name, HostName().c_str(), sizeof(mine.name) - 1);
  std::vector<Host> all(size);
  MOE_RETURN_IF_ERROR(
      group->host.Gather({"MakeMpiWorld", kPeerMemory, {}}, &mine, all.data(), sizeof(Host)));
  auto names = std::make_shared<std::vector<std::string>>();
  for (int r = 0; r < size; ++r) {
    group->hosts[r] = all[r].id;
    names->emplace_back(all[r].name);
  }
  group->SetHostNames(std::move(names));
  return std::make_unique<MpiCommunicator>(std::move(group));
}

}  // namespace moe
