#include "moe/cli/measure/collective_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "comm/copy.h"
#include "kernels/base/status_macros.h"

namespace moe::measure {
namespace {

// Value of a result that was never written: no exact sum has it, and hardly a tag.
constexpr int kPoison = 0xa5;

// Bits that name an element of a rank's send buffer (splitmix64's mixing of source and index).
uint64_t Tag(int source, int64_t index) {
  uint64_t x =
      (static_cast<uint64_t>(source) << 48 | static_cast<uint64_t>(index)) + 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

absl::StatusOr<std::unique_ptr<CollectiveCase>> CollectiveCase::Create(const CaseSpec& spec,
                                                                       Communicator& comm,
                                                                       Stream& stream,
                                                                       uint64_t host) {
  if (spec.dtype == DType::kUInt8) {
    return absl::InvalidArgumentError(
        "CollectiveCase: type u8, expected f32, f64, bf16, f16, i32 or i64");
  }
  const auto inline_stream = MakeInlineStream();
  MOE_ASSIGN_OR_RETURN(const auto hosts, HostsOf(host, comm, *inline_stream));
  MOE_ASSIGN_OR_RETURN(Nodes nodes, NodesOf(spec.node_size, hosts));
  return Make(spec, comm, stream, std::move(nodes));
}

absl::StatusOr<std::unique_ptr<CollectiveCase>> CollectiveCase::Make(const CaseSpec& spec,
                                                                     Communicator& comm,
                                                                     Stream& stream, Nodes nodes) {
  std::unique_ptr<CollectiveCase> made(new CollectiveCase(spec, comm, stream, std::move(nodes)));
  MOE_RETURN_IF_ERROR(made->Setup());
  MOE_RETURN_IF_ERROR(made->Upload());
  return made;
}

double MemoryOf(const CaseSpec& spec, int ranks) {
  const bool exchanges = spec.op == Op::kAllToAll || spec.op == Op::kAllToAllV;
  int buffers = 3;
  if (exchanges && spec.dispatch == DispatchAlgorithm::kHierarchical) buffers += 1 + 2 + 4;
  if (exchanges && spec.routing.kind == RoutingSpec::kTrace) buffers += 2;
  const int holders = spec.op == Op::kPointToPoint ? 1 : ranks;
  return static_cast<double>(spec.size_bytes) * holders * buffers;
}

absl::StatusOr<std::unique_ptr<CollectiveCase>> CollectiveCase::CopyIn(CollectiveCase& what) {
  const CaseSpec spec = {.op = Op::kMemcpy,
                         .dtype = what.spec_.dtype,
                         .size_bytes = what.CopiedBytes(),
                         .copies_both_ways = true};
  const bool turns = what.all_to_all() && CallsOf(what.spec_.routing) > 1;
  if (IsCuda(what.stream_) || turns) return Make(spec, what.comm_, what.stream_, what.nodes_);
  std::unique_ptr<CollectiveCase> copy(
      new CollectiveCase(spec, what.comm_, what.stream_, what.nodes_));
  const Buffer& from = what.spec_.op == Op::kReduceScatter ? what.send_ : what.want_;
  copy->expected_ = copy->Elements(from, 0, copy->SpecElements());
  copy->result_ = copy->Elements(what.recv_, 0, copy->SpecElements());
  copy->DescribeCopies(copy->SpecElements());
  return copy;
}

absl::Status CollectiveCase::Setup() {
  switch (spec_.op) {
    case Op::kAllToAll:
    case Op::kAllToAllV:
      return SetupAllToAll();
    case Op::kAllReduce:
    case Op::kReduceScatter:
      return SetupSum();
    case Op::kAllGather:
      return SetupAllGather();
    case Op::kPointToPoint:
      return SetupPointToPoint();
    case Op::kMemcpy:
      break;
  }
  return SetupMemcpy();
}

absl::Status CollectiveCase::TurnTo(int64_t call) {
  if (spec_.copies_both_ways) call_index_ = call;
  if (spec_.op == Op::kMemcpy) return absl::OkStatus();
  const int64_t records = CallsOf(spec_.routing);
  if (call % records == call_index_) return absl::OkStatus();
  call_index_ = call % records;
  MOE_RETURN_IF_ERROR(SetupAllToAll());
  return Upload();
}

int64_t CollectiveCase::BlockElements() const {
  return std::max<int64_t>(1, SpecElements() / comm_.size());
}

absl::Status CollectiveCase::Allocate(int64_t send_elements, int64_t result_elements) {
  const int64_t send_bytes = send_elements * width();
  const int64_t result_bytes = result_elements * width();
  MemoryResource* memory = &CpuMemory();
  if (IsCuda(stream_)) {
    MOE_ASSIGN_OR_RETURN(memory, CudaMemory(stream_.device().index));
    MOE_ASSIGN_OR_RETURN(host_send_, Buffer::Allocate(send_bytes));
    MOE_ASSIGN_OR_RETURN(poison_, Buffer::Allocate(result_bytes, *memory, "poison"));
  }
  MOE_ASSIGN_OR_RETURN(send_, Buffer::Allocate(send_bytes, *memory, "what is sent"));
  MOE_ASSIGN_OR_RETURN(recv_, Buffer::Allocate(result_bytes, *memory, "what is received"));
  MOE_ASSIGN_OR_RETURN(want_, Buffer::Allocate(result_bytes));
  if (all_to_all() && in_place() && IsCuda(stream_)) {
    MOE_ASSIGN_OR_RETURN(kept_, Buffer::Allocate(send_bytes, *memory, "what is sent, kept"));
  }
  result_ = Elements(recv_, 0, result_elements);
  expected_ = want_.span<std::byte>();
  return absl::OkStatus();
}

absl::Status CollectiveCase::Upload() {
  if (IsCuda(stream_)) {
    const std::vector<std::byte> poison(poison_.bytes(), std::byte{kPoison});
    MOE_RETURN_IF_ERROR(stream_.Upload(host_send_.data(), send_.data(), send_.bytes()));
    MOE_RETURN_IF_ERROR(stream_.Upload(poison.data(), poison_.data(), poison_.bytes()));
  }
  MOE_RETURN_IF_ERROR(stream_.CopyBytes(send_.data(), kept_.data(), kept_.bytes()));
  return stream_.Synchronize();
}

absl::Status CollectiveCase::Poison(absl::Span<std::byte> bytes) {
  if (bytes.empty()) return absl::OkStatus();
  if (IsCuda(stream_)) {
    return stream_.CopyBytes(poison_.data(), bytes.data(), static_cast<int64_t>(bytes.size()));
  }
  std::memset(bytes.data(), kPoison, bytes.size());
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

void CollectiveCase::DescribeEvenBlocks() {
  algorithm_ = "library";
  if (comm_.backend() == "local") algorithm_ = "direct";
  if (comm_.backend() == "mpi") algorithm_ = "pairwise";
  count_ = BlockElements();
  size_elements_ = comm_.size() * count_;
  traffic_ = EvenTraffic(comm_.size(), count_);
}

absl::Status CollectiveCase::SetupAllGather() {
  const int ranks = comm_.size();
  const int64_t block = BlockElements();
  DescribeEvenBlocks();
  MOE_RETURN_IF_ERROR(Allocate(block, ranks * block));
  FillTagged(host_send().span<std::byte>(), comm_.rank(), 0);
  for (int s = 0; s < ranks; ++s) FillTagged(Elements(want_, s * block, block), s, 0);
  if (in_place()) input_ = Elements(recv_, comm_.rank() * block, block);
  call_ = [this, bytes = block * width()] {
    const auto sent = in_place() ? ResultBytes().subspan(comm_.rank() * bytes, bytes) : SendBytes();
    return comm_.AllGather<uint8_t>(sent, ResultBytes(), stream_, site());
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
  if (me == spec_.source) FillTagged(host_send().span<std::byte>(), me, 0);
  if (me == spec_.destination) FillTagged(want_.span<std::byte>(), spec_.source, 0);
  call_ = [this, me, local]() -> absl::Status {
    const int64_t bytes = count_ * width();
    if (local) {
      return me == spec_.source ? stream_.CopyBytes(send_.data(), recv_.data(), bytes)
                                : absl::OkStatus();
    }
    if (me != spec_.source && me != spec_.destination) return absl::OkStatus();
    const SendRecvOp op =
        me == spec_.source
            ? SendRecvOp{.peer = spec_.destination, .send = send_.data(), .bytes = bytes}
            : SendRecvOp{.peer = spec_.source, .recv = recv_.data(), .bytes = bytes};
    return comm_.SendRecv({&op, 1}, stream_, site());
  };
  return absl::OkStatus();
}

absl::Status CollectiveCase::SetupMemcpy() {
  const int64_t count = std::max<int64_t>(1, SpecElements());
  MOE_RETURN_IF_ERROR(Allocate(count, count));
  FillTagged(host_send().span<std::byte>(), comm_.rank(), 0);
  if (IsCuda(stream_)) {
    FillTagged(want_.span<std::byte>(), comm_.rank(), 0);
  } else {
    expected_ = send_.span<std::byte>();
  }
  DescribeCopies(count);
  return absl::OkStatus();
}

void CollectiveCase::DescribeCopies(int64_t count) {
  algorithm_ = "memcpy";
  size_elements_ = count_ = count;
  traffic_ = Traffic(comm_.size());
  for (int r = 0; r < comm_.size(); ++r) traffic_.at(r, r) = count;
  call_ = [this]() -> absl::Status {
    const int64_t bytes = count_ * width();
    if (IsCuda(stream_)) return stream_.CopyBytes(send_.data(), result_.data(), bytes);
    const bool past_caches = call_index_ % 2 == 1;
    CopyBytes(result_.data(), expected_.data(), bytes,
              past_caches ? CopyHint::kStreamed : CopyHint::kCached);
    return absl::OkStatus();
  };
}

absl::Status CollectiveCase::Prepare() {
  MOE_RETURN_IF_ERROR(Poison(result_));
  MOE_RETURN_IF_ERROR(Poison(exchanged_));
  if (all_to_all() && !IsCuda(stream_)) {
    FillTagged(input_, comm_.rank(), 0);
    return absl::OkStatus();
  }
  const Buffer& original = exchanged_.empty() ? send_ : kept_;
  MOE_RETURN_IF_ERROR(
      stream_.CopyBytes(original.data(), input_.data(), static_cast<int64_t>(input_.size())));
  return stream_.Synchronize();
}

absl::Status CollectiveCase::Call() {
  MOE_RETURN_IF_ERROR(call_());
  return stream_.Synchronize();
}

absl::StatusOr<int64_t> CollectiveCase::CountWrong() {
  std::vector<std::byte> downloaded;
  absl::Span<const std::byte> result = result_;
  if (IsCuda(stream_)) {
    downloaded.resize(result_.size());
    MOE_RETURN_IF_ERROR(
        stream_.CopyBytes(result_.data(), downloaded.data(), static_cast<int64_t>(result_.size())));
    MOE_RETURN_IF_ERROR(stream_.Synchronize());
    result = downloaded;
  }
  const auto bytes = static_cast<size_t>(width());
  if (result.empty() || std::memcmp(result.data(), expected_.data(), result.size()) == 0) return 0;
  int64_t wrong = 0;
  for (size_t at = 0; at < result.size(); at += bytes) {
    wrong += std::memcmp(result.data() + at, expected_.data() + at, bytes) != 0;
  }
  return wrong;
}

int64_t CollectiveCase::CopiedBytes() const {
  const int64_t records = CallsOf(spec_.routing);
  int64_t elements = 0;
  if (spec_.op == Op::kAllReduce) {
    elements = count_;
  } else if (spec_.op == Op::kReduceScatter) {
    elements = (size_elements_ + count_) / 2;
  } else if (records > 1) {
    for (int64_t i = 0; i < records; ++i) elements += AllToAllTraffic(i).Received(comm_.rank());
    elements /= records;
  } else {
    elements = traffic_.Received(comm_.rank());
  }
  return elements * width();
}

Traffic CollectiveCase::Moved(const Traffic& traffic) const {
  const bool two_hops = all_to_all() && spec_.dispatch == DispatchAlgorithm::kHierarchical;
  return two_hops ? TwoHopTraffic(traffic, nodes_.size) : traffic;
}

void CollectiveCase::Describe(int64_t calls, BenchRow& row) const {
  row.op = spec_.op;
  row.algorithm = algorithm_;
  row.ranks = comm_.size();
  row.backend = std::string(comm_.backend());
  row.routing = spec_.op == Op::kAllToAllV ? spec_.routing.text : "uniform";
  row.seed = spec_.seed;
  row.dtype = spec_.dtype;
  row.size_bytes = size_elements_ * width();
  row.count = count_;
  row.in_place = in_place();
  row.imbalance_sent = Imbalance(traffic_.SentByRank());
  row.imbalance_received = Imbalance(traffic_.ReceivedByRank());
  row.busiest_sender = Busiest(traffic_.SentByRank());
  row.busiest_receiver = Busiest(traffic_.ReceivedByRank());
  Distances moved = DistancesOf(Moved(traffic_), nodes_.of_rank);
  if (const int64_t records = CallsOf(spec_.routing); records > 1) {
    Traffic of_all(comm_.size());
    double largest = 0, sent = 0, received = 0, self = 0, same_node = 0, cross_node = 0;
    for (int64_t record = 0; record < std::min(records, calls); ++record) {
      const Traffic traffic = AllToAllTraffic(record);
      const Distances of_record = DistancesOf(Moved(traffic), nodes_.of_rank);
      const int64_t replays = (calls - record + records - 1) / records;
      of_all.Add(traffic, replays);
      const double share = static_cast<double>(replays) / static_cast<double>(calls);
      largest += share * static_cast<double>(traffic.Largest());
      sent += share * Imbalance(traffic.SentByRank());
      received += share * Imbalance(traffic.ReceivedByRank());
      self += share * static_cast<double>(of_record.self);
      same_node += share * static_cast<double>(of_record.same_node);
      cross_node += share * static_cast<double>(of_record.cross_node);
    }
    row.count = std::llround(largest);
    row.size_bytes = row.count * width();
    row.imbalance_sent = sent;
    row.imbalance_received = received;
    row.busiest_sender = Busiest(of_all.SentByRank());
    row.busiest_receiver = Busiest(of_all.ReceivedByRank());
    moved = {std::llround(self), std::llround(same_node), std::llround(cross_node)};
  }
  if (!traffic_known_) return;
  row.bytes_self = moved.self * width();
  row.bytes_same_host = moved.same_node * width();
  row.bytes_cross_host = moved.cross_node * width();
}

}  // namespace moe::measure
