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

using Bytes = absl::InlinedVector<int64_t, 16>;
using Posts = absl::Span<const LocalPost>;

// Ranks that together write more than this leave little of it in the caches (measured on 2 cores:
// streamed copies win from there on, even when the receiver then reads what came).
constexpr int64_t kStreamedBytes = int64_t{16} << 20;

// Of a reduction, between two signs of progress: kPartBytes of float64.
constexpr int64_t kPartElements = kPartBytes / 8;

CopyHint HintFor(int64_t bytes_per_rank, int ranks) {
  return bytes_per_rank * ranks >= kStreamedBytes ? CopyHint::kStreamed : CopyHint::kCached;
}

const std::byte* AsBytes(const void* p) {
  return static_cast<const std::byte*>(p);
}
std::byte* AsBytes(void* p) {
  return static_cast<std::byte*>(p);
}

// Rank r's part of `count` elements, cut at cache lines so that no two ranks write the same one
// (when the buffers are aligned).
int64_t PartBegin(int64_t count, int r, int ranks, DType type) {
  const int64_t line = 64 / SizeOf(type);
  const int64_t lines = (count + line - 1) / line;
  return std::min(count, lines * r / ranks * line);
}

class LocalCommunicator final : public Communicator {
 public:
  LocalCommunicator(std::shared_ptr<LocalGroup> group, int rank)
      : group_(std::move(group)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return group_->size(); }
  absl::string_view backend() const override { return "local"; }
  absl::Duration timeout() const override { return group_->timeout(); }
  absl::Status Barrier() override { return group_->Meet(LocalGroup::kHostLane, Caller("Barrier")); }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key) override;
  bool has_peer_memory(DeviceKind /*kind*/) const override { return true; }
  absl::StatusOr<std::shared_ptr<PeerBuffer>> AllocatePeerBuffer(int64_t bytes,
                                                                 MemoryResource& memory) override;
  void Abort(absl::Status reason) override {
    const int world_rank = group_->world_rank(rank_);
    group_->fate().Kill(world_rank, Caught([&] {
                          return absl::AbortedError(
                              absl::StrCat("rank ", world_rank, " aborted: ", reason.ToString()));
                        }));
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
  absl::Status DoSendRecv(SendRecvOps ops, Stream& stream) override;
  absl::Status DoFence(Stream& stream) override;

 private:
  // Taken on the host thread: the phase is that of the call, not of the moment it runs.
  LocalCaller Caller(const char* operation) const {
    return {.rank = rank_, .operation = operation, .phase = phase()};
  }

  const std::shared_ptr<LocalGroup> group_;  // shared with the tasks that are still in a stream
  const int rank_;
};

// Rank r sums part r of everyone's buffer, in rank order, and writes the result into all of them:
// every byte is read once and written once, and nobody else touches part r meanwhile.
absl::Status LocalCommunicator::DoAllReduce(void* inout, int64_t count, DType type, ReduceOp op,
                                            Stream& stream) {
  const LocalPost post{
      .operation = "AllReduce", .inout = AsBytes(inout), .count = count, .type = type, .op = op};
  return stream.Enqueue([group = group_, rank = rank_, caller = Caller("AllReduce"), post] {
    return group->Collective(caller, post, [&](Posts posts) {
      absl::InlinedVector<const std::byte*, 16> inputs;
      absl::InlinedVector<std::byte*, 16> outputs;
      for (const LocalPost& p : posts) {
        inputs.push_back(p.inout);
        outputs.push_back(p.inout);
      }
      const int ranks = group->size();
      const int64_t first = PartBegin(post.count, rank, ranks, post.type);
      const int64_t last = PartBegin(post.count, rank + 1, ranks, post.type);
      InParts(*group, caller, last - first, kPartElements, [&](int64_t begin, int64_t end) {
        ReduceInOrder(inputs, outputs, first + begin, first + end, post.type, post.op);
      });
      return absl::OkStatus();
    });
  });
}

absl::Status LocalCommunicator::DoReduceScatter(const void* send, void* recv, int64_t recv_count,
                                                DType type, ReduceOp op, Stream& stream) {
  const LocalPost post{.operation = "ReduceScatter",
                       .send = AsBytes(send),
                       .count = recv_count,
                       .type = type,
                       .op = op};
  return stream.Enqueue(
      [group = group_, rank = rank_, caller = Caller("ReduceScatter"), post, recv] {
        return group->Collective(caller, post, [&](Posts posts) {
          absl::InlinedVector<const std::byte*, 16> inputs;
          for (const LocalPost& p : posts) {
            inputs.push_back(p.send + rank * post.count * SizeOf(post.type));
          }
          std::byte* const output = AsBytes(recv);
          InParts(*group, caller, post.count, kPartElements, [&](int64_t begin, int64_t end) {
            ReduceInOrder(inputs, absl::MakeConstSpan(&output, 1), begin, end, post.type, post.op);
          });
          return absl::OkStatus();
        });
      });
}

