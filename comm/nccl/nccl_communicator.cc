#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>

#include "comm/local/local_group.h"
#include "comm/nccl/nccl_group.h"
#include "comm/nccl/nccl_world.h"
#include "comm/wait_report.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

// The host lane moves a few hundred bytes: its kernels leave the GPU to others.
constexpr int kHostLaneBlocks = 1;
// Of the streams' lane, unless NCCL_MAX_CTAS is set, which NCCL prefers to a communicator's own
// bound. A power of two, because NCCL rounds the channels of sends and receives up to one.
constexpr int kStreamLaneBlocks = 16, kMostBlocks = 64;

int StreamLaneBlocks() {
  const char* const given = std::getenv("NCCL_MAX_CTAS");
  int blocks = 0;
  if (given == nullptr || !absl::SimpleAtoi(given, &blocks) || blocks < 1) return kStreamLaneBlocks;
  return std::min(blocks, kMostBlocks);
}

class NcclCommunicator final : public Communicator {
 public:
  explicit NcclCommunicator(std::shared_ptr<NcclGroup> group) : group_(std::move(group)) {}

  int rank() const override { return group_->streams->own(); }
  int size() const override { return group_->streams->size(); }
  absl::string_view backend() const override { return "nccl"; }
  absl::Duration timeout() const override { return shared().timeout(); }
  std::optional<Device> device() const override {
    return Device{DeviceKind::kCuda, shared().device()};
  }
  int kernel_blocks() const override { return size() > 1 ? shared().stream_lane_blocks() : 0; }
  bool moves(DeviceKind) const override { return true; }
  int world_rank(int r) const override { return group_->host->world_ranks()[r]; }
  void Abort(absl::Status reason) override {
    (void)shared().Kill(absl::AbortedError(
        absl::StrCat("rank ", shared().world_rank(), " aborted: ", reason.ToString())));
  }

 protected:
  absl::Status DoCollective(CollectiveCall call, Stream& stream) override;
  absl::Status DoSendRecv(SendRecvOps ops, Stream& stream, const Site& site) override;
  absl::Status DoFence(Stream& stream, const Site& site) override;
  absl::Status DoBarrier() override {
    return group_->memory_of_host.RollCall(CardOf("Barrier"), {}, {}, {}).status();
  }
  absl::StatusOr<std::unique_ptr<Communicator>> DoSplit(int color, int key) override;

 private:
  NcclRank& shared() const { return group_->streams->rank(); }

  const std::shared_ptr<NcclGroup> group_;  // shared with the tasks that are still in a CPU stream
};

absl::Status NcclCommunicator::DoCollective(CollectiveCall call, Stream& stream) {
  if (IsCuda(stream)) return group_->Collective(call, stream);
  // In a task of a CPU stream: the roll call, then device copies of what lies on the host.
  return stream.Enqueue([group = group_, call = std::move(call)]() mutable -> absl::Status {
    NcclHostSide& host_side = group->memory_of_streams;
    const absl::Span<const std::byte> send = call.send;
    const absl::Span<std::byte> recv = call.recv;
    MOE_RETURN_IF_ERROR(
        host_side.RollCall(CardOf(call), call.send_counts, call.recv_counts, call.site).status());
    if (send.empty() && recv.empty()) return absl::OkStatus();
    return host_side.Run(send, recv, [&](std::byte* from, std::byte* to, Stream& own) {
      call.send = {from, send.size()};
      call.recv = {to, recv.size()};
      return group->Collective(call, own);
    });
  });
}

absl::Status NcclCommunicator::DoSendRecv(SendRecvOps ops, Stream& stream, const Site& site) {
  if (IsCuda(stream)) return group_->SendRecv(ops, stream, site);
  // Without a roll call: not every rank need come.
  return stream.Enqueue([group = group_, site, ops = std::move(ops)] {
    return group->memory_of_streams.SendRecv(
        ops, [&](absl::Span<const SendRecvOp> on_device, Stream& s) {
          return group->SendRecv(on_device, s, site);
        });
  });
}

