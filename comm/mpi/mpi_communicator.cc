#include "comm/mpi/mpi_communicator.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <absl/container/inlined_vector.h>
#include <absl/strings/str_cat.h>

#include "comm/copy.h"
#include "comm/mpi/mpi_lane.h"
#include "comm/mpi/mpi_status.h"
#include "comm/reduce.h"
#include "comm/wait_report.h"
#include "kernels/base/buffer.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

using Bytes = absl::InlinedVector<int64_t, 16>;

enum Tag : int { kMeet = 1, kSplit, kRollCall, kAllToAllV, kAllGather, kReduce, kSendRecv };

// Received parts of a reduction are summed while they are still in the cache, and the scratch stays
// small: R segments.
constexpr int64_t kSegmentBytes = int64_t{512} << 10;
// Elements of one call of the MPI library, whose counts are int.
constexpr int64_t kLibraryCount = int64_t{1} << 28;

std::byte* AsBytes(void* p) {
  return static_cast<std::byte*>(p);
}
const std::byte* AsBytes(const void* p) {
  return static_cast<const std::byte*>(p);
}

MPI_Datatype ToMpi(DType type) {
  switch (type) {
    case DType::kFloat32:
      return MPI_FLOAT;
    case DType::kFloat64:
      return MPI_DOUBLE;
    case DType::kInt32:
      return MPI_INT32_T;
    case DType::kInt64:
      return MPI_INT64_T;
    default:
      return MPI_DATATYPE_NULL;
  }
}

// What one rank of a group owns; shared with the tasks that are still in a stream.
struct MpiGroup {
  MpiGroup(MPI_Comm stream_comm, MPI_Comm host_comm, const std::vector<int>& world_ranks,
           absl::Duration timeout, std::shared_ptr<MpiFate> fate)
      : stream(stream_comm, world_ranks, timeout, fate),
        host(host_comm, world_ranks, timeout, std::move(fate)) {}

  // Elements [begin, end) of `count`: the part that rank r sums.
  int64_t PartBegin(int64_t count, int r) const {
    const int ranks = stream.size();
    return count / ranks * r + std::min<int64_t>(count % ranks, r);
  }

  absl::Status RollCall(const char* operation, const CommPhase& phase, int64_t count, DType type,
                        ReduceOp op, int root);
  absl::Status SumParts(const MpiCall& call, const std::byte* const* parts,
                        absl::Span<const int64_t> counts, std::byte* out, DType type, ReduceOp op);

  MpiLane stream;  // collectives: used by the stream's thread
  MpiLane host;    // Barrier, Split: used by the host thread, maybe at the same time
  Buffer scratch;  // of the stream lane
};

// MPI does not compare arguments: ranks show each other theirs first, which also tells who is
// missing and lets the library's operation start with everyone there.
absl::Status MpiGroup::RollCall(const char* operation, const CommPhase& phase, int64_t count,
                                DType type, ReduceOp op, int root) {
  struct Card {
    char operation[12] = {};
    int32_t type, op, root;
    int64_t count;
  };
  Card mine{.type = static_cast<int32_t>(type),
            .op = static_cast<int32_t>(op),
            .root = root,
            .count = count};
  std::strncpy(mine.operation, operation, sizeof(mine.operation) - 1);
  std::vector<Card> all(stream.size());
  MOE_RETURN_IF_ERROR(
      stream.Gather({operation, kRollCall, phase}, &mine, all.data(), sizeof(Card)));
  for (int r = 0; r < stream.size(); ++r) {
    const Card& other = all[r];
    if (std::memcmp(&other, &mine, sizeof(Card)) == 0) continue;
    const auto text = [](const Card& c) {
      return absl::StrCat(c.operation, " of ", c.count, " x ", NameOf(static_cast<DType>(c.type)),
                          c.op == static_cast<int32_t>(ReduceOp::kMax) ? ", max" : "", ", root ",
                          c.root);
    };
    return stream.fate()->Kill(absl::InvalidArgumentError(absl::StrCat(
        operation, ": rank ", stream.world_ranks()[stream.rank()], " has ", text(mine), ", rank ",
        stream.world_ranks()[r], " has ", text(other), ", expected the same on all")));
  }
  return absl::OkStatus();
}

