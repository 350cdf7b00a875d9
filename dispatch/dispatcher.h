// Moves rows between token order at home and expert order at the experts' ranks.
#ifndef MOE_DISPATCH_DISPATCHER_H_
#define MOE_DISPATCH_DISPATCHER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "comm/communicator.h"
#include "comm/hosts.h"
#include "dispatch/dispatch_plan.h"
#include "kernels/base/choice.h"
#include "kernels/base/dtype.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/workspace.h"

namespace moe {

enum class DispatchAlgorithm : uint8_t {
  kStaged,        // gather to send order, AllToAllV, regroup by index
  kDirect,        // rows are read straight from the peer's memory: no staging copy
  kHierarchical,  // two levels: between groups of node_size ranks, then inside the group
};
inline constexpr Choice<DispatchAlgorithm> kDispatchWords[] = {
    {"staged", DispatchAlgorithm::kStaged},
    {"direct", DispatchAlgorithm::kDirect},
    {"hierarchical", DispatchAlgorithm::kHierarchical}};

struct DispatcherOptions {
  DispatchAlgorithm algorithm = DispatchAlgorithm::kStaged;
  // Ranks per node: rank r is on node r / node_size; 0: nodes are the hosts of the ranks (NodesOf).
  // Hierarchical travels by it (it must divide the group's size), all algorithms count bytes by it.
  int node_size = 0;
};

// Payload that left this rank since its dispatcher was made, by where it went: rows, and the
// weights that DispatchScaled sends beside them (4 bytes a row). Read by the peer or sent, it
// counts at the rank whose rows they are. Hierarchical counts every hop at the rank that makes it.
struct ExchangeBytes {
  int64_t self = 0;
  int64_t same_node = 0;
  int64_t cross_node = 0;
};

// One chunk of a plan on its way; borrowed.
struct DispatchCall {
  const DispatchPlan& plan;
  int chunk = 0;
  Workspace& workspace;  // staging memory, in use until `exchange` has passed the call
  Stream& exchange;
  Site site = {};
};

// What of a movement is timed apart; the rest is rows put into another order on their rank.
enum class ExchangePart : uint8_t {
  kMeeting,  // an all-to-all or a fence: no rank leaves it before all have come
  kCopy,     // the ranks have met: this one reads rows where its peers have them (kDirect)
};

// Is told where the parts begin and end in `exchange`; they do not lie inside each other. Meetings
// come in one order, and as many, on all ranks of the dispatcher's group. `group`: who meets.
class ExchangeClock {
 public:
  virtual ~ExchangeClock() = default;
  virtual absl::Status Start(ExchangePart part, const Communicator& group, Stream& exchange) = 0;
  virtual absl::Status Stop(ExchangePart part, const Communicator& group, Stream& exchange) = 0;
};

// Two data movers serve the four movements of a layer:
//   Dispatch, DispatchScaled   home -> experts: tokens (forward), weight * dy (combine's backward)
//   Return                     experts -> home: outputs (forward), input gradients (backward)
// What happens at home with returned rows (weighted sum, row dots, plain sum) is kernels/combine,
// with plan.home_row_of_slot().
//
// Each call moves one chunk of the plan and is enqueued on `exchange`, after what is already there
// (the caller makes `exchange` wait for the producer of its input). So the exchange of chunk c + 1
// overlaps the experts of chunk c when `exchange` is not the compute stream. All calls are
// collective over the group; every rank makes them chunk by chunk, ascending, in the same order.
//
// Bytes sent by one rank in one direction, for S send rows (distinct tokens per rank and chunk), P
// kept slots, H columns of b bytes and s ranks per node, including those to itself:
//   staged        Dispatch S*H*b, Return P*H*b; two copies (send order, expert order) around them.
//                 A group of one rank gathers once, and what returns is where it should be:
//                 P*H*b both ways all the same
//   direct        P*H*b both ways: a row is read once per expert row; one copy of x, none of
//                 outputs
//   hierarchical  Dispatch (M + S)*H*b: M rows of distinct tokens per node and chunk between nodes,
//                 then inside the node as many as staged sends; with padding to capacity M = S.
//                 Return P*H*b, as staged.
//
// Same bits whatever the algorithm: rows are rounded to T before they travel, also when they stay
// on their rank or are read in place.
//
// Algorithms override Out and Back; checks live here, so that all refuse the same things.
template <typename T>
class Dispatcher {
 public:
  virtual ~Dispatcher() = default;
  Dispatcher(const Dispatcher&) = delete;
  Dispatcher& operator=(const Dispatcher&) = delete;