absl::Status NcclCommunicator::DoFence(Stream& stream, const Site& site) {
  if (IsCuda(stream)) return group_->Fence(stream, site);
  return stream.Enqueue([group = group_, site] {
    return group->memory_of_streams.RollCall(CardOf("Fence"), {}, {}, site).status();
  });
}

absl::StatusOr<std::unique_ptr<Communicator>> NcclCommunicator::DoSplit(int color, int key) {
  MOE_ASSIGN_OR_RETURN(const CallCard mine, SplitCard(color, key));
  // NCCL has no deadline of its own here that names anybody: it starts when all are known to be
  // there.
  MOE_ASSIGN_OR_RETURN(const std::vector<CallCard> all,
                       group_->memory_of_host.RollCall(mine, {}, {}, {}));
  std::vector<int> members = MembersOf(color, all);
  const auto own =
      static_cast<int>(std::find(members.begin(), members.end(), rank()) - members.begin());
  for (int& member : members) member = group_->host->world_ranks()[member];
  const NcclCall call = {.operation = "Split"};
  NcclLane& parent = *group_->host;
  MOE_ASSIGN_OR_RETURN(auto streams,
                       parent.Split(call, color, members, own, shared().stream_lane_blocks()));
  MOE_ASSIGN_OR_RETURN(auto host, parent.Split(call, color, members, own, kHostLaneBlocks));
  if (color < 0) return nullptr;
  return std::make_unique<NcclCommunicator>(
      std::make_shared<NcclGroup>(std::move(streams), std::move(host)));
}

}  // namespace

bool HasNccl() {
  return true;
}

absl::StatusOr<std::string> NcclVersion() {
  MOE_RETURN_IF_ERROR(NcclLibrary().status());
  return NcclVersionOf(*NcclLibrary());
}

absl::StatusOr<NcclId> MakeNcclId() {
  static_assert(sizeof(NcclId) == sizeof(ncclUniqueId));
  MOE_RETURN_IF_ERROR(NcclVersion().status());
  const NcclApi& api = *NcclLibrary();
  ncclUniqueId made;
  MOE_RETURN_IF_ERROR(NcclStatus(api, api.ncclGetUniqueId(&made), "MakeNcclId"));
  NcclId id;
  std::memcpy(id.data(), &made, sizeof(made));
  return id;
}

absl::StatusOr<std::unique_ptr<Communicator>> MakeNcclCommunicator(const NcclRankOptions& options) {
  if (options.size < 1 || options.rank < 0 || options.rank >= options.size) {
    return absl::InvalidArgumentError(absl::StrCat("MakeNcclCommunicator: rank ", options.rank,
                                                   " of ", options.size,
                                                   ", expected 0 <= rank < size"));
  }
  MOE_RETURN_IF_ERROR(NcclVersion().status());
  const NcclApi& api = *NcclLibrary();
  // Says what is missing where there is no driver or no such device.
  MOE_RETURN_IF_ERROR(MakeStream({DeviceKind::kCuda, options.device}).status());
  const auto rank = std::make_shared<NcclRank>(
      api, options.device, options.rank, options.timeout, StreamLaneBlocks(),
      options.fate != nullptr ? options.fate : std::make_shared<LocalFate>());
  std::vector<int> world_ranks(static_cast<size_t>(options.size));
  std::iota(world_ranks.begin(), world_ranks.end(), 0);
  ncclUniqueId id;
  std::memcpy(&id, options.id.data(), sizeof(id));
  const NcclCall joining = {.operation = "joining NCCL",
                            .timeout = options.join_timeout.value_or(options.timeout)};
  MOE_ASSIGN_OR_RETURN(auto streams, NcclLane::Join(rank, id, joining, world_ranks, options.rank,
                                                    rank->stream_lane_blocks()));
  MOE_ASSIGN_OR_RETURN(auto host,
                       streams->Split(joining, 0, world_ranks, options.rank, kHostLaneBlocks));
  return std::make_unique<NcclCommunicator>(
      std::make_shared<NcclGroup>(std::move(streams), std::move(host)));
}

}  // namespace moe
