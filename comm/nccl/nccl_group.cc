#include "comm/nccl/nccl_group.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "kernels/cast/cast_cuda.h"

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

template <typename Convert>
absl::Status CastOn(Stream& stream, Convert convert) {
  return stream.Launch([&](void* native) {
    const cudaError_t error = convert(static_cast<cudaStream_t>(native));
    if (error == cudaSuccess) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("cast of NCCL: ", cudaGetErrorString(error)));
  });
}

absl::Status Widen(DType type, Stream& stream, const void* from, void* to, int64_t n) {
  return CastOn(stream, [&](cudaStream_t cuda) {
    return WithStorageType(type, [&]<typename T>(T) {
      return cast::Run(static_cast<const T*>(from), static_cast<float*>(to), n, cuda);
    });
  });
}

absl::Status Narrow(DType type, Stream& stream, const void* from, void* to, int64_t n) {
  return CastOn(stream, [&](cudaStream_t cuda) {
    return WithStorageType(type, [&]<typename T>(T) {
      return cast::Run(static_cast<const float*>(from), static_cast<T*>(to), n, cuda);
    });
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

absl::Status NcclGroup::AllReduce(const CommPhase& phase, std::byte* inout, int64_t count,
                                  DType type, ReduceOp op, Stream& stream) {
  if (streams->rank().dead()) return streams->rank().status();
  if (count == 0) return absl::OkStatus();
  const auto sum = [&](std::byte* summed) {
    return streams->Launch({.operation = "AllReduce", .phase = phase}, stream,
                           [&](ncclComm_t comm, cudaStream_t cuda) {
                             return streams->rank().api().ncclAllReduce(
                                 summed, summed, static_cast<size_t>(count), ToNccl(type),
                                 ToNccl(op), comm, cuda);
                           });
  };
  if (!Is16BitFloat(type)) return sum(inout);
  const auto cast_and_sum = [&]() -> absl::Status {
    MOE_ASSIGN_OR_RETURN(std::byte* const summed, Scratch(count * SizeOf(DType::kFloat32), stream));
    MOE_RETURN_IF_ERROR(Widen(type, stream, inout, summed, count));
    MOE_RETURN_IF_ERROR(sum(summed));
    return Narrow(type, stream, summed, inout, count);
  };
  return ScratchUsed(cast_and_sum(), stream);
}

absl::Status NcclGroup::ReduceScatter(const CommPhase& phase, const std::byte* send,
                                      std::byte* recv, int64_t count, DType type, ReduceOp op,
                                      Stream& stream) {
  if (streams->rank().dead()) return streams->rank().status();
  if (count == 0) return absl::OkStatus();
  const auto sum = [&](const std::byte* from, std::byte* to) {
    return streams->Launch({.operation = "ReduceScatter", .phase = phase}, stream,
                           [&](ncclComm_t comm, cudaStream_t cuda) {
                             return streams->rank().api().ncclReduceScatter(
                                 from, to, static_cast<size_t>(count), ToNccl(type), ToNccl(op),
                                 comm, cuda);
                           });
  };
  if (!Is16BitFloat(type)) return sum(send, recv);
  const auto cast_and_sum = [&]() -> absl::Status {
    const int64_t all = count * streams->size();
    MOE_ASSIGN_OR_RETURN(std::byte* const summed, Scratch(all * SizeOf(DType::kFloat32), stream));
    std::byte* const mine = summed + count * streams->own() * SizeOf(DType::kFloat32);  // in place
    MOE_RETURN_IF_ERROR(Widen(type, stream, send, summed, all));
    MOE_RETURN_IF_ERROR(sum(summed, mine));
    return Narrow(type, stream, mine, recv, count);
  };
  return ScratchUsed(cast_and_sum(), stream);
}

absl::Status NcclGroup::AllGather(const CommPhase& phase, const std::byte* send, std::byte* recv,
                                  int64_t bytes, Stream& stream) {
  if (streams->rank().dead()) return streams->rank().status();
  if (bytes == 0) return absl::OkStatus();
  return streams->Launch({.operation = "AllGather", .phase = phase}, stream,
                         [&](ncclComm_t comm, cudaStream_t cuda) {
                           return streams->rank().api().ncclAllGather(
                               send, recv, static_cast<size_t>(bytes), ncclUint8, comm, cuda);
                         });
}

absl::Status NcclGroup::Broadcast(const CommPhase& phase, std::byte* inout, int64_t bytes, int root,
                                  Stream& stream) {
  if (streams->rank().dead()) return streams->rank().status();
  if (bytes == 0) return absl::OkStatus();
  return streams->Launch(
      {.operation = "Broadcast", .phase = phase}, stream, [&](ncclComm_t comm, cudaStream_t cuda) {
        return streams->rank().api().ncclBroadcast(inout, inout, static_cast<size_t>(bytes),
                                                   ncclUint8, root, comm, cuda);
      });
}

absl::Status NcclGroup::AllToAllV(const CommPhase& phase, const std::byte* send,
                                  absl::Span<const int64_t> send_bytes, std::byte* recv,
                                  absl::Span<const int64_t> recv_bytes, Stream& stream) {
  const int own = streams->own();
  SendRecvOps ops;
  ops.reserve(2 * send_bytes.size());
  for (int r = 0; r < streams->size(); ++r) {
    if (r == own) {
      if (send_bytes[r] != recv_bytes[r]) {
        const int name = streams->world_ranks()[r];
        return streams->rank().Kill(absl::InvalidArgumentError(
            absl::StrCat("AllToAllV: rank ", name, " expects ", recv_bytes[r], " bytes from rank ",
                         name, ", which sends ", send_bytes[r])));
      }
      MOE_RETURN_IF_ERROR(stream.CopyBytes(send, recv, send_bytes[r]));
    } else {
      if (send_bytes[r] > 0) ops.push_back({.peer = r, .send = send, .bytes = send_bytes[r]});
      if (recv_bytes[r] > 0) ops.push_back({.peer = r, .recv = recv, .bytes = recv_bytes[r]});
    }
    send += send_bytes[r];
    recv += recv_bytes[r];
  }
  return Exchange("AllToAllV", phase, ops, stream);
}

absl::Status NcclGroup::SendRecv(const CommPhase& phase, absl::Span<const SendRecvOp> ops,
                                 Stream& stream) {
  return Exchange("SendRecv", phase, ops, stream);
}

absl::Status NcclGroup::Exchange(const char* operation, const CommPhase& phase,
                                 absl::Span<const SendRecvOp> ops, Stream& stream) {
  if (streams->rank().dead()) return streams->rank().status();
  if (ops.empty()) return absl::OkStatus();
  NcclCall call = {.operation = operation, .phase = phase};
  for (const SendRecvOp& op : ops) call.peers.push_back(op.peer);
  const NcclApi& api = streams->rank().api();
  return streams->Launch(call, stream, [&](ncclComm_t comm, cudaStream_t cuda) {
    ncclResult_t result = api.ncclGroupStart();
    if (result != ncclSuccess) return result;
    for (const SendRecvOp& op : ops) {
      const auto bytes = static_cast<size_t>(op.bytes);
      const ncclResult_t posted =
          op.send != nullptr ? api.ncclSend(op.send, bytes, ncclUint8, op.peer, comm, cuda)
                             : api.ncclRecv(op.recv, bytes, ncclUint8, op.peer, comm, cuda);
      if (posted == ncclSuccess || posted == ncclInProgress) continue;
      result = posted;
      break;
    }
    const ncclResult_t ended =
        api.ncclGroupEnd();  // also after an error: the group is this thread's
    return result == ncclSuccess ? ended : result;
  });
}

// A sum of one number, which no rank has before all have come.
absl::Status NcclGroup::Fence(const CommPhase& phase, Stream& stream) {
  if (streams->rank().dead()) return streams->rank().status();
  const auto sum = [&]() -> absl::Status {
    MOE_ASSIGN_OR_RETURN(std::byte* const number, Scratch(SizeOf(DType::kInt32), stream));
    return streams->Launch({.operation = "Fence", .phase = phase}, stream,
                           [&](ncclComm_t comm, cudaStream_t cuda) {
                             return streams->rank().api().ncclAllReduce(
                                 number, number, 1, ncclInt32, ncclMax, comm, cuda);
                           });
  };
  return ScratchUsed(sum(), stream);
}

}  // namespace moe
