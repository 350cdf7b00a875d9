#include "comm/communicator.h"

#include <utility>
#include <vector>

#include <absl/container/inlined_vector.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "comm/reduce.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

absl::Status CheckReducible(absl::string_view what, DType type, ReduceOp op) {
  if (IsReducible(type) && (op == ReduceOp::kSum || op == ReduceOp::kMax)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, ": type ", NameOf(type),
                   " cannot be reduced, expected f32, f64, bf16, f16, i32 or i64 and sum or max"));
}

// Whether [a, a + n) and [b, b + m) share a byte.
bool Overlap(const void* a, int64_t n, const void* b, int64_t m) {
  const auto p = reinterpret_cast<uintptr_t>(a);
  const auto q = reinterpret_cast<uintptr_t>(b);
  return n > 0 && m > 0 && p < q + static_cast<uintptr_t>(m) && q < p + static_cast<uintptr_t>(n);
}

absl::Status CheckApart(absl::string_view what, const void* send, int64_t send_bytes,
                        const void* recv, int64_t recv_bytes) {
  if (!Overlap(send, send_bytes, recv, recv_bytes)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, ": send and recv overlap, expected separate buffers"));
}

absl::Status CheckCounts(absl::string_view side, absl::Span<const int64_t> counts, int ranks,
                         size_t elements) {
  if (counts.size() != static_cast<size_t>(ranks)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "AllToAllV: ", side, "_counts has ", counts.size(), " entries for ", ranks, " ranks"));
  }
  int64_t left = static_cast<int64_t>(elements);
  for (const int64_t count : counts) {
    if (count < 0 || count > left) {
      return absl::InvalidArgumentError(
          absl::StrCat("AllToAllV: ", side, "_counts = [", absl::StrJoin(counts, ", "),
                       "], expected counts >= 0 with sum ", elements));
    }
    left -= count;
  }
  if (left == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("AllToAllV: ", side, "_counts sum to ",
                                                 static_cast<int64_t>(elements) - left,
                                                 ", buffer has ", elements, " elements"));
}

using Counts = absl::InlinedVector<int64_t, 16>;

}  // namespace

absl::Status Communicator::CheckedAllReduce(void* inout, size_t count, DType type, ReduceOp op,
                                            Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckReducible("AllReduce", type, op));
  const auto n = static_cast<int64_t>(count);
  const int64_t bytes = n * SizeOf(type);
  return WhereItCan({inout, bytes, inout, bytes}, stream,
                    [&](const void*, void* recv, Stream& where) {
                      return DoAllReduce(recv, n, type, op, where);
                    });
}

absl::Status Communicator::CheckedReduceScatter(const void* send, size_t send_count, void* recv,
                                                size_t recv_count, DType type, ReduceOp op,
                                                Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckReducible("ReduceScatter", type, op));
  if (send_count != recv_count * static_cast<size_t>(size())) {
    return absl::InvalidArgumentError(absl::StrCat("ReduceScatter: send has ", send_count,
                                                   " elements, recv ", recv_count, ", expected ",
                                                   size(), " times as many in send"));
  }
  const int64_t bytes = static_cast<int64_t>(recv_count) * SizeOf(type);
  if (recv != static_cast<const std::byte*>(send) + bytes * rank()) {
    MOE_RETURN_IF_ERROR(CheckApart("ReduceScatter", send, bytes * size(), recv, bytes));
  }
  return WhereItCan(
      {send, bytes * size(), recv, bytes}, stream, [&](const void* from, void* to, Stream& where) {
        return DoReduceScatter(from, to, static_cast<int64_t>(recv_count), type, op, where);
      });
}

absl::Status Communicator::CheckedAllGather(const void* send, size_t send_count, void* recv,
                                            size_t recv_count, DType type, Stream& stream) {
  if (recv_count != send_count * static_cast<size_t>(size())) {
    return absl::InvalidArgumentError(absl::StrCat("AllGather: send has ", send_count,
                                                   " elements, recv ", recv_count, ", expected ",
                                                   size(), " times as many in recv"));
  }
  const int64_t bytes = static_cast<int64_t>(send_count) * SizeOf(type);
  if (send != static_cast<std::byte*>(recv) + bytes * rank()) {
    MOE_RETURN_IF_ERROR(CheckApart("AllGather", send, bytes, recv, bytes * size()));
  }
  return WhereItCan({send, bytes, recv, bytes * size()}, stream,
                    [&](const void* from, void* to, Stream& where) {
                      return DoAllGather(from, to, bytes, where);
                    });
}