// out[i] = parts[rank][i] of every rank, summed in rank order: sends parts[p] (counts[p] elements)
// to rank p, a segment at a time.
absl::Status MpiGroup::SumParts(const MpiCall& call, const std::byte* const* parts,
                                absl::Span<const int64_t> counts, std::byte* out, DType type,
                                ReduceOp op) {
  const int ranks = stream.size();
  const int rank = stream.rank();
  const int64_t width = SizeOf(type);
  const int64_t segment = kSegmentBytes / width;
  const int64_t longest = *std::max_element(counts.begin(), counts.end());
  if (scratch.bytes() == 0) {
    MOE_ASSIGN_OR_RETURN(scratch, Buffer::Allocate(kSegmentBytes * ranks));
  }
  for (int64_t begin = 0; begin == 0 || begin < longest; begin += segment) {
    const auto length = [&](int r) {
      return std::clamp<int64_t>(counts[r] - begin, 0, segment);
    };
    absl::InlinedVector<const std::byte*, 16> inputs(ranks);
    stream.Begin(call);
    for (int i = 1; i < ranks; ++i) {
      const int r = (rank + i) % ranks;
      std::byte* const slot = scratch.data() + r * kSegmentBytes;
      inputs[r] = slot;
      stream.Receive(r, slot, length(rank) * width);
    }
    for (int i = 1; i < ranks; ++i) {
      const int r = (rank + i) % ranks;
      stream.Send(r, parts[r] + begin * width, length(r) * width);
    }
    inputs[rank] = parts[rank] + begin * width;
    MOE_RETURN_IF_ERROR(stream.Finish());
    std::byte* const output = out + begin * width;
    ReduceInOrder(inputs, absl::MakeConstSpan(&output, 1), 0, length(rank), type, op);
  }
  return absl::OkStatus();
}

absl::Status AllReduceInRankOrder(MpiGroup& group, const CommPhase& phase, std::byte* inout,
                                  int64_t count, DType type, ReduceOp op) {
  const int ranks = group.stream.size();
  const int rank = group.stream.rank();
  const int64_t width = SizeOf(type);
  absl::InlinedVector<const std::byte*, 16> parts;
  Bytes counts;
  for (int r = 0; r < ranks; ++r) {
    parts.push_back(inout + group.PartBegin(count, r) * width);
    counts.push_back(group.PartBegin(count, r + 1) - group.PartBegin(count, r));
  }
  std::byte* const own = inout + group.PartBegin(count, rank) * width;
  MOE_RETURN_IF_ERROR(
      group.SumParts({"AllReduce", kReduce, phase}, parts.data(), counts, own, type, op));
  group.stream.Begin({"AllReduce", kAllGather, phase});
  for (int i = 1; i < ranks; ++i) {
    const int r = (rank + i) % ranks;
    group.stream.Receive(r, inout + group.PartBegin(count, r) * width, counts[r] * width);
  }
  for (int i = 1; i < ranks; ++i) {
    group.stream.Send((rank + i) % ranks, own, counts[rank] * width);
  }
  return group.stream.Finish();
}

absl::Status AllReduceByLibrary(MpiGroup& group, const CommPhase& phase, std::byte* inout,
                                int64_t count, DType type, ReduceOp op) {
  MOE_RETURN_IF_ERROR(group.RollCall("AllReduce", phase, count, type, op, 0));
  for (int64_t begin = 0; begin < count; begin += kLibraryCount) {
    const auto n = static_cast<int>(std::min(count - begin, kLibraryCount));
    MOE_RETURN_IF_ERROR(group.stream.Run({"AllReduce", 0, phase}, [&](MPI_Request* request) {
      return MPI_Iallreduce(MPI_IN_PLACE, inout + begin * SizeOf(type), n, ToMpi(type),
                            op == ReduceOp::kSum ? MPI_SUM : MPI_MAX, group.stream.comm(), request);
    }));
  }
  return absl::OkStatus();
}

class MpiCommunicator final : public Communicator {
 public:
  explicit MpiCommunicator(std::shared_ptr<MpiGroup> group) : group_(std::move(group)) {}

  int rank() const override { return group_->stream.rank(); }
  int size() const override { return group_->stream.size(); }
  absl::string_view backend() const override { return "mpi"; }
  absl::Duration timeout() const override { return group_->stream.timeout(); }
  absl::Status Barrier() override { return group_->host.Meet({"Barrier", kMeet, phase()}); }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key) override;
  void Abort(absl::Status reason) override {
    (void)group_->host.fate()->Kill(absl::AbortedError(absl::StrCat(
        "rank ", group_->host.world_ranks()[rank()], " aborted: ", reason.ToString())));
  }

 protected:
  absl::Status DoAllReduce(void* inout, int64_t count, DType type, ReduceOp op,
                           Stream& stream) override;
  absl::Status DoReduceScatter(const void* send, void* recv, int64_t recv_count, DType type,
                               ReduceOp op, Stream& stream) override;
  absl::Status DoAllGather(const void* send, void* recv, int64_t send_bytes,
                           Stream& stream) override;
  absl::Status DoAllToAllV(const void* send, absl::Span<const int64_t> send_bytes, void* recv,
                           absl::Span<const int64_t> recv_bytes, Stream& stream) override;
  absl::Status DoBroadcast(void* inout, int64_t bytes, int root, Stream& stream) override;
  absl::Status DoSendRecv(std::vector<SendRecvOp> ops, Stream& stream) override;
  absl::Status DoFence(Stream& stream) override;

 private:
  const std::shared_ptr<MpiGroup> group_;
};