absl::Status LocalCommunicator::DoAllGather(const void* send, void* recv, int64_t send_bytes,
                                            Stream& stream) {
  const LocalPost post{.operation = "AllGather", .send = AsBytes(send), .count = send_bytes};
  return stream.Enqueue([group = group_, rank = rank_, caller = Caller("AllGather"), post, recv] {
    return group->Collective(caller, post, [&](Posts posts) {
      const int ranks = group->size();
      const CopyHint hint = HintFor(post.count * ranks, ranks);
      for (int i = 0; i < ranks; ++i) {
        const int r = (rank + i) % ranks;  // ranks start at different peers: no hot spot
        CopyInParts(*group, caller, AsBytes(recv) + r * post.count, posts[r].send, post.count,
                    hint);
      }
      return absl::OkStatus();
    });
  });
}

absl::Status LocalCommunicator::DoAllToAllV(const void* send, absl::Span<const int64_t> send_bytes,
                                            void* recv, absl::Span<const int64_t> recv_bytes,
                                            Stream& stream) {
  struct Call {
    Bytes send_bytes, recv_bytes;
    LocalPost post;
  };
  Call call{.send_bytes = Bytes(send_bytes.begin(), send_bytes.end()),
            .recv_bytes = Bytes(recv_bytes.begin(), recv_bytes.end()),
            .post = {.operation = "AllToAllV", .send = AsBytes(send)}};
  return stream.Enqueue([group = group_, rank = rank_, caller = Caller("AllToAllV"),
                         call = std::move(call), recv]() mutable {
    call.post.send_bytes = call.send_bytes;
    return group->Collective(caller, call.post, [&](Posts posts) -> absl::Status {
      const int ranks = group->size();
      Bytes offsets(ranks);
      std::exclusive_scan(call.recv_bytes.begin(), call.recv_bytes.end(), offsets.begin(),
                          int64_t{0});
      const CopyHint hint = HintFor(offsets.back() + call.recv_bytes.back(), ranks);
      for (int i = 0; i < ranks; ++i) {
        const int r = (rank + i) % ranks;
        const absl::Span<const int64_t> theirs = posts[r].send_bytes;
        if (theirs[rank] != call.recv_bytes[r]) {
          return absl::InvalidArgumentError(absl::StrCat(
              "AllToAllV: rank ", group->world_rank(rank), " expects ", call.recv_bytes[r],
              " bytes from rank ", group->world_rank(r), ", which sends ", theirs[rank]));
        }
        const int64_t from = std::accumulate(theirs.begin(), theirs.begin() + rank, int64_t{0});
        if (theirs[rank] == 0) continue;
        CopyInParts(*group, caller, AsBytes(recv) + offsets[r], posts[r].send + from, theirs[rank],
                    hint);
      }
      return absl::OkStatus();
    });
  });
}

absl::Status LocalCommunicator::DoBroadcast(void* inout, int64_t bytes, int root, Stream& stream) {
  const LocalPost post{
      .operation = "Broadcast", .inout = AsBytes(inout), .count = bytes, .root = root};
  return stream.Enqueue([group = group_, rank = rank_, caller = Caller("Broadcast"), post] {
    return group->Collective(caller, post, [&](Posts posts) {
      if (rank != post.root) {
        CopyInParts(*group, caller, post.inout, posts[post.root].inout, post.count,
                    HintFor(post.count, group->size()));
      }
      return absl::OkStatus();
    });
  });
}

absl::Status LocalCommunicator::DoSendRecv(SendRecvOps ops, Stream& stream) {
  return stream.Enqueue([group = group_, caller = Caller("SendRecv"), ops = std::move(ops)] {
    return group->SendRecv(caller, ops);
  });
}

// Also orders CUDA streams, of one device or several. Communicator::Fence first waits until the
// rank's stream is idle, so a rank comes to the roll call with what it wrote complete and, as after
// every synchronisation with the host, visible to all devices, and with what it read of peers read.
// What another rank's host enqueues after the roll call, a read of that memory or the next write
// into what was read, begins later than all of it. No event between streams is needed.
absl::Status LocalCommunicator::DoFence(Stream& stream) {
  return stream.Enqueue([group = group_, caller = Caller("Fence")] {
    return group->Meet(LocalGroup::kStreamLane, caller);
  });
}

absl::StatusOr<std::unique_ptr<Communicator>> LocalCommunicator::Split(int color, int key) {
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

absl::StatusOr<std::shared_ptr<PeerBuffer>> LocalCommunicator::AllocatePeerBuffer(
    int64_t bytes, MemoryResource& memory) {
  if (bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("AllocatePeerBuffer: ", bytes, " bytes, expected >= 0"));
  }
  return AllocateLocalPeerBuffer(*group_, Caller("AllocatePeerBuffer"), bytes, memory);
}

}  // namespace

WatchedLocalWorld MakeWatchedLocalWorld(const LocalWorldOptions& options) {
  MOE_CHECK(options.ranks > 0);
  WatchedLocalWorld world{.ranks = {}, .fate = std::make_shared<LocalFate>()};
  std::vector<int> members(options.ranks);
  std::iota(members.begin(), members.end(), 0);
  const auto group = std::make_shared<LocalGroup>(world.fate, std::move(members), options.timeout);
  for (int r = 0; r < options.ranks; ++r) {
    world.ranks.push_back(std::make_unique<LocalCommunicator>(group, r));
  }
  return world;
}

std::vector<std::unique_ptr<Communicator>> MakeLocalWorld(const LocalWorldOptions& options) {
  return std::move(MakeWatchedLocalWorld(options).ranks);
}

}  // namespace moe
