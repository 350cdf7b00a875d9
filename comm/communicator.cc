#include "comm/communicator.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "comm/reduce.h"
#include "comm/watch/rank_watch.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/xxh3.h"

namespace moe {
namespace {

absl::Status CheckReducible(const CollectiveCall& call) {
  const bool known_op = call.op == ReduceOp::kSum || call.op == ReduceOp::kMax;
  if (IsReducible(call.type) && known_op) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(NameOf(call.kind), ": type ", NameOf(call.type),
                   " cannot be reduced, expected f32, f64, bf16, f16, i32 or i64 and sum or max"));
}

// Whether they share a byte.
bool Overlap(absl::Span<const std::byte> a, absl::Span<const std::byte> b) {
  const auto p = reinterpret_cast<uintptr_t>(a.data());
  const auto q = reinterpret_cast<uintptr_t>(b.data());
  return !a.empty() && !b.empty() && p < q + b.size() && q < p + a.size();
}

absl::Status CheckApart(const CollectiveCall& call) {
  if (!Overlap(call.send, call.recv)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(NameOf(call.kind), ": send and recv overlap, expected separate buffers"));
}

// `side` of a call, and what its counts are called: "send_counts".
absl::Status CheckCounts(const CollectiveCall& call, absl::string_view name,
                         absl::Span<const int64_t> counts, absl::Span<const std::byte> side,
                         int ranks) {
  const absl::string_view kind = NameOf(call.kind);
  const size_t elements = side.size() / static_cast<size_t>(SizeOf(call.type));
  if (counts.size() != static_cast<size_t>(ranks)) {
    return absl::InvalidArgumentError(
        absl::StrCat(kind, ": ", name, " has ", counts.size(), " entries for ", ranks, " ranks"));
  }
  int64_t left = static_cast<int64_t>(elements);
  for (const int64_t count : counts) {
    if (count < 0 || count > left) {
      return absl::InvalidArgumentError(
          absl::StrCat(kind, ": ", name, " = [", absl::StrJoin(counts, ", "),
                       "], expected counts >= 0 with sum ", elements));
    }
    left -= count;
  }
  if (left == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(kind, ": ", name, " sum to ",
                                                 static_cast<int64_t>(elements) - left,
                                                 ", buffer has ", elements, " elements"));
}

// `whole` has a part of counts[r] elements for each rank. In place, `part` is the own one.
absl::Status CheckParts(const CollectiveCall& call, absl::Span<const std::byte> part,
                        absl::Span<const std::byte> whole, absl::Span<const int64_t> counts,
                        int rank, int ranks) {
  MOE_RETURN_IF_ERROR(CheckCounts(call, "counts", counts, whole, ranks));
  const auto width = static_cast<size_t>(SizeOf(call.type));
  if (part.size() / width != static_cast<size_t>(counts[rank])) {
    return absl::InvalidArgumentError(
        absl::StrCat(NameOf(call.kind), ": the part of rank ", rank, " has ", part.size() / width,
                     " elements, expected counts[", rank, "] = ", counts[rank]));
  }
  const auto before = std::accumulate(counts.begin(), counts.begin() + rank, int64_t{0});
  if (part.data() == whole.data() + static_cast<size_t>(before) * width) return absl::OkStatus();
  return CheckApart(call);
}

// Counts of equal parts. `whole` is the side of the call that has one for each rank.
absl::StatusOr<RankCounts> EqualCounts(const CollectiveCall& call, absl::Span<const std::byte> part,
                                       absl::Span<const std::byte> whole,
                                       absl::string_view whole_name, int ranks) {
  const auto width = static_cast<size_t>(SizeOf(call.type));
  if (whole.size() == part.size() * static_cast<size_t>(ranks)) {
    return RankCounts(static_cast<size_t>(ranks), static_cast<int64_t>(part.size() / width));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      NameOf(call.kind), ": send has ", call.send.size() / width, " elements, recv ",
      call.recv.size() / width, ", expected ", ranks, " times as many in ", whole_name));
}