absl::Status Communicator::CheckedAllToAll(const void* send, size_t send_count, void* recv,
                                           size_t recv_count, DType type, Stream& stream) {
  const auto ranks = static_cast<size_t>(size());
  if (send_count != recv_count || send_count % ranks != 0) {
    return absl::InvalidArgumentError(absl::StrCat("AllToAll: send has ", send_count,
                                                   " elements, recv ", recv_count,
                                                   ", expected equal multiples of ", ranks));
  }
  const int64_t bytes = static_cast<int64_t>(send_count) * SizeOf(type);
  MOE_RETURN_IF_ERROR(CheckApart("AllToAll", send, bytes, recv, bytes));
  const Counts each(ranks, bytes / size());
  return WhereItCan({send, bytes, recv, bytes}, stream,
                    [&](const void* from, void* to, Stream& where) {
                      return DoAllToAllV(from, each, to, each, where);
                    });
}

absl::Status Communicator::CheckedAllToAllV(const void* send, size_t send_count,
                                            absl::Span<const int64_t> send_counts, void* recv,
                                            size_t recv_count,
                                            absl::Span<const int64_t> recv_counts, DType type,
                                            Stream& stream) {
  MOE_RETURN_IF_ERROR(CheckCounts("send", send_counts, size(), send_count));
  MOE_RETURN_IF_ERROR(CheckCounts("recv", recv_counts, size(), recv_count));
  const int64_t width = SizeOf(type);
  const HostStaging::Transfer all = {send, static_cast<int64_t>(send_count) * width, recv,
                                     static_cast<int64_t>(recv_count) * width};
  MOE_RETURN_IF_ERROR(CheckApart("AllToAllV", send, all.send_bytes, recv, all.recv_bytes));
  Counts send_bytes(send_counts.begin(), send_counts.end());
  Counts recv_bytes(recv_counts.begin(), recv_counts.end());
  for (int64_t& bytes : send_bytes) bytes *= width;
  for (int64_t& bytes : recv_bytes) bytes *= width;
  return WhereItCan(all, stream, [&](const void* from, void* to, Stream& where) {
    return DoAllToAllV(from, send_bytes, to, recv_bytes, where);
  });
}

absl::Status Communicator::CheckedBroadcast(void* inout, size_t count, DType type, int root,
                                            Stream& stream) {
  if (root < 0 || root >= size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("Broadcast: root is ", root, ", expected 0 .. ", size() - 1));
  }
  const int64_t bytes = static_cast<int64_t>(count) * SizeOf(type);
  return WhereItCan({inout, bytes, inout, bytes}, stream,
                    [&](const void*, void* recv, Stream& where) {
                      return DoBroadcast(recv, bytes, root, where);
                    });
}

absl::Status Communicator::SendRecv(absl::Span<const SendRecvOp> ops, Stream& stream) {
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
  if (!moves(stream.device().kind)) return StagedSendRecv(std::move(moving), stream);
  return DoSendRecv(std::move(moving), stream);
}

absl::Status Communicator::Fence(Stream& stream) {
  return WhereItCan({}, stream, [&](const void*, void*, Stream& where) { return DoFence(where); });
}

absl::Status Communicator::WhereItCan(const HostStaging::Transfer& transfer, Stream& stream,
                                      HostStaging::Collective collective) {
  if (moves(stream.device().kind)) {
    return collective(transfer.send, transfer.recv, stream);
  }
  return staging_.Run(transfer, stream, collective);
}

// Sends and receives lie anywhere in the device's memory: each has a host buffer of its own.
absl::Status Communicator::StagedSendRecv(SendRecvOps ops, Stream& stream) {
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
  MOE_RETURN_IF_ERROR(DoSendRecv(on_host, *MakeInlineStream(&stream.threads())));
  for (size_t i = 0; i < ops.size(); ++i) {
    if (ops[i].recv == nullptr) continue;
    MOE_RETURN_IF_ERROR(stream.Upload(buffers[i].data(), ops[i].recv, ops[i].bytes));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<PeerBuffer>> Communicator::AllocatePeerBuffer(
    int64_t /*bytes*/, MemoryResource& /*memory*/) {
  return absl::UnimplementedError(
      absl::StrCat("AllocatePeerBuffer: backend ", backend(), " has no peer memory"));
}

}  // namespace moe
