// All-to-all, even and skewed: staged, direct and hierarchical.
#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "comm/copy.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/workspace.h"
#include "moe/cli/measure/collective_case.h"

namespace moe::measure {
namespace {

std::vector<int64_t> Times(absl::Span<const int64_t> counts, int64_t factor) {
  std::vector<int64_t> out(counts.begin(), counts.end());
  for (int64_t& value : out) value *= factor;
  return out;
}
}  // namespace

Traffic CollectiveCase::AllToAllTraffic(int64_t call) const {
  const int ranks = comm_.size();
  if (spec_.op == Op::kAllToAll) return EvenTraffic(ranks, BlockElements());
  return MakeTraffic(spec_.routing,
                     {.ranks = ranks,
                      .count = SpecElements(),
                      .num_experts = spec_.num_experts > 0 ? spec_.num_experts : 8 * ranks,
                      .seed = spec_.seed,
                      .call = call});
}

absl::Status CollectiveCase::SetupAllToAll() {
  const int ranks = comm_.size();
  const int me = comm_.rank();
  traffic_ = AllToAllTraffic(call_index_);
  size_elements_ = traffic_.Largest();
  count_ = spec_.op == Op::kAllToAll ? BlockElements() : size_elements_;
  const int64_t received = traffic_.Received(me);
  const int64_t sent = in_place() ? std::max(traffic_.Sent(me), received) : traffic_.Sent(me);
  MOE_ASSIGN_OR_RETURN(const std::shared_ptr<PeerBuffer> shared, ShareSent(sent * width()));
  MOE_RETURN_IF_ERROR(Allocate(shared == nullptr ? sent : 0, received));
  FillTagged(shared == nullptr ? host_send().span<std::byte>() : shared->local(), me, 0);
  std::vector<int> sources(ranks);
  std::iota(sources.begin(), sources.end(), 0);
  if (spec_.dispatch == DispatchAlgorithm::kHierarchical) {
    // Rows come by (local rank, node) of their source.
    const int node_size = nodes_.size;
    std::stable_sort(sources.begin(), sources.end(),
                     [&](int a, int b) { return a % node_size < b % node_size; });
  }
  int64_t place = 0;
  for (const int s : sources) {
    const auto before = traffic_.from(s).first(me);
    const int64_t first = std::accumulate(before.begin(), before.end(), int64_t{0});
    FillTagged(Elements(want_, place, traffic_.at(s, me)), s, first);
    place += traffic_.at(s, me);
  }
  if (spec_.dispatch == DispatchAlgorithm::kHierarchical && IsCuda(stream_)) {
    return absl::InvalidArgumentError(
        "CollectiveCase: hierarchical dispatch moves memory of the host, expected staged");
  }
  if (spec_.dispatch == DispatchAlgorithm::kHierarchical) return UseHierarchical();
  return shared == nullptr ? UseStaged() : UseDirect(shared);
}

absl::StatusOr<std::shared_ptr<PeerBuffer>> CollectiveCase::ShareSent(int64_t bytes) {
  if (spec_.dispatch != DispatchAlgorithm::kDirect || IsCuda(stream_) ||
      !comm_.has_peer_memory(DeviceKind::kCpu)) {
    return nullptr;
  }
  auto shared = comm_.AllocatePeerBuffer(bytes, CpuMemory(), site());
  if (absl::IsUnimplemented(shared.status())) return nullptr;
  return shared;
}

absl::Status CollectiveCase::UseStaged() {
  algorithm_ = "staged";
  const int me = comm_.rank();
  if (spec_.op == Op::kAllToAll) {
    call_ = [this] {
      return comm_.AllToAll<uint8_t>(SendBytes(), ResultBytes(), stream_, site());
    };
  } else {
    call_ = [this, bytes = traffic_.Sent(me) * width(), sent = Times(traffic_.from(me), width()),
             received = Times(traffic_.to(me), width())] {
      return comm_.AllToAllV<uint8_t>(SendBytes().first(bytes), sent, ResultBytes(), received,
                                      stream_, site());
    };
  }
  if (in_place()) ReturnInto(send_.data());
  return absl::OkStatus();
}

void CollectiveCase::ReturnInto(std::byte* home) {
  input_ = {home, static_cast<size_t>(traffic_.Sent(comm_.rank()) * width())};
  exchanged_ = result_;
  call_ = [this, home, exchange = std::move(call_)]() -> absl::Status {
    result_ = exchanged_;
    MOE_RETURN_IF_ERROR(exchange());
    exchanged_ = result_;
    result_ = {home, exchanged_.size()};
    return stream_.CopyBytes(exchanged_.data(), home, static_cast<int64_t>(exchanged_.size()));
  };
}

absl::Status CollectiveCase::UseDirect(std::shared_ptr<PeerBuffer> shared) {
  algorithm_ = "direct";
  const int ranks = comm_.size();
  const int me = comm_.rank();
  struct Piece {
    int from;
    int64_t offset, to, bytes;
  };
  std::vector<Piece> pieces;
  int64_t place = 0;
  for (int s = 0; s < ranks; ++s) {
    const auto before = traffic_.from(s).first(me);
    const int64_t offset = std::accumulate(before.begin(), before.end(), int64_t{0});
    pieces.push_back({s, offset * width(), place * width(), traffic_.at(s, me) * width()});
    place += traffic_.at(s, me);
  }
  // Ranks start at different peers, so that none is read by all at once.
  std::rotate(pieces.begin(), pieces.begin() + me, pieces.end());
  call_ = [this, shared, pieces]() -> absl::Status {
    MOE_RETURN_IF_ERROR(comm_.Fence(stream_, site()));
    MOE_RETURN_IF_ERROR(stream_.Enqueue([this, &shared, &pieces] {
      for (const Piece& piece : pieces) {
        CopyBytes(recv_.data() + piece.to, shared->peer(piece.from) + piece.offset, piece.bytes);
      }
      return absl::OkStatus();
    }));
    MOE_RETURN_IF_ERROR(comm_.Fence(stream_, site()));
    return stream_.Synchronize();
  };
  if (in_place()) ReturnInto(shared->local().data());
  return absl::OkStatus();
}

absl::Status CollectiveCase::UseHierarchical() {
  // The exchange moves rows of float32 or bf16: any element is a row of one bf16 or some float32.
  return width() == 2 ? UseHierarchicalAs<BFloat16>() : UseHierarchicalAs<float>();
}

template <typename U>
absl::Status CollectiveCase::UseHierarchicalAs() {
  algorithm_ = "hierarchical";
  const int ranks = comm_.size();
  const int node_size = nodes_.size;
  if (ranks % node_size != 0) {
    return absl::InvalidArgumentError(absl::StrCat("CollectiveCase: node size ", node_size,
                                                   ", expected a divisor of the ", ranks,
                                                   " ranks for hierarchical dispatch"));
  }
  if (exchange_ == nullptr) {
    MOE_ASSIGN_OR_RETURN(TwoHopExchange made, TwoHopExchange::Create(comm_, node_size));
    exchange_ = std::make_shared<TwoHopExchange>(std::move(made));
  }
  const auto workspace = std::make_shared<Workspace>();
  const int64_t cols = width() / static_cast<int64_t>(sizeof(U));
  const MatrixView<const U> send(reinterpret_cast<const U*>(send_.data()),
                                 traffic_.Sent(comm_.rank()), cols);
  // The result stays in the workspace, where the next call takes the same places again.
  call_ = [this, workspace, send]() -> absl::Status {
    workspace->Release({});
    const auto rows = [this](int s, int d) {
      return traffic_.at(s, d);
    };
    MOE_ASSIGN_OR_RETURN(
        const auto received,
        exchange_->Send<U>(send, rows, {[](int, int64_t) {}, *workspace, stream_, site()}));
    MOE_RETURN_IF_ERROR(stream_.Synchronize());
    result_ = {reinterpret_cast<std::byte*>(received.data()),
               static_cast<size_t>(received.rows() * received.cols()) * sizeof(U)};
    return absl::OkStatus();
  };
  if (in_place()) ReturnInto(send_.data());
  return absl::OkStatus();
}

}  // namespace moe::measure