// Of the numbers; 0 for none.
uint64_t HashOf(absl::Span<const int64_t> send, absl::Span<const int64_t> recv) {
  if (send.empty() && recv.empty()) return 0;
  return Xxh3(recv.data(), recv.size() * sizeof(int64_t),
              Xxh3(send.data(), send.size() * sizeof(int64_t)));
}

FlightCall FlightOf(const CollectiveCall& call) {
  return {.operation = NameOf(call.kind),
          .site = call.site,
          .bytes_in = static_cast<int64_t>(call.send.size()),
          .bytes_out = static_cast<int64_t>(call.recv.size()),
          .type = call.type,
          .counts_hash = HashOf(call.send_counts, call.recv_counts)};
}

FlightCall FlightOf(absl::Span<const SendRecvOp> ops, const Site& site) {
  FlightCall call = {.operation = "SendRecv", .site = site};
  for (const SendRecvOp& op : ops) {
    (op.send != nullptr ? call.bytes_in : call.bytes_out) += op.bytes;
  }
  return call;
}

}  // namespace

const char* NameOf(CollectiveKind kind) {
  constexpr const char* kNames[] = {"AllReduce",  "ReduceScatter", "ReduceScatterV", "AllGather",
                                    "AllGatherV", "AllToAll",      "AllToAllV",      "Broadcast"};
  static_assert(std::size(kNames) == static_cast<size_t>(CollectiveKind::kBroadcast) + 1);
  return kNames[static_cast<size_t>(kind)];
}

int64_t CollectiveCall::count() const {
  switch (kind) {
    case CollectiveKind::kAllToAllV:
      return 0;
    case CollectiveKind::kReduceScatterV:
      return static_cast<int64_t>(send.size()) / SizeOf(type);
    case CollectiveKind::kAllGatherV:
      return static_cast<int64_t>(recv.size()) / SizeOf(type);
    default:
      return static_cast<int64_t>(std::min(send.size(), recv.size())) / SizeOf(type);
  }
}

absl::Status Communicator::Check(CollectiveCall& call) const {
  const auto width = static_cast<size_t>(SizeOf(call.type));
  if (call.reduces()) MOE_RETURN_IF_ERROR(CheckReducible(call));
  switch (call.kind) {
    case CollectiveKind::kAllReduce:
      return absl::OkStatus();
    case CollectiveKind::kReduceScatter: {
      MOE_ASSIGN_OR_RETURN(call.send_counts,
                           EqualCounts(call, call.recv, call.send, "send", size()));
      [[fallthrough]];
    }
    case CollectiveKind::kReduceScatterV:
      MOE_RETURN_IF_ERROR(CheckParts(call, call.recv, call.send, call.send_counts, rank(), size()));
      call.recv_counts.assign(call.send_counts.size(), call.send_counts[rank()]);
      return absl::OkStatus();
    case CollectiveKind::kAllGather: {
      MOE_ASSIGN_OR_RETURN(call.recv_counts,
                           EqualCounts(call, call.send, call.recv, "recv", size()));
      [[fallthrough]];
    }
    case CollectiveKind::kAllGatherV:
      MOE_RETURN_IF_ERROR(CheckParts(call, call.send, call.recv, call.recv_counts, rank(), size()));
      call.send_counts.assign(call.recv_counts.size(), call.recv_counts[rank()]);
      return absl::OkStatus();
    case CollectiveKind::kAllToAll: {
      const size_t elements = call.send.size() / width, ranks = static_cast<size_t>(size());
      if (call.send.size() != call.recv.size() || elements % ranks != 0) {
        return absl::InvalidArgumentError(absl::StrCat("AllToAll: send has ", elements,
                                                       " elements, recv ", call.recv.size() / width,
                                                       ", expected equal multiples of ", ranks));
      }
      call.send_counts.assign(ranks, static_cast<int64_t>(elements / ranks));
      call.recv_counts = call.send_counts;
      return CheckApart(call);
    }
    case CollectiveKind::kAllToAllV:
      MOE_RETURN_IF_ERROR(CheckCounts(call, "send_counts", call.send_counts, call.send, size()));
      MOE_RETURN_IF_ERROR(CheckCounts(call, "recv_counts", call.recv_counts, call.recv, size()));
      return CheckApart(call);
    case CollectiveKind::kBroadcast:
      if (call.root >= 0 && call.root < size()) return absl::OkStatus();
      return absl::InvalidArgumentError(
          absl::StrCat("Broadcast: root is ", call.root, ", expected 0 .. ", size() - 1));
  }
  return absl::OkStatus();
}

