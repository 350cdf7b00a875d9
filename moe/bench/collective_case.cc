#include "moe/bench/collective_case.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "comm/copy.h"
#include "dispatch/two_hop_exchange.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/workspace.h"

namespace moe::bench {
namespace {

// A result that was never written is this, which no exact sum is and hardly a tag.
constexpr int kPoison = 0xa5;

// Bits that name an element of a rank's send buffer (splitmix64's mixing of source and index).
uint64_t Tag(int source, int64_t index) {
  uint64_t x =
      (static_cast<uint64_t>(source) << 48 | static_cast<uint64_t>(index)) + 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Element i of rank r's input to a sum. 61 is prime: blocks of any size differ from each other.
int64_t Term(int rank, int64_t i) {
  return (int64_t{7} * rank + i) % 61;
}

template <typename T>
T Exact(int64_t value) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return BFloat16(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

int64_t SumOfTerms(int ranks, int64_t i) {
  int64_t sum = 0;
  for (int r = 0; r < ranks; ++r) sum += Term(r, i);
  return sum;
}

absl::Span<const uint8_t> In(const Buffer& buffer, int64_t bytes) {
  return buffer.span<const uint8_t>().first(bytes);
}
absl::Span<uint8_t> Out(const Buffer& buffer, int64_t bytes) {
  return buffer.span<uint8_t>().first(bytes);
}

std::vector<int64_t> Times(absl::Span<const int64_t> counts, int64_t factor) {
  std::vector<int64_t> out(counts.begin(), counts.end());
  for (int64_t& value : out) value *= factor;
  return out;
}

const char* AlgorithmName(AllReduceAlgorithm algorithm) {
  if (algorithm == AllReduceAlgorithm::kRing) return "ring";
  return algorithm == AllReduceAlgorithm::kDirect ? "direct" : "library";
}

// `each` elements between every two ranks and inside every rank.
Traffic EvenTraffic(int ranks, int64_t each) {
  Traffic traffic(ranks);
  for (int s = 0; s < ranks; ++s) {
    for (int d = 0; d < ranks; ++d) traffic.at(s, d) = each;
  }
  return traffic;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CollectiveCase>> CollectiveCase::Create(const CaseSpec& spec,
                                                                       Communicator& comm,
                                                                       Stream& stream) {
  if (spec.dtype == DType::kFloat16 || spec.dtype == DType::kUInt8) {
    return absl::InvalidArgumentError(absl::StrCat("CollectiveCase: type ", moe::NameOf(spec.dtype),
                                                   ", expected f32, f64, bf16, i32 or i64"));
  }
  std::unique_ptr<CollectiveCase> made(new CollectiveCase(spec, comm, stream));
  MOE_RETURN_IF_ERROR(made->Setup());
  return made;
}

absl::Status CollectiveCase::Setup() {
  const auto reduction = [this](auto type) {
    using T = decltype(type);
    return spec_.op == Op::kAllReduce ? SetupAllReduce<T>() : SetupReduceScatter<T>();
  };
  switch (spec_.op) {
    case Op::kAllToAll:
    case Op::kAllToAllV:
      return SetupAllToAll();
    case Op::kAllGather:
      return SetupAllGather();
    case Op::kPointToPoint:
      return SetupPointToPoint();
    case Op::kMemcpy:
      return SetupMemcpy();
    case Op::kAllReduce:
    case Op::kReduceScatter:
      break;
  }
  switch (spec_.dtype) {
    case DType::kFloat64:
      return reduction(double{});
    case DType::kBFloat16:
      return reduction(BFloat16{});
    case DType::kInt32:
      return reduction(int32_t{});
    case DType::kInt64:
      return reduction(int64_t{});
    default:
      return reduction(float{});
  }
}

int64_t CollectiveCase::BlockElements() const {
  return std::max<int64_t>(1, SpecElements() / comm_.size());
}

absl::Status CollectiveCase::Allocate(int64_t send_elements, int64_t result_elements) {
  MOE_ASSIGN_OR_RETURN(send_, Buffer::Allocate(send_elements * width()));
  MOE_ASSIGN_OR_RETURN(recv_, Buffer::Allocate(result_elements * width()));
  MOE_ASSIGN_OR_RETURN(want_, Buffer::Allocate(result_elements * width()));
  result_ = Elements(recv_, 0, result_elements);
  return absl::OkStatus();
}

// Elements first, first + 1, ... of rank `source`'s send buffer.
void CollectiveCase::FillTagged(absl::Span<std::byte> to, int source, int64_t first) const {
  const auto bytes = static_cast<size_t>(width());
  const int64_t count = static_cast<int64_t>(to.size()) / width();
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t tag = Tag(source, first + i);
    std::memcpy(to.data() + i * width(), &tag, bytes);
  }
}

absl::Status CollectiveCase::SetupAllToAll() {
  const int ranks = comm_.size();
  const int me = comm_.rank();
  if (spec_.op == Op::kAllToAll) {
    traffic_ = EvenTraffic(ranks, BlockElements());
  } else {
    traffic_ = MakeTraffic(spec_.routing,
                           {.ranks = ranks,
                            .count = SpecElements(),
                            .num_experts = spec_.num_experts > 0 ? spec_.num_experts : 8 * ranks,
                            .seed = spec_.seed});
  }
  size_elements_ = traffic_.Largest();
  count_ = spec_.op == Op::kAllToAll ? BlockElements() : size_elements_;
  MOE_RETURN_IF_ERROR(Allocate(traffic_.Sent(me), traffic_.Received(me)));
  FillTagged(send_.span<std::byte>(), me, 0);
  std::vector<int> sources(ranks);
  std::iota(sources.begin(), sources.end(), 0);
  if (spec_.dispatch == DispatchAlgorithm::kHierarchical) {
    // Rows come by (local rank, node) of their source.
    const int node_size = spec_.node_size > 0 ? spec_.node_size : ranks;
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
  if (spec_.dispatch == DispatchAlgorithm::kHierarchical) return UseHierarchical();
  const bool direct = spec_.dispatch == DispatchAlgorithm::kDirect && comm_.has_peer_memory();
  return direct ? UseDirect() : UseStaged();
}

absl::Status CollectiveCase::UseStaged() {
  algorithm_ = "staged";
  const int me = comm_.rank();
  if (spec_.op == Op::kAllToAll) {
    call_ = [this] {
      return comm_.AllToAll<uint8_t>(In(send_, send_.bytes()), Out(recv_, recv_.bytes()), stream_);
    };
    return absl::OkStatus();
  }
  call_ = [this, sent = Times(traffic_.from(me), width()),
           received = Times(traffic_.to(me), width())] {
    return comm_.AllToAllV<uint8_t>(In(send_, send_.bytes()), sent, Out(recv_, recv_.bytes()),
                                    received, stream_);
  };
  return absl::OkStatus();
}

absl::Status CollectiveCase::UseDirect() {
  algorithm_ = "direct";
  const int ranks = comm_.size();
  const int me = comm_.rank();
  MOE_ASSIGN_OR_RETURN(std::shared_ptr<PeerBuffer> shared, comm_.AllocatePeerBuffer(send_.bytes()));
  CopyBytes(shared->local().data(), send_.data(), send_.bytes());
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
    MOE_RETURN_IF_ERROR(comm_.Fence(stream_));
    MOE_RETURN_IF_ERROR(stream_.Enqueue([this, &shared, &pieces] {
      for (const Piece& piece : pieces) {
        CopyBytes(recv_.data() + piece.to, shared->peer(piece.from) + piece.offset, piece.bytes);
      }
      return absl::OkStatus();
    }));
    MOE_RETURN_IF_ERROR(comm_.Fence(stream_));
    return stream_.Synchronize();
  };
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
  const int node_size = spec_.node_size > 0 ? spec_.node_size : ranks;
  if (ranks % node_size != 0) {
    return absl::InvalidArgumentError(absl::StrCat("CollectiveCase: node size ", node_size,
                                                   ", expected a divisor of the ", ranks,
                                                   " ranks for hierarchical dispatch"));
  }
  MOE_ASSIGN_OR_RETURN(TwoHopExchange made, TwoHopExchange::Create(comm_, node_size));
  const auto exchange = std::make_shared<TwoHopExchange>(std::move(made));
  const auto workspace = std::make_shared<Workspace>();
  const int64_t cols = width() / static_cast<int64_t>(sizeof(U));
  const MatrixView<const U> send(reinterpret_cast<const U*>(send_.data()),
                                 traffic_.Sent(comm_.rank()), cols);
  // The result stays in the workspace, where the next call takes the same places again.
  call_ = [this, exchange, workspace, send]() -> absl::Status {
    workspace->Release({});
    const auto rows = [this](int s, int d) {
      return traffic_.at(s, d);
    };
    MOE_ASSIGN_OR_RETURN(const auto received,
                         exchange->Out<U>(
                             send, rows, [](int, int64_t) {}, *workspace, stream_));
    MOE_RETURN_IF_ERROR(stream_.Synchronize());
    result_ = {reinterpret_cast<std::byte*>(received.data()),
               static_cast<size_t>(received.rows() * received.cols()) * sizeof(U)};
    return absl::OkStatus();
  };
  return absl::OkStatus();
}

absl::Status CollectiveCase::SetupAllGather() {
  const int ranks = comm_.size();
  const int64_t block = BlockElements();
  algorithm_ = "library";
  if (comm_.backend() == "local") algorithm_ = "direct";
  if (comm_.backend() == "mpi") algorithm_ = "pairwise";
  traffic_ = EvenTraffic(ranks, block);
  size_elements_ = ranks * block;
  count_ = block;
  MOE_RETURN_IF_ERROR(Allocate(block, ranks * block));
  FillTagged(send_.span<std::byte>(), comm_.rank(), 0);
  for (int s = 0; s < ranks; ++s) FillTagged(Elements(want_, s * block, block), s, 0);
  call_ = [this] {
    return comm_.AllGather<uint8_t>(In(send_, send_.bytes()), Out(recv_, recv_.bytes()), stream_);
  };
  return absl::OkStatus();
}

template <typename T>
absl::Status CollectiveCase::SetupReduceScatter() {
  const int ranks = comm_.size();
  const int me = comm_.rank();
  const int64_t block = BlockElements();
  algorithm_ = comm_.backend() == "local" ? "direct" : "pairwise";
  traffic_ = EvenTraffic(ranks, block);
  size_elements_ = ranks * block;
  count_ = block;
  MOE_RETURN_IF_ERROR(Allocate(ranks * block, block));
  for (int64_t i = 0; i < ranks * block; ++i) send_.span<T>()[i] = Exact<T>(Term(me, i));
  for (int64_t i = 0; i < block; ++i) {
    want_.span<T>()[i] = Exact<T>(SumOfTerms(ranks, me * block + i));
  }
  call_ = [this, ranks, block] {
    return comm_.ReduceScatter<T>(send_.span<const T>().first(ranks * block),
                                  recv_.span<T>().first(block), ReduceOp::kSum, stream_);
  };
  return absl::OkStatus();
}

template <typename T>
absl::Status CollectiveCase::SetupAllReduce() {
  const int ranks = comm_.size();
  const int64_t count = std::max<int64_t>(1, SpecElements());
  algorithm_ = AlgorithmName(spec_.all_reduce);
  size_elements_ = count_ = count;
  in_place_ = true;
  MOE_RETURN_IF_ERROR(Allocate(count, count));
  for (int64_t i = 0; i < count; ++i) {
    send_.span<T>()[i] = Exact<T>(Term(comm_.rank(), i));
    want_.span<T>()[i] = Exact<T>(SumOfTerms(ranks, i));
  }
  traffic_ =
      EvenTraffic(ranks, spec_.all_reduce == AllReduceAlgorithm::kDirect ? 2 * count / ranks : 0);
  if (spec_.all_reduce == AllReduceAlgorithm::kRing) {
    for (int r = 0; r < ranks; ++r) {
      traffic_.at(r, (r + 1) % ranks) = 2 * count * (ranks - 1) / ranks;
    }
  }
  traffic_known_ = spec_.all_reduce != AllReduceAlgorithm::kLibrary;
  MOE_ASSIGN_OR_RETURN(std::unique_ptr<AllReducer> made,
                       AllReducer::Create(spec_.all_reduce, comm_));
  const std::shared_ptr<AllReducer> reducer = std::move(made);
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, int64_t>) {
    call_ = [this, reducer, count] {
      return reducer->Sum(recv_.span<T>().first(count), stream_);
    };
    return absl::OkStatus();
  }
  if (spec_.all_reduce == AllReduceAlgorithm::kRing) {
    return absl::InvalidArgumentError(
        absl::StrCat("CollectiveCase: the ring sums f32 and i64, not ", moe::NameOf(spec_.dtype),
                     ", expected direct (threads) or library (mpi)"));
  }
  call_ = [this, count] {
    return comm_.AllReduce<T>(recv_.span<T>().first(count), ReduceOp::kSum, stream_);
  };
  return absl::OkStatus();
}

absl::Status CollectiveCase::SetupPointToPoint() {
  const int me = comm_.rank();
  const int64_t count = std::max<int64_t>(1, SpecElements());
  const bool local = spec_.source == spec_.destination;
  algorithm_ = local ? "memcpy" : "sendrecv";
  size_elements_ = count_ = count;
  traffic_ = Traffic(comm_.size());
  traffic_.at(spec_.source, spec_.destination) = count;
  MOE_RETURN_IF_ERROR(
      Allocate(me == spec_.source ? count : 0, me == spec_.destination ? count : 0));
  if (me == spec_.source) FillTagged(send_.span<std::byte>(), me, 0);
  if (me == spec_.destination) FillTagged(want_.span<std::byte>(), spec_.source, 0);
  call_ = [this, me, local]() -> absl::Status {
    const int64_t bytes = count_ * width();
    if (me == spec_.source && local) CopyBytes(recv_.data(), send_.data(), bytes);
    if (local || (me != spec_.source && me != spec_.destination)) return absl::OkStatus();
    const SendRecvOp op =
        me == spec_.source
            ? SendRecvOp{.peer = spec_.destination, .send = send_.data(), .bytes = bytes}
            : SendRecvOp{.peer = spec_.source, .recv = recv_.data(), .bytes = bytes};
    return comm_.SendRecv({&op, 1}, stream_);
  };
  return absl::OkStatus();
}

absl::Status CollectiveCase::SetupMemcpy() {
  const int64_t count = std::max<int64_t>(1, SpecElements());
  algorithm_ = "memcpy";
  size_elements_ = count_ = count;
  traffic_ = Traffic(comm_.size());
  for (int r = 0; r < comm_.size(); ++r) traffic_.at(r, r) = count;
  MOE_RETURN_IF_ERROR(Allocate(count, count));
  FillTagged(send_.span<std::byte>(), comm_.rank(), 0);
  FillTagged(want_.span<std::byte>(), comm_.rank(), 0);
  call_ = [this] {
    std::memcpy(recv_.data(), send_.data(), static_cast<size_t>(count_ * width()));
    return absl::OkStatus();
  };
  return absl::OkStatus();
}

void CollectiveCase::Prepare() {
  if (in_place_) {
    CopyBytes(result_.data(), send_.data(), static_cast<int64_t>(result_.size()));
    return;
  }
  if (!result_.empty()) std::memset(result_.data(), kPoison, result_.size());
}

absl::Status CollectiveCase::Call() {
  MOE_RETURN_IF_ERROR(call_());
  return stream_.Synchronize();
}

int64_t CollectiveCase::CountWrong() const {
  const auto bytes = static_cast<size_t>(width());
  if (result_.empty() || std::memcmp(result_.data(), want_.data(), result_.size()) == 0) return 0;
  int64_t wrong = 0;
  for (size_t at = 0; at < result_.size(); at += bytes) {
    wrong += std::memcmp(result_.data() + at, want_.data() + at, bytes) != 0;
  }
  return wrong;
}

void CollectiveCase::Describe(BenchRow& row) const {
  const bool all_to_all = spec_.op == Op::kAllToAll || spec_.op == Op::kAllToAllV;
  row.op = spec_.op;
  row.algorithm = algorithm_;
  row.ranks = comm_.size();
  row.backend = std::string(comm_.backend());
  row.routing = spec_.op == Op::kAllToAllV ? spec_.routing.text : "uniform";
  row.seed = spec_.seed;
  row.dtype = spec_.dtype;
  row.size_bytes = size_elements_ * width();
  row.count = count_;
  row.in_place = in_place_;
  row.imbalance_sent = SendImbalance(traffic_);
  row.imbalance_received = ReceiveImbalance(traffic_);
  if (!traffic_known_) return;
  const int node_size = spec_.node_size > 0 ? spec_.node_size : comm_.size();
  const bool two_hops = all_to_all && spec_.dispatch == DispatchAlgorithm::kHierarchical;
  const Distances moved =
      two_hops ? TwoHopDistances(traffic_, node_size) : DirectDistances(traffic_, node_size);
  row.bytes_self = moved.self * width();
  row.bytes_same_host = moved.same_node * width();
  row.bytes_cross_host = moved.cross_node * width();
}

}  // namespace moe::bench
