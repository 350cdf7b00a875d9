#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include <absl/container/inlined_vector.h>
#include <absl/strings/str_cat.h>

#include "comm/local/local_group.h"
#include "comm/local/local_world.h"
#include "comm/reduce.h"
#include "comm/wait_report.h"
#include "kernels/base/buffer.h"
#include "kernels/base/caught.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

using Posts = absl::Span<const LocalPost>;

// Ranks that together write more than this leave little of it in the caches (measured on 2 cores:
// streamed copies win from there on, even when the receiver then reads what came).
constexpr int64_t kStreamedBytes = int64_t{16} << 20;

// Elements that a reduction sums between two signs of progress: kPartBytes of float64.
constexpr int64_t kPartElements = kPartBytes / 8;

CopyHint HintFor(size_t bytes_per_rank, int ranks) {
  return static_cast<int64_t>(bytes_per_rank) * ranks >= kStreamedBytes ? CopyHint::kStreamed
                                                                        : CopyHint::kCached;
}

// Rank r's part of `count` elements, cut at cache lines so that no two ranks write the same one
// (when the buffers are aligned).
int64_t PartBegin(int64_t count, int r, int ranks, DType type) {
  const int64_t line = 64 / SizeOf(type);
  const int64_t lines = (count + line - 1) / line;
  return std::min(count, lines * r / ranks * line);
}

// What one rank does in a collective when all ranks have arrived.
class Share {
 public:
  Share(LocalGroup& group, const LocalCaller& caller, const CollectiveCall& call)
      : group_(group), caller_(caller), call_(call), ranks_(group.size()), rank_(caller.rank) {}

  absl::Status Run(Posts posts) {
    switch (call_.kind) {
      case CollectiveKind::kAllReduce:
        AllReduce(posts);
        return absl::OkStatus();
      case CollectiveKind::kReduceScatter:
      case CollectiveKind::kReduceScatterV:
        return ReduceScatter(posts);
      case CollectiveKind::kBroadcast:
        Broadcast(posts);
        return absl::OkStatus();
      default:
        return AllToAllV(posts);
    }
  }

 private:
  using Inputs = absl::InlinedVector<const std::byte*, 16>;

  // Sums part r of everyone's buffer on rank r, in rank order, and writes the result into all of
  // them: every byte is read once and written once, and nobody else touches part r meanwhile.
  void AllReduce(Posts posts) {
    Inputs inputs;
    absl::InlinedVector<std::byte*, 16> outputs;
    for (const LocalPost& post : posts) {
      inputs.push_back(post.inout);
      outputs.push_back(post.inout);
    }
    const int64_t first = PartBegin(call_.count(), rank_, ranks_, call_.type);
    const int64_t last = PartBegin(call_.count(), rank_ + 1, ranks_, call_.type);
    InParts(group_, caller_, last - first, kPartElements, [&](int64_t begin, int64_t end) {
      ReduceInOrder(inputs, outputs, first + begin, first + end, call_.type, call_.op);
    });
  }

  absl::Status ReduceScatter(Posts posts) {
    Inputs inputs;
    for (int r = 0; r < ranks_; ++r) {
      MOE_RETURN_IF_ERROR(CheckSent(r, posts[r]));
      inputs.push_back(posts[r].send + OwnPart(posts[r]));
    }
    std::byte* const output = call_.recv.data();
    const int64_t count = static_cast<int64_t>(call_.recv.size()) / SizeOf(call_.type);
    InParts(group_, caller_, count, kPartElements, [&](int64_t begin, int64_t end) {
      ReduceInOrder(inputs, absl::MakeConstSpan(&output, 1), begin, end, call_.type, call_.op);
    });
    return absl::OkStatus();
  }

  // A gather sends one part to all.
  absl::Status AllToAllV(Posts posts) {
    const RankCounts& expected = call_.recv_counts;
    RankCounts offsets(expected.size());
    std::exclusive_scan(expected.begin(), expected.end(), offsets.begin(), int64_t{0});
    const CopyHint hint = HintFor(call_.recv.size(), ranks_);
    for (int i = 0; i < ranks_; ++i) {
      const int r = (rank_ + i) % ranks_;  // ranks start at different peers: no hot spot
      MOE_RETURN_IF_ERROR(CheckSent(r, posts[r]));
      if (expected[r] == 0) continue;
      const int64_t from = call_.gathers() ? 0 : OwnPart(posts[r]);
      CopyInParts(group_, caller_, call_.recv.data() + offsets[r], posts[r].send + from,
                  expected[r], hint);
    }
    return absl::OkStatus();
  }

  // Whether rank r sends as much as this one expects.
  absl::Status CheckSent(int r, const LocalPost& post) const {
    const int64_t sent = post.send_bytes[rank_], expected = call_.recv_counts[r];
    if (sent == expected) return absl::OkStatus();
    return OtherSizeError(caller_.operation, group_.world_rank(rank_), expected,
                          group_.world_rank(r), sent);
  }

  // Where the part for this rank begins, in bytes.
  int64_t OwnPart(const LocalPost& post) const {
    return std::accumulate(post.send_bytes.begin(), post.send_bytes.begin() + rank_, int64_t{0});
  }

  void Broadcast(Posts posts) {
    if (rank_ == call_.root) return;
    CopyInParts(group_, caller_, call_.recv.data(), posts[call_.root].inout, call_.count(),
                HintFor(call_.recv.size(), ranks_));
  }

  LocalGroup& group_;
  const LocalCaller& caller_;
  const CollectiveCall& call_;
  const int ranks_, rank_;
};