absl::Status MpiCommunicator::DoAllReduce(void* inout, int64_t count, DType type, ReduceOp op,
                                          Stream& stream) {
  return stream.Enqueue([group = group_, at = phase(), inout, count, type, op] {
    // MPI has no bf16, and pairs summed in bf16 would round at every step.
    return type == DType::kBFloat16
               ? AllReduceInRankOrder(*group, at, AsBytes(inout), count, type, op)
               : AllReduceByLibrary(*group, at, AsBytes(inout), count, type, op);
  });
}

absl::Status MpiCommunicator::DoReduceScatter(const void* send, void* recv, int64_t recv_count,
                                              DType type, ReduceOp op, Stream& stream) {
  return stream.Enqueue([group = group_, at = phase(), send, recv, recv_count, type, op] {
    absl::InlinedVector<const std::byte*, 16> parts;
    for (int r = 0; r < group->stream.size(); ++r) {
      parts.push_back(AsBytes(send) + r * recv_count * SizeOf(type));
    }
    const Bytes counts(parts.size(), recv_count);
    return group->SumParts({"ReduceScatter", kReduce, at}, parts.data(), counts, AsBytes(recv),
                           type, op);
  });
}

absl::Status MpiCommunicator::DoAllGather(const void* send, void* recv, int64_t send_bytes,
                                          Stream& stream) {
  return stream.Enqueue([group = group_, at = phase(), send, recv, send_bytes] {
    return group->stream.Gather({"AllGather", kAllGather, at}, send, recv, send_bytes);
  });
}

absl::Status MpiCommunicator::DoAllToAllV(const void* send, absl::Span<const int64_t> send_bytes,
                                          void* recv, absl::Span<const int64_t> recv_bytes,
                                          Stream& stream) {
  return stream.Enqueue([group = group_, at = phase(), send, recv,
                         out = Bytes(send_bytes.begin(), send_bytes.end()),
                         in = Bytes(recv_bytes.begin(), recv_bytes.end())] {
    MpiLane& lane = group->stream;
    const int rank = lane.rank();
    if (out[rank] != in[rank]) {
      return lane.fate()->Kill(absl::InvalidArgumentError(absl::StrCat(
          "AllToAllV: rank ", lane.world_ranks()[rank], " expects ", in[rank], " bytes from rank ",
          lane.world_ranks()[rank], ", which sends ", out[rank])));
    }
    lane.Begin({"AllToAllV", kAllToAllV, at});
    std::byte* to = AsBytes(recv);
    std::byte* own = nullptr;
    for (int r = 0; r < lane.size(); ++r) {
      if (r == rank) {
        own = to;
      } else {
        lane.Receive(r, to, in[r]);
      }
      to += in[r];
    }
    const std::byte* from = AsBytes(send);
    for (int r = 0; r < lane.size(); ++r) {
      if (r == rank) {
        CopyBytes(own, from, out[r]);
      } else {
        lane.Send(r, from, out[r]);
      }
      from += out[r];
    }
    return lane.Finish();
  });
}

absl::Status MpiCommunicator::DoBroadcast(void* inout, int64_t bytes, int root, Stream& stream) {
  return stream.Enqueue([group = group_, at = phase(), inout, bytes, root]() -> absl::Status {
    MOE_RETURN_IF_ERROR(
        group->RollCall("Broadcast", at, bytes, DType::kUInt8, ReduceOp::kSum, root));
    for (int64_t begin = 0; begin < bytes; begin += kLibraryCount) {
      const auto n = static_cast<int>(std::min(bytes - begin, kLibraryCount));
      MOE_RETURN_IF_ERROR(group->stream.Run({"Broadcast", 0, at}, [&](MPI_Request* request) {
        return MPI_Ibcast(AsBytes(inout) + begin, n, MPI_BYTE, root, group->stream.comm(), request);
      }));
    }
    return absl::OkStatus();
  });
}

absl::Status MpiCommunicator::DoSendRecv(std::vector<SendRecvOp> ops, Stream& stream) {
  return stream.Enqueue([group = group_, at = phase(), ops = std::move(ops)] {
    group->stream.Begin({"SendRecv", kSendRecv, at});
    for (const SendRecvOp& op : ops) {
      if (op.recv != nullptr) group->stream.Receive(op.peer, op.recv, op.bytes);
    }
    for (const SendRecvOp& op : ops) {
      if (op.send != nullptr) group->stream.Send(op.peer, op.send, op.bytes);
    }
    return group->stream.Finish();
  });
}

