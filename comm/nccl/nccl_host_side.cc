#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "comm/nccl/nccl_group.h"
#include "kernels/base/caught.h"
#include "kernels/base/status_macros.h"

namespace moe {

absl::StatusOr<std::byte*> NcclHostSide::Reserve(Buffer& buffer, int64_t bytes) {
  if (bytes <= buffer.bytes()) return buffer.data();
  MOE_ASSIGN_OR_RETURN(MemoryResource* const memory, CudaMemory(lane_.rank().device()));
  buffer = Buffer();
  MOE_ASSIGN_OR_RETURN(buffer, Buffer::Allocate(bytes, *memory, "staging of NCCL"));
  return buffer.data();
}

absl::Status NcclHostSide::WithStream(absl::FunctionRef<absl::Status(Stream&)> task) {
  if (lane_.rank().dead()) return lane_.rank().status();
  if (stream_ == nullptr) {
    MOE_ASSIGN_OR_RETURN(stream_, MakeTransferStream({DeviceKind::kCuda, lane_.rank().device()}));
  }
  absl::Status status = Caught([&] { return task(*stream_); });
  // Also after an error: copies to and from the caller's memory may still be under way.
  const absl::Status ended = stream_->Synchronize();
  status.Update(ended);
  return status.ok() ? status : lane_.rank().Kill(std::move(status));  // peers are in this call
}

absl::Status NcclHostSide::Run(absl::Span<const std::byte> from, absl::Span<std::byte> to,
                               Work work) {
  return WithStream([&](Stream& own) -> absl::Status {
    const auto out = static_cast<int64_t>(from.size()), in = static_cast<int64_t>(to.size());
    const bool in_place = from.data() == to.data() && out == in;
    MOE_ASSIGN_OR_RETURN(std::byte* const received, Reserve(recv_, in));
    std::byte* sent = received;
    if (!in_place) {
      MOE_ASSIGN_OR_RETURN(sent, Reserve(send_, out));
    }
    MOE_RETURN_IF_ERROR(own.CopyBytes(from.data(), sent, out));
    MOE_RETURN_IF_ERROR(work(sent, received, own));
    // Without a collective that ended there is nothing to copy back.
    MOE_RETURN_IF_ERROR(own.Synchronize());
    return own.CopyBytes(received, to.data(), in);
  });
}

absl::Status NcclHostSide::SendRecv(
    absl::Span<const SendRecvOp> ops,
    absl::FunctionRef<absl::Status(absl::Span<const SendRecvOp>, Stream&)> work) {
  return WithStream([&](Stream& own) -> absl::Status {
    int64_t total = 0;
    for (const SendRecvOp& op : ops) total += op.bytes;
    MOE_ASSIGN_OR_RETURN(std::byte * place, Reserve(send_, total));
    SendRecvOps on_device(ops.begin(), ops.end());
    for (SendRecvOp& op : on_device) {
      if (op.send != nullptr) {
        MOE_RETURN_IF_ERROR(own.CopyBytes(op.send, place, op.bytes));
        op.send = place;
      } else {
        op.recv = place;
      }
      place += op.bytes;
    }
    MOE_RETURN_IF_ERROR(work(on_device, own));
    MOE_RETURN_IF_ERROR(own.Synchronize());
    for (size_t i = 0; i < ops.size(); ++i) {
      if (ops[i].recv == nullptr) continue;
      MOE_RETURN_IF_ERROR(own.CopyBytes(on_device[i].recv, ops[i].recv, ops[i].bytes));
    }
    return absl::OkStatus();
  });
}

absl::StatusOr<std::vector<CallCard>> NcclHostSide::RollCall(const CallCard& mine,
                                                             absl::Span<const int64_t> out,
                                                             absl::Span<const int64_t> in,
                                                             const Site& site) {
  const int ranks = lane_.size();
  const size_t bytes = sizeof(CallCard) + 2 * sizeof(int64_t) * static_cast<size_t>(ranks);
  std::vector<std::byte> said(bytes), all(bytes * static_cast<size_t>(ranks));
  std::memcpy(said.data(), &mine, sizeof(mine));
  auto* at = said.data() + sizeof(mine);
  for (const absl::Span<const int64_t> counts : {out, in}) {
    std::copy_n(reinterpret_cast<const std::byte*>(counts.data()), counts.size() * sizeof(int64_t),
                at);
    at += sizeof(int64_t) * static_cast<size_t>(ranks);
  }
  const NcclCall call = {.operation = mine.operation, .site = site};
  MOE_RETURN_IF_ERROR(
      Run(said, absl::MakeSpan(all), [&](std::byte* from, std::byte* to, Stream& s) {
        return lane_.Launch(call, s, [&](ncclComm_t comm, cudaStream_t stream) {
          return lane_.rank().api().ncclAllGather(from, to, bytes, ncclUint8, comm, stream);
        });
      }));
  MOE_RETURN_IF_ERROR(Compare(mine, all));
  std::vector<CallCard> cards(static_cast<size_t>(ranks));
  for (int r = 0; r < ranks; ++r) std::memcpy(&cards[r], all.data() + bytes * r, sizeof(CallCard));
  return cards;
}

// Every rank compares all with all, so that every rank finds the same.
absl::Status NcclHostSide::Compare(const CallCard& mine, absl::Span<const std::byte> all) const {
  const int ranks = lane_.size();
  const std::vector<int>& names = lane_.world_ranks();
  const size_t bytes = all.size() / static_cast<size_t>(ranks);
  const auto counts = [&](int rank, int side, int peer) {
    int64_t value = 0;
    std::memcpy(&value,
                all.data() + bytes * rank + sizeof(CallCard) +
                    sizeof(int64_t) * static_cast<size_t>(side * ranks + peer),
                sizeof(value));
    return value;
  };
  for (int r = 0; r < ranks; ++r) {
    CallCard other;
    std::memcpy(&other, all.data() + bytes * r, sizeof(other));
    const absl::Status same = CheckSame(mine, names[lane_.own()], other, names[r]);
    if (!same.ok()) return lane_.rank().Kill(same);
  }
  for (int r = 0; r < ranks; ++r) {
    for (int peer = 0; peer < ranks; ++peer) {
      if (counts(r, 1, peer) == counts(peer, 0, r)) continue;
      return lane_.rank().Kill(OtherSizeError(mine.operation, names[r], counts(r, 1, peer),
                                              names[peer], counts(peer, 0, r)));
    }
  }
  return absl::OkStatus();
}

}  // namespace moe
