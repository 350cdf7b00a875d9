#include "comm/nccl/nccl_group.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <absl/functional/function_ref.h>

#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "kernels/elementwise/elementwise.h"

namespace moe {
namespace {

ncclDataType_t ToNccl(DType type) {
  switch (type) {
    case DType::kFloat64:
      return ncclFloat64;
    case DType::kInt32:
      return ncclInt32;
    case DType::kInt64:
      return ncclInt64;
    default:
      return ncclFloat32;  // 16-bit types are cast, and Communicator lets no other type through
  }
}

ncclRedOp_t ToNccl(ReduceOp op) {
  return op == ReduceOp::kSum ? ncclSum : ncclMax;
}

// Calls that progress together: post(0) .. post(n - 1).
ncclResult_t Grouped(const NcclApi& api, size_t n, absl::FunctionRef<ncclResult_t(size_t)> post) {
  ncclResult_t result = api.ncclGroupStart();
  for (size_t i = 0; i < n && result == ncclSuccess; ++i) {
    const ncclResult_t posted = post(i);
    if (posted != ncclInProgress) result = posted;
  }
  const ncclResult_t ended = api.ncclGroupEnd();  // also after an error: the group is this thread's
  return result == ncclSuccess ? ended : result;
}

// [n] values of a 16-bit type, to float32.
absl::Status Widen(DType type, const std::byte* from, std::byte* to, int64_t n, Stream& stream) {
  return WithStorageType(type, [&]<typename T>(T) {
    return Cast<T, float>({reinterpret_cast<const T*>(from), static_cast<size_t>(n)},
                          {reinterpret_cast<float*>(to), static_cast<size_t>(n)}, stream);
  });
}

absl::Status Narrow(DType type, const std::byte* from, std::byte* to, int64_t n, Stream& stream) {
  return WithStorageType(type, [&]<typename T>(T) {
    return Cast<float, T>({reinterpret_cast<const float*>(from), static_cast<size_t>(n)},
                          {reinterpret_cast<T*>(to), static_cast<size_t>(n)}, stream);
  });
}

}  // namespace

NcclGroup::~NcclGroup() {
  if (scratch_used_.state() != nullptr) {
    MakeInlineStream()->WaitFor(scratch_used_).IgnoreError();
  }
}

absl::Status NcclGroup::ScratchUsed(absl::Status status, Stream& stream) {
  absl::StatusOr<Event> used = stream.Record();
  status.Update(used.status());
  if (used.ok()) scratch_used_ = *std::move(used);
  return status.ok() ? status : streams->rank().Kill(std::move(status));
}

absl::StatusOr<std::byte*> NcclGroup::Scratch(int64_t bytes, Stream& stream) {
  if (scratch_used_.state() != nullptr) MOE_RETURN_IF_ERROR(stream.WaitFor(scratch_used_));
  if (!scratch_.empty() && bytes <= scratch_.back().bytes()) return scratch_.back().data();
  const int64_t wanted = scratch_.empty() ? bytes : std::max(bytes, 2 * scratch_.back().bytes());
  MOE_ASSIGN_OR_RETURN(MemoryResource* const memory, CudaMemory(streams->rank().device()));
  MOE_ASSIGN_OR_RETURN(Buffer buffer, Buffer::Allocate(wanted, *memory, "float32 sums of NCCL"));
  scratch_.push_back(std::move(buffer));
  return scratch_.back().data();
}

absl::Status NcclGroup::Collective(const CollectiveCall& call, Stream& stream) {
  if (streams->rank().dead()) return streams->rank().status();
  if (call.kind == CollectiveKind::kAllToAllV || call.kind == CollectiveKind::kAllGatherV) {
    return AllToAllV(call, stream);
  }
  if (call.count() == 0) return absl::OkStatus();
  return Is16BitFloat(call.type) ? ScratchUsed(SumInFloat32(call, stream), stream)
                                 : Launch(call, stream);
}

absl::Status NcclGroup::Launch(const CollectiveCall& call, Stream& stream) {
  const NcclApi& api = streams->rank().api();
  const auto count = static_cast<size_t>(call.count());
  const ncclDataType_t type = call.reduces() ? ToNccl(call.type) : ncclUint8;
  const void* const send = call.send.data();
  void* const recv = call.recv.data();
  return streams->Launch(
      {.operation = NameOf(call.kind), .site = call.site}, stream,
      [&](ncclComm_t comm, cudaStream_t cuda) {
        switch (call.kind) {
          case CollectiveKind::kAllReduce:
            return api.ncclAllReduce(send, recv, count, type, ToNccl(call.op), comm, cuda);
          case CollectiveKind::kReduceScatter:
            return api.ncclReduceScatter(send, recv, count, type, ToNccl(call.op), comm, cuda);
          case CollectiveKind::kReduceScatterV: {
            const std::byte* part = call.send.data();
            return Grouped(api, call.send_counts.size(), [&](size_t r) {
              const std::byte* const from = std::exchange(part, part + call.send_counts[r]);
              const auto n = static_cast<size_t>(call.send_counts[r] / SizeOf(call.type));
              if (n == 0) return ncclSuccess;
              return api.ncclReduce(from, recv, n, type, ToNccl(call.op), static_cast<int>(r), comm,
                                    cuda);
            });
          }
          case CollectiveKind::kAllGather:
            return api.ncclAllGather(send, recv, count, type, comm, cuda);
          default:
            return api.ncclBroadcast(send, recv, count, type, call.root, comm, cuda);
        }
      });
}

absl::Status NcclGroup::SumInFloat32(const CollectiveCall& call, Stream& stream) {
  constexpr int64_t kWidth = SizeOf(DType::kFloat32);
  const int64_t narrow = SizeOf(call.type);
  const int64_t all = static_cast<int64_t>(call.send.size()) / narrow;
  const int64_t received = static_cast<int64_t>(call.recv.size()) / narrow;
  MOE_ASSIGN_OR_RETURN(std::byte* const summed, Scratch(all * kWidth, stream));
  CollectiveCall wide = {.kind = call.kind,
                         .type = DType::kFloat32,
                         .op = call.op,
                         .send = {summed, static_cast<size_t>(all * kWidth)}};
  for (const int64_t bytes : call.send_counts) wide.send_counts.push_back(bytes / narrow * kWidth);
  std::byte* const mine =  // in place
      summed + (call.scatters()
                    ? std::accumulate(wide.send_counts.begin(),
                                      wide.send_counts.begin() + streams->own(), int64_t{0})
                    : 0);
  wide.site = call.site;
  wide.recv = {mine, static_cast<size_t>(received * kWidth)};
  MOE_RETURN_IF_ERROR(Widen(call.type, call.send.data(), summed, all, stream));
  MOE_RETURN_IF_ERROR(Launch(wide, stream));
  return Narrow(call.type, mine, call.recv.data(), received, stream);
}

// A gather sends one part to all.
absl::Status NcclGroup::AllToAllV(const CollectiveCall& call, Stream& stream) {
  const RankCounts &out = call.send_counts, &in = call.recv_counts;
  const std::byte* send = call.send.data();
  std::byte* recv = call.recv.data();
  SendRecvOps ops;
  ops.reserve(2 * out.size());
  for (int r = 0; r < streams->size(); ++r) {
    if (r == streams->own()) {
      if (out[r] != in[r]) {
        const int name = streams->world_ranks()[r];
        return streams->rank().Kill(OtherSizeError(NameOf(call.kind), name, in[r], name, out[r]));
      }
      if (send != recv) MOE_RETURN_IF_ERROR(stream.CopyBytes(send, recv, out[r]));
    } else {
      if (out[r] > 0) ops.push_back({.peer = r, .send = send, .bytes = out[r]});
      if (in[r] > 0) ops.push_back({.peer = r, .recv = recv, .bytes = in[r]});
    }
    if (!call.gathers()) send += out[r];
    recv += in[r];
  }
  return Exchange(NameOf(call.kind), ops, stream, call.site);
}

absl::Status NcclGroup::SendRecv(absl::Span<const SendRecvOp> ops, Stream& stream,
                                 const Site& site) {
  return Exchange("SendRecv", ops, stream, site);
}

absl::Status NcclGroup::Exchange(const char* operation, absl::Span<const SendRecvOp> ops,
                                 Stream& stream, const Site& site) {
  if (streams->rank().dead()) return streams->rank().status();
  if (ops.empty()) return absl::OkStatus();
  NcclCall call = {.operation = operation, .site = site};
  for (const SendRecvOp& op : ops) call.peers.push_back(op.peer);
  const NcclApi& api = streams->rank().api();
  return streams->Launch(call, stream, [&](ncclComm_t comm, cudaStream_t cuda) {
    return Grouped(api, ops.size(), [&](size_t i) {
      const SendRecvOp& op = ops[i];
      const auto bytes = static_cast<size_t>(op.bytes);
      return op.send != nullptr ? api.ncclSend(op.send, bytes, ncclUint8, op.peer, comm, cuda)
                                : api.ncclRecv(op.recv, bytes, ncclUint8, op.peer, comm, cuda);
    });
  });
}

// A sum of one number, which no rank has before all have come.
absl::Status NcclGroup::Fence(Stream& stream, const Site& site) {
  if (streams->rank().dead()) return streams->rank().status();
  const auto sum = [&]() -> absl::Status {
    MOE_ASSIGN_OR_RETURN(std::byte* const number, Scratch(SizeOf(DType::kInt32), stream));
    return streams->Launch({.operation = "Fence", .site = site}, stream,
                           [&](ncclComm_t comm, cudaStream_t cuda) {
                             return streams->rank().api().ncclAllReduce(
                                 number, number, 1, ncclInt32, ncclMax, comm, cuda);
                           });
  };
  return ScratchUsed(sum(), stream);
}

}  // namespace moe