absl::Status MpiCommunicator::DoFence(Stream& stream) {
  return stream.Enqueue([group = group_, at = phase()] {
    return group->stream.Meet({"Fence", kMeet, at});
  });
}

absl::Status MakeSilent(MPI_Comm comm) {
  return FromMpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
}

absl::StatusOr<std::unique_ptr<Communicator>> MpiCommunicator::Split(int color, int key) {
  if (color < -1) {
    return absl::InvalidArgumentError(
        absl::StrCat("Split: color is ", color, ", expected >= 0, or -1 for no group"));
  }
  struct Wish {
    int color, key;
  };
  const Wish mine{color, key};
  std::vector<Wish> all(size());
  MpiLane& host = group_->host;
  // MPI_Comm_split has no deadline: it starts when everybody is known to be there.
  MOE_RETURN_IF_ERROR(host.Gather({"Split", kSplit, phase()}, &mine, all.data(), sizeof(Wish)));
  std::vector<int> members;
  for (int r = 0; r < size(); ++r) {
    if (all[r].color == color) members.push_back(r);
  }
  std::stable_sort(members.begin(), members.end(),
                   [&](int a, int b) { return all[a].key < all[b].key; });
  for (int& member : members) member = host.world_ranks()[member];
  MPI_Comm comms[2] = {MPI_COMM_NULL, MPI_COMM_NULL};
  for (MPI_Comm& comm : comms) {
    const absl::Status split = FromMpi(
        MPI_Comm_split(host.comm(), color < 0 ? MPI_UNDEFINED : color, key, &comm), "Split");
    if (!split.ok()) return host.fate()->Kill(split);
    if (color >= 0) MOE_RETURN_IF_ERROR(MakeSilent(comm));
  }
  if (color < 0) return nullptr;
  return std::make_unique<MpiCommunicator>(
      std::make_shared<MpiGroup>(comms[0], comms[1], members, timeout(), host.fate()));
}

// All ranks of the caller's communicator are there, or kDeadlineExceeded: what follows (MPI_Comm_dup)
// has no deadline of its own.
absl::Status MeetOn(MPI_Comm comm, int rank, absl::Duration timeout) {
  MPI_Request request = MPI_REQUEST_NULL;
  MOE_RETURN_IF_ERROR(FromMpi(MPI_Ibarrier(comm, &request), "MPI_Ibarrier"));
  const absl::Time start = absl::Now();
  while (true) {
    int done = 0;
    MOE_RETURN_IF_ERROR(FromMpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Ibarrier"));
    if (done != 0) return absl::OkStatus();
    if (absl::Now() - start > timeout) {
      return absl::DeadlineExceededError(
          absl::StrCat(DescribePlace(rank, "MakeMpiCommunicator", {}), ": not all ranks came in ",
                       absl::FormatDuration(timeout)));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> MakeMpiCommunicator(MPI_Comm comm,
                                                                  absl::Duration timeout) {
  int level = MPI_THREAD_SINGLE;
  MOE_RETURN_IF_ERROR(FromMpi(MPI_Query_thread(&level), "MPI_Query_thread"));
  if (level < MPI_THREAD_MULTIPLE) {
    return absl::FailedPreconditionError(
        "MakeMpiCommunicator: MPI was not initialised with MPI_THREAD_MULTIPLE, which streams "
        "need");
  }
  int rank = 0;
  int size = 1;
  MOE_RETURN_IF_ERROR(FromMpi(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank"));
  MOE_RETURN_IF_ERROR(FromMpi(MPI_Comm_size(comm, &size), "MPI_Comm_size"));
  MOE_RETURN_IF_ERROR(MeetOn(comm, rank, timeout));
  MPI_Comm own[2] = {MPI_COMM_NULL, MPI_COMM_NULL};
  for (MPI_Comm& duplicate : own) {
    MOE_RETURN_IF_ERROR(FromMpi(MPI_Comm_dup(comm, &duplicate), "MPI_Comm_dup"));
    MOE_RETURN_IF_ERROR(MakeSilent(duplicate));
  }
  std::vector<int> world_ranks(size);
  for (int r = 0; r < size; ++r) world_ranks[r] = r;
  return std::make_unique<MpiCommunicator>(std::make_shared<MpiGroup>(
      own[0], own[1], world_ranks, timeout, std::make_shared<MpiFate>()));
}

}  // namespace moe
