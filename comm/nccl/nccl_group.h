// One rank's end of a group of NCCL ranks: what its communicator and the tasks in streams share.
#ifndef MOE_COMM_NCCL_NCCL_GROUP_H_
#define MOE_COMM_NCCL_NCCL_GROUP_H_

#include <cstdint>
#include <memory>
#include <vector>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "comm/communicator.h"
#include "comm/nccl/nccl_lane.h"
#include "comm/wait_report.h"
#include "kernels/base/buffer.h"
#include "kernels/base/stream.h"

namespace moe {

// A lane with a stream and device memory of its own, for operations over memory of the host. One
// thread at a time.
class NcclHostSide {
 public:
  // `work(send, recv, stream)`: a collective of device memory.
  using Work = absl::FunctionRef<absl::Status(std::byte*, std::byte*, Stream&)>;

  explicit NcclHostSide(NcclLane& lane) : lane_(lane) {}

  // Copies `send` to the device, runs `work` there, copies back what it received, and waits.
  absl::Status Run(absl::Span<const std::byte> send, absl::Span<std::byte> recv, Work work);

  // Every rank's card, once all have come; kInvalidArgument, which ends the world, if they
  // disagree. `out`, `in`: bytes to and from each rank, or empty; on the wire behind the card.
  absl::StatusOr<std::vector<CallCard>> RollCall(const CallCard& mine,
                                                 absl::Span<const int64_t> out,
                                                 absl::Span<const int64_t> in, const Site& site);

  // `work` sends and receives parts in device memory, each at a place of its own.
  absl::Status SendRecv(
      absl::Span<const SendRecvOp> ops,
      absl::FunctionRef<absl::Status(absl::Span<const SendRecvOp>, Stream&)> work);

 private:
  // Runs `task` and waits for what it has put into the stream.
  absl::Status WithStream(absl::FunctionRef<absl::Status(Stream&)> task);
  // Device memory of at least `bytes`; what it held is not kept.
  absl::StatusOr<std::byte*> Reserve(Buffer& buffer, int64_t bytes);
  absl::Status Compare(const CallCard& mine, absl::Span<const std::byte> all) const;

  NcclLane& lane_;
  Buffer send_, recv_;  // memory of the device
  std::unique_ptr<Stream> stream_;
};

// Operations over device memory in streams of its device, which return when they are enqueued.
class NcclGroup {
 public:
  NcclGroup(std::unique_ptr<NcclLane> of_streams, std::unique_ptr<NcclLane> of_host)
      : streams(std::move(of_streams)),
        host(std::move(of_host)),
        memory_of_streams(*streams),
        memory_of_host(*host) {}
  // Waits until the scratch is of no use any more; the watch, which lanes keep alive, ends a wait
  // for peers.
  ~NcclGroup();

  // Two NCCL communicators, since NCCL matches calls by their order: one for what is enqueued in
  // streams, one for what host threads wait in (Barrier, Split), possibly at the same time.
  const std::unique_ptr<NcclLane> streams, host;
  NcclHostSide memory_of_streams, memory_of_host;

  absl::Status Collective(const CollectiveCall& call, Stream& stream);
  absl::Status SendRecv(absl::Span<const SendRecvOp> ops, Stream& stream, const Site& site);
  absl::Status Fence(Stream& stream, const Site& site);

 private:
  // NCCL's own function for the call; no 16-bit sums, no AllToAllV.
  absl::Status Launch(const CollectiveCall& call, Stream& stream);
  // 16-bit types are summed in float32 and rounded once: NCCL's own sum would round at every rank.
  absl::Status SumInFloat32(const CollectiveCall& call, Stream& stream);
  // One group of sends and receives; empty ones are left out on both sides.
  absl::Status AllToAllV(const CollectiveCall& call, Stream& stream);
  absl::Status Exchange(const char* operation, absl::Span<const SendRecvOp> ops, Stream& stream,
                        const Site& site);
  // Scratch for `bytes` of work in `stream`, which waits until the last use of the scratch has
  // passed, in whichever stream that was.
  absl::StatusOr<std::byte*> Scratch(int64_t bytes, Stream& stream);
  // Marks the scratch as used by what `stream` holds so far, whatever the call returned. Peers are
  // in the call, so an error of this rank alone ends the world.
  absl::Status ScratchUsed(absl::Status status, Stream& stream);

  std::vector<Buffer> scratch_;  // the last one is in use; earlier ones were too small
  Event scratch_used_;
};

}  // namespace moe

#endif  // MOE_COMM_NCCL_NCCL_GROUP_H_