// What a task of a stream takes with it lies in the task.
static_assert(sizeof(CollectiveCall) + 2 * sizeof(Site) <= HostTask::kInPlaceBytes);

template <typename Enqueue>
absl::Status Communicator::Watched(const FlightCall& call, Stream* stream, int64_t& sequence,
                                   Enqueue enqueue) {
  if (watch_ == nullptr) return enqueue();
  const uint64_t ticket = watch_->Enter(group_number_, sequence++, call);
  const auto set = [&](FlightState state) -> absl::Status {
    if (stream != nullptr && IsCuda(*stream)) return absl::OkStatus();
    const auto task = [watch = watch_, ticket, state] {
      watch->recorder().Set(ticket, state);
      return absl::OkStatus();
    };
    return stream == nullptr ? task() : stream->Enqueue(task);
  };
  MOE_RETURN_IF_ERROR(set(FlightState::kStarted));
  absl::Status enqueued = enqueue();
  if (enqueued.ok()) return set(FlightState::kCompleted);
  watch_->recorder().Set(ticket, FlightState::kFailed);
  return enqueued;
}

void Communicator::Attach(std::shared_ptr<RankWatch> watch, std::string group) {
  watch_ = std::move(watch);
  group_ = std::move(group);
  FlightGroup added = {.name = group_, .members = {}};
  for (int r = 0; r < size(); ++r) added.members.push_back(world_rank(r));
  group_number_ = watch_->recorder().AddGroup(std::move(added));
}

void Communicator::MarkWatched(const Site& site) const {
  watch_->Mark(site);
}

absl::Status Communicator::Barrier() {
  return Watched({.operation = "Barrier"}, nullptr, collectives_, [&] { return DoBarrier(); });
}

absl::StatusOr<std::unique_ptr<Communicator>> Communicator::Split(int color, int key) {
  std::unique_ptr<Communicator> part;
  MOE_RETURN_IF_ERROR(Watched({.operation = "Split"}, nullptr, collectives_, [&]() -> absl::Status {
    MOE_ASSIGN_OR_RETURN(part, DoSplit(color, key));
    return absl::OkStatus();
  }));
  const int64_t split = splits_++;
  if (watch_ != nullptr && part != nullptr) {
    part->Attach(watch_, absl::StrCat(group_, "/", split, ".", color));
  }
  return part;
}

absl::Status Communicator::Collect(CollectiveCall call, Stream& stream) {
  MOE_RETURN_IF_ERROR(Check(call));
  const FlightCall flight = watch_ == nullptr ? FlightCall() : FlightOf(call);
  if (call.kind == CollectiveKind::kAllToAll) call.kind = CollectiveKind::kAllToAllV;
  const int64_t width = SizeOf(call.type);
  for (int64_t& count : call.send_counts) count *= width;
  for (int64_t& count : call.recv_counts) count *= width;
  if (!call.send_counts.empty()) {
    bytes_sent_ += std::accumulate(call.send_counts.begin(), call.send_counts.end(),
                                   -call.send_counts[static_cast<size_t>(rank())]);
  }
  if (!call.reduces()) call.type = DType::kUInt8;
  const auto run = [&](Stream& own) {
    return Watched(flight, &own, collectives_, [&] { return DoCollective(std::move(call), own); });
  };
  if (moves(stream.device().kind)) return run(stream);
  return staging_.Run(
      call.send, call.recv, stream,
      [&](absl::Span<const std::byte> send, absl::Span<std::byte> recv, Stream& host) {
        call.send = send;
        call.recv = recv;
        return run(host);
      });
}