  // Collective; for streams and rows of the device that `memory` is of. kDirect without peer memory
  // (CUDA: ranks of one process have it where every device can read the others'), and kHierarchical
  // on CUDA, become kStaged and say so once in the log, with the reason.
  // `host`: HostId of this rank's host.
  // kInvalidArgument if node_size does not divide comm.size(), or a node would have ranks of two
  // hosts (all ranks of `comm` alike). `comm` must outlive the dispatcher;
  // while kDirect grows its peer memory (first calls, larger batches) the dispatcher waits for the
  // exchange stream it used last, and nothing else of `comm` may be under way.
  static absl::StatusOr<std::unique_ptr<Dispatcher>> Create(const DispatcherOptions& options,
                                                            Communicator& comm,
                                                            MemoryResource& memory = CpuMemory(),
                                                            uint64_t host = HostId());
  virtual DispatchAlgorithm algorithm() const = 0;
  // Options of the plans along which this dispatcher moves rows.
  DispatchPlanOptions PlanOptions(int overlap_degree) const {
    return {.overlap_degree = overlap_degree,
            .reads_peers = algorithm() == DispatchAlgorithm::kDirect,
            .node_size = algorithm() == DispatchAlgorithm::kHierarchical ? nodes_.size : 0};
  }
  const ExchangeBytes& bytes() const { return bytes_; }
  // nullptr, as at first: none. `clock` must outlive what is enqueued.
  virtual void set_clock(ExchangeClock* clock) { clock_ = clock; }

  // Memory for rows that will be given to Return, [plan.expert_rows(), H]: peer memory for kDirect
  // (peers read it in place), else from `workspace`. Collective when it has to grow. Valid until
  // the next call of this function; write it only after the previous Return's last chunk.
  virtual absl::StatusOr<MatrixView<T>> ReturnBuffer(const DispatchPlan& plan, int64_t hidden,
                                                     Workspace& workspace,
                                                     const Site& site = {}) = 0;

  // Whether rows from ReturnBuffer are home rows as they lie: Return with one view for both copies
  // nothing.
  virtual bool ReturnsInPlace(const DispatchPlan& /*plan*/) const { return false; }

  // This chunk's part of expert_rows = rows of x at the ranks they come from; padding rows are 0.
  //   x            [T, H] at home; must not change until the last chunk has been exchanged
  //   expert_rows  [N, H], all chunks; only this chunk's rows are written
  absl::Status Dispatch(const DispatchCall& call, MatrixView<const T> x, MatrixView<T> expert_rows);

  // This chunk's part of expert_rows = weight[slot] * dy[token of slot], the product in float32,
  // rounded to T once; padding rows are 0.   weight [slots] float32, dy [T, H] at home; neither may
  // change until the last chunk has been exchanged. dy travels as x does, once per rank; the
  // weights travel beside it and are applied at the experts' rank, to the same bits.
  absl::Status DispatchScaled(const DispatchCall& call, MatrixView<const T> dy,
                              absl::Span<const float> weight, MatrixView<T> expert_rows);

  // This chunk's part of home_rows [plan.return_rows(), H] = expert rows of the ranks that computed
  // them.  expert_rows [N, H]: from ReturnBuffer, all chunks; this chunk's rows are ready.
  // home_rows is dense (stride == cols).
  absl::Status Return(const DispatchCall& call, MatrixView<const T> expert_rows,
                      MatrixView<T> home_rows);

 protected:
  Dispatcher(Nodes nodes, Communicator& comm, DeviceKind kind)
      : comm_(comm), nodes_(std::move(nodes)), kind_(kind) {}

  // Arguments have been checked. weight: DispatchScaled's.
  virtual absl::Status Out(const DispatchCall& call, MatrixView<const T> x,
                           std::optional<absl::Span<const float>> weight,
                           MatrixView<T> expert_rows) = 0;
  virtual absl::Status Back(const DispatchCall& call, MatrixView<const T> expert_rows,
                            MatrixView<T> home_rows) = 0;

  static MatrixView<T> ExpertRowsOf(const DispatchCall& call, MatrixView<T> all) {
    const DispatchPlan& plan = call.plan;
    const int chunk = call.chunk;
    return RowRange(all, plan.expert_begin(chunk), plan.expert_begin(chunk + 1));
  }
  static MatrixView<T> HomeRowsOf(const DispatchCall& call, MatrixView<T> all) {
    const DispatchPlan& plan = call.plan;
    const int chunk = call.chunk;
    return RowRange(all, plan.home_begin(chunk), plan.home_begin(chunk + 1));
  }

  void CountBytes(int peer, int64_t bytes) {
    const bool same_node = nodes_.of_rank[peer] == nodes_.of_rank[comm_.rank()];
    (peer == comm_.rank() ? bytes_.self
     : same_node          ? bytes_.same_node
                          : bytes_.cross_node) += bytes;
  }
  ExchangeClock* clock() const { return clock_; }

  Communicator& comm_;

 private:
  absl::Status CheckDispatch(absl::string_view function, const DispatchCall& call,
                             MatrixView<const T> x, MatrixView<T> expert_rows) const;
  absl::Status CheckChunk(absl::string_view function, const DispatchCall& call) const;
  absl::Status CheckDevice(absl::string_view function, const Stream& exchange) const;

  const Nodes nodes_;
  const DeviceKind kind_;
  ExchangeBytes bytes_;
  ExchangeClock* clock_ = nullptr;
};

}  // namespace moe

#endif  // MOE_DISPATCH_DISPATCHER_H_
