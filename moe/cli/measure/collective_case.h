// One collective with buffers of its own: fills them with an exact pattern, calls, counts wrong
// elements.
#ifndef MOE_MOE_CLI_MEASURE_COLLECTIVE_CASE_H_
#define MOE_MOE_CLI_MEASURE_COLLECTIVE_CASE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "comm/all_reduce.h"
#include "comm/communicator.h"
#include "comm/hosts.h"
#include "dispatch/dispatcher.h"
#include "dispatch/two_hop_exchange.h"
#include "kernels/base/buffer.h"
#include "kernels/base/dtype.h"
#include "kernels/base/stream.h"
#include "moe/cli/measure/bench_row.h"
#include "moe/cli/measure/routing_spec.h"
#include "moe/cli/measure/traffic.h"

namespace moe::measure {

// nccl-tests has two halves of a row: the form that the collective has (allreduce: in place, all
// others: out of place), and the other one. The other one is
//   allgather, reducescatter   the same call, on one buffer
//   allreduce                  a copy of what is sent, summed in place
//   alltoall, alltoallv        the call, then a copy of its result over what was sent: exchanges
//                              have no form in place
//   p2p, memcpy                the same: their two buffers are of two ranks, or what they are for
enum class Form : uint8_t { kOwn, kOther };

struct CaseSpec {
  Op op = Op::kAllToAll;
  DType dtype = DType::kFloat32;  // f32, f64, bf16, f16, i32 or i64
  int64_t size_bytes = 0;         // per rank; rounded down to whole elements, at least one per peer
  // alltoall, alltoallv
  RoutingSpec routing;  // alltoallv
  int num_experts = 0;  // 0: 8 per rank
  uint64_t seed = 0;
  DispatchAlgorithm dispatch = DispatchAlgorithm::kStaged;
  int node_size = 0;  // NodesOf; hierarchical travels by it: it divides R
  // allreduce. The ring sums f32 and i64; the others all types.
  AllReduceAlgorithm all_reduce = AllReduceAlgorithm::kRing;
  bool copies_both_ways = false;  // memcpy: CollectiveCase::CopyIn
  // p2p
  int source = 0, destination = 0;
  Form form = Form::kOwn;
};

// Bytes that calls of `spec` take on a machine with `ranks` of them, on CPUs: what is sent, what is
// received and what is expected, each of the size (p2p: once, of a pair). Hierarchical travels
// through a workspace that grows three times, by doubling; a trace has two more for the copies that
// bound its calls.
double MemoryOf(const CaseSpec& spec, int ranks);

// Buffers are memory of the stream's device.
//
// An element's value makes a misplaced element a wrong one: bits that name source and index where
// data is moved, small integers (exact sums in every type) where it is reduced.
class CollectiveCase {
 public:
  // Collective; fills the buffers. `comm` and `stream` must outlive the case.
  // `host`: HostId of this rank's host.
  //   kInvalidArgument   a type, node size or algorithm that the collective does not have; in a
  //                      CUDA stream hierarchical, which moves memory of the host
  static absl::StatusOr<std::unique_ptr<CollectiveCase>> Create(const CaseSpec& spec,
                                                                Communicator& comm, Stream& stream,
                                                                uint64_t host = HostId());
  // The memcpy of CopiedBytes that bounds a call of `what` on this rank. On the CPU it copies
  // between buffers of `what`, which outlives it and is prepared anew before its next call; a
  // trace, whose calls differ in size, and a GPU have buffers of their own for it. Every other copy
  // writes past the caches, as exchanges of large messages may. Collective.
  static absl::StatusOr<std::unique_ptr<CollectiveCase>> CopyIn(CollectiveCase& what);
  CollectiveCase(const CollectiveCase&) = delete;
  CollectiveCase& operator=(const CollectiveCase&) = delete;

  // Collective. Selects the traffic of `call`; does nothing unless routing is a trace, or copies go
  // both ways.
  absl::Status TurnTo(int64_t call);
  // Called before every call: makes what is to be written wrong everywhere, and makes inputs that a
  // call overwrites anew. Not collective.
  absl::Status Prepare();
  // Collective; done when it returns.
  absl::Status Call();
  // Elements of this rank's result that differ from the exact one, bit for bit.
  absl::StatusOr<int64_t> CountWrong();

  // Fills in what is known without timing: algorithm, size, count, imbalances, bytes by distance.
  // With a trace means over `calls` calls from the first record on.
  void Describe(int64_t calls, BenchRow& row) const;
  // Bytes of the memcpy that bounds a call on this rank, by the memory that no algorithm can spare:
  //   alltoall, alltoallv, allgather   what the rank receives, its own part included
  //   allreduce                        its buffer (nothing, with one rank)
  //   reducescatter                    half of what it reads, its buffer, and writes, its block
  // With a trace the mean over the records.
  int64_t CopiedBytes() const;
  // Elements that one call moves between ranks, those of two hops counted twice.
  Traffic moved() const { return Moved(traffic_); }
  Site site() const { return {.name = NameOf(spec_.op)}; }
  const CaseSpec& spec() const { return spec_; }
  Communicator& comm() const { return comm_; }