absl::Status Communicator::SendRecv(absl::Span<const SendRecvOp> ops, Stream& stream,
                                    const Site& site) {
  SendRecvOps moving;
  moving.reserve(ops.size());
  for (const SendRecvOp& op : ops) {
    if (op.peer < 0 || op.peer >= size() || op.bytes < 0) {
      return absl::InvalidArgumentError(absl::StrCat("SendRecv: peer ", op.peer, ", ", op.bytes,
                                                     " bytes, expected a peer in 0 .. ", size() - 1,
                                                     " and bytes >= 0"));
    }
    if (op.bytes == 0) continue;  // nothing to move, on both ends
    if ((op.send == nullptr) == (op.recv == nullptr)) {
      return absl::InvalidArgumentError(
          absl::StrCat("SendRecv: an op with peer ", op.peer,
                       " has both or neither of send and recv, expected one"));
    }
    moving.push_back(op);
  }
  const FlightCall flight = watch_ == nullptr ? FlightCall() : FlightOf(moving, site);
  if (moves(stream.device().kind)) {
    return Watched(flight, &stream, transfers_,
                   [&] { return DoSendRecv(std::move(moving), stream, site); });
  }
  return Watched(flight, nullptr, transfers_,
                 [&] { return StagedSendRecv(std::move(moving), stream, site); });
}

absl::Status Communicator::Fence(Stream& stream, const Site& site) {
  const auto run = [&](Stream& own) {
    return Watched({.operation = "Fence", .site = site}, &own, collectives_,
                   [&] { return DoFence(own, site); });
  };
  if (moves(stream.device().kind)) return run(stream);
  return staging_.Run(
      {}, {}, stream,
      [&](absl::Span<const std::byte>, absl::Span<std::byte>, Stream& host) { return run(host); });
}

// Sends and receives lie anywhere in the device's memory: each has a host buffer of its own.
absl::Status Communicator::StagedSendRecv(SendRecvOps ops, Stream& stream, const Site& site) {
  std::vector<Buffer> buffers;
  SendRecvOps on_host = ops;
  for (SendRecvOp& op : on_host) {
    MOE_ASSIGN_OR_RETURN(Buffer buffer, Buffer::Allocate(op.bytes, CpuMemory(), "host staging"));
    if (op.send != nullptr) {
      MOE_RETURN_IF_ERROR(stream.CopyBytes(op.send, buffer.data(), op.bytes));
      op.send = buffer.data();
    } else {
      op.recv = buffer.data();
    }
    buffers.push_back(std::move(buffer));
  }
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  MOE_RETURN_IF_ERROR(DoSendRecv(on_host, *MakeInlineStream(&stream.threads()), site));
  for (size_t i = 0; i < ops.size(); ++i) {
    if (ops[i].recv == nullptr) continue;
    MOE_RETURN_IF_ERROR(stream.Upload(buffers[i].data(), ops[i].recv, ops[i].bytes));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<PeerBuffer>> Communicator::AllocatePeerBuffer(int64_t bytes,
                                                                             MemoryResource& memory,
                                                                             const Site& site) {
  if (bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("AllocatePeerBuffer: ", bytes, " bytes, expected >= 0"));
  }
  absl::StatusOr<std::shared_ptr<PeerBuffer>> buffer;
  const FlightCall call = {.operation = "AllocatePeerBuffer", .site = site, .bytes_in = bytes};
  MOE_RETURN_IF_ERROR(Watched(call, nullptr, collectives_, [&] {
    buffer = DoAllocatePeerBuffer(bytes, memory, site);
    // The answer of all ranks, who do without: nobody failed.
    return absl::IsUnimplemented(buffer.status()) ? absl::OkStatus() : buffer.status();
  }));
  return buffer;
}

absl::StatusOr<std::shared_ptr<PeerBuffer>> Communicator::DoAllocatePeerBuffer(
    int64_t /*bytes*/, MemoryResource& /*memory*/, const Site& /*site*/) {
  return absl::UnimplementedError(
      absl::StrCat("AllocatePeerBuffer: backend ", backend(), " has no peer memory"));
}

}  // namespace moe