class LocalCommunicator final : public Communicator {
 public:
  LocalCommunicator(std::shared_ptr<LocalGroup> group, int rank)
      : group_(std::move(group)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return group_->size(); }
  absl::string_view backend() const override { return "local"; }
  absl::Duration timeout() const override { return group_->timeout(); }
  int64_t lingered_ns() const override { return group_->lingered_ns(rank_); }
  int world_rank(int r) const override { return group_->world_rank(r); }
  bool has_peer_memory(DeviceKind /*kind*/) const override { return true; }
  void Abort(absl::Status reason) override {
    const int world_rank = group_->world_rank(rank_);
    group_->fate().Kill(world_rank, Caught([&] {
                          return absl::AbortedError(
                              absl::StrCat("rank ", world_rank, " aborted: ", reason.ToString()));
                        }));
  }

 protected:
  absl::Status DoCollective(CollectiveCall call, Stream& stream) override;
  absl::Status DoSendRecv(SendRecvOps ops, Stream& stream, const Site& site) override;
  absl::Status DoFence(Stream& stream, const Site& site) override;
  absl::Status DoBarrier() override {
    return group_->Meet(LocalGroup::kHostLane, Caller("Barrier"));
  }
  absl::StatusOr<std::unique_ptr<Communicator>> DoSplit(int color, int key) override;
  absl::StatusOr<std::shared_ptr<PeerBuffer>> DoAllocatePeerBuffer(int64_t bytes,
                                                                   MemoryResource& memory,
                                                                   const Site& site) override;

 private:
  LocalCaller Caller(const char* operation, const Site& site = {}) const {
    return {.rank = rank_, .operation = operation, .site = site};
  }

  const std::shared_ptr<LocalGroup> group_;  // shared with the tasks that are still in a stream
  const int rank_;
};

absl::Status LocalCommunicator::DoCollective(CollectiveCall call, Stream& stream) {
  return stream.Enqueue(
      [group = group_, caller = Caller(NameOf(call.kind), call.site), call = std::move(call)] {
        const LocalPost post{.operation = caller.operation,
                             .send = call.send.data(),
                             .inout = call.recv.data(),
                             .count = call.count(),
                             .type = call.type,
                             .op = call.op,
                             .root = call.root,
                             .send_bytes = call.send_counts};
        return group->Collective(
            caller, post, [&](Posts posts) { return Share(*group, caller, call).Run(posts); });
      });
}

absl::Status LocalCommunicator::DoSendRecv(SendRecvOps ops, Stream& stream, const Site& site) {
  return stream.Enqueue([group = group_, caller = Caller("SendRecv", site), ops = std::move(ops)] {
    return group->SendRecv(caller, ops);
  });
}

// Also orders CUDA streams, of one device or several. Communicator::Fence first waits until the
// rank's stream is idle, so a rank comes to the roll call with what it wrote complete and, as after
// every synchronisation with the host, visible to all devices, and with what it read of peers read.
// What another rank's host enqueues after the roll call, a read of that memory or the next write
// into what was read, begins later than all of it. No event between streams is needed.
absl::Status LocalCommunicator::DoFence(Stream& stream, const Site& site) {
  return stream.Enqueue([group = group_, caller = Caller("Fence", site)] {
    return group->Meet(LocalGroup::kStreamLane, caller);
  });
}

absl::StatusOr<std::unique_ptr<Communicator>> LocalCommunicator::DoSplit(int color, int key) {
  struct Slot {
    CallCard card;
    std::shared_ptr<LocalGroup> group;
    int rank = 0;
  };
  Slot mine;
  MOE_ASSIGN_OR_RETURN(mine.card, SplitCard(color, key));
  const LocalCaller caller = Caller("Split");
  MOE_RETURN_IF_ERROR(group_->HostExchange(caller, &mine, [&](absl::Span<void* const> all) {
    std::vector<CallCard> cards;
    for (void* const slot : all) cards.push_back(static_cast<Slot*>(slot)->card);
    const std::vector<int> members = MembersOf(color, cards);
    if (color < 0 || members.front() != rank_) return;  // one rank of each color makes its group
    std::vector<int> world_ranks;
    for (const int r : members) world_ranks.push_back(group_->world_rank(r));
    const auto group =
        std::make_shared<LocalGroup>(group_->shared_fate(), world_ranks, group_->timeout());
    for (size_t i = 0; i < members.size(); ++i) {
      auto& slot = *static_cast<Slot*>(all[members[i]]);
      slot.group = group;
      slot.rank = static_cast<int>(i);
    }
  }));
  if (mine.group == nullptr) return nullptr;
  return std::make_unique<LocalCommunicator>(std::move(mine.group), mine.rank);
}

absl::StatusOr<std::shared_ptr<PeerBuffer>> LocalCommunicator::DoAllocatePeerBuffer(
    int64_t bytes, MemoryResource& memory, const Site& site) {
  return AllocateLocalPeerBuffer(*group_, Caller("AllocatePeerBuffer", site), bytes, memory);
}

}  // namespace

std::vector<std::unique_ptr<Communicator>> MakeLocalWorld(const LocalWorldOptions& options) {
  MOE_CHECK(options.ranks > 0);
  std::vector<int> members(options.ranks);
  std::iota(members.begin(), members.end(), 0);
  const auto group = std::make_shared<LocalGroup>(
      options.fate != nullptr ? options.fate : std::make_shared<LocalFate>(), std::move(members),
      options.timeout);
  std::vector<std::unique_ptr<Communicator>> world;
  for (int r = 0; r < options.ranks; ++r) {
    world.push_back(std::make_unique<LocalCommunicator>(group, r));
  }
  return world;
}

}  // namespace moe