 private:
  CollectiveCase(const CaseSpec& spec, Communicator& comm, Stream& stream, Nodes nodes)
      : spec_(spec), nodes_(std::move(nodes)), comm_(comm), stream_(stream) {}
  static absl::StatusOr<std::unique_ptr<CollectiveCase>> Make(const CaseSpec& spec,
                                                              Communicator& comm, Stream& stream,
                                                              Nodes nodes);

  absl::Status Setup();
  Traffic AllToAllTraffic(int64_t call) const;
  Traffic Moved(const Traffic& traffic) const;
  absl::Status SetupAllToAll();
  absl::Status SetupAllGather();
  absl::Status SetupPointToPoint();
  absl::Status SetupMemcpy();
  absl::Status SetupSum();
  template <typename T>
  absl::Status SetupAllReduce();
  template <typename T>
  absl::Status SetupReduceScatter();
  // Out of place, the sum starts from a copy of what is sent.
  absl::Status StartFromSent();
  // Set up how all-to-all travels.
  absl::Status UseStaged();
  absl::Status UseDirect(std::shared_ptr<PeerBuffer> shared);
  // Memory for what is sent that peers can read, if the dispatch is direct; nullptr if it is not,
  // or runs staged. Collective.
  absl::StatusOr<std::shared_ptr<PeerBuffer>> ShareSent(int64_t bytes);
  absl::Status UseHierarchical();
  template <typename U>
  absl::Status UseHierarchicalAs();
  // All-to-alls: every call then writes its result over `home`, the memory of what is sent.
  void ReturnInto(std::byte* home);

  absl::Status Allocate(int64_t send_elements, int64_t result_elements);
  // Copies what setting up has put into host_send() to the device.
  absl::Status Upload();
  absl::Status Poison(absl::Span<std::byte> bytes);
  bool all_to_all() const { return spec_.op == Op::kAllToAll || spec_.op == Op::kAllToAllV; }
  bool in_place() const { return (spec_.op == Op::kAllReduce) == (spec_.form == Form::kOwn); }
  // Buffer into which setting up writes what is sent.
  Buffer& host_send() { return IsCuda(stream_) ? host_send_ : send_; }
  void FillTagged(absl::Span<std::byte> to, int source, int64_t first) const;
  absl::Span<std::byte> Elements(const Buffer& buffer, int64_t first, int64_t count) const {
    return buffer.span<std::byte>().subspan(first * width(), count * width());
  }
  absl::Span<const uint8_t> SendBytes() const { return send_.span<const uint8_t>(); }
  absl::Span<uint8_t> ResultBytes() const { return recv_.span<uint8_t>(); }
  int64_t width() const { return SizeOf(spec_.dtype); }
  int64_t SpecElements() const { return spec_.size_bytes / width(); }
  // Elements of a block when a rank's buffer has R of them.
  int64_t BlockElements() const;
  // Describes collectives that move one such block between each two ranks.
  void DescribeEvenBlocks();
  // Describes copies of `count` elements: of expected_ to result_, in CUDA streams of send_.
  void DescribeCopies(int64_t count);

  const CaseSpec spec_;
  const Nodes nodes_;
  Communicator& comm_;
  Stream& stream_;
  Buffer send_, recv_;               // on the stream's device
  Buffer want_;                      // on the host
  Buffer host_send_, poison_;        // in CUDA streams; poison_ is what recv_ is filled with
  Buffer kept_;                      // in CUDA streams, all-to-alls in place: send_ before a call
  absl::Span<std::byte> result_;     // what a call writes
  absl::Span<std::byte> expected_;   // on the host: what the result is compared with
  absl::Span<std::byte> input_;      // in place: a call's input, made anew before each call
  absl::Span<std::byte> exchanged_;  // all-to-alls in place: what the exchange itself writes
  std::string algorithm_;
  int64_t size_elements_ = 0;  // per rank, as BenchRow::size_bytes
  int64_t count_ = 0;
  Traffic traffic_;
  bool traffic_known_ = true;
  int64_t call_index_ = 0;                    // record of a trace, or number of a copy
  std::shared_ptr<TwoHopExchange> exchange_;  // hierarchical
  std::function<absl::Status()> call_;
};

}  // namespace moe::measure

#endif  // MOE_MOE_CLI_MEASURE_COLLECTIVE_CASE_H_
