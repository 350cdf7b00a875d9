#include "dispatch/dispatcher.h"

#include <utility>

#include <absl/strings/str_cat.h>

#include "dispatch/exchange_rows.h"
#include "kernels/base/log.h"
#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

// kUnimplemented, with the reason, unless the ranks can read each other's memory of this kind: they
// try; collective.
absl::Status TryPeerMemory(Communicator& comm, MemoryResource& memory) {
  const DeviceKind kind = memory.device().kind;
  if (!comm.has_peer_memory(kind)) {
    return absl::UnimplementedError(absl::StrCat("backend ", comm.backend(), " has none here"));
  }
  return comm.AllocatePeerBuffer(/*bytes=*/1, memory).status();
}

void Explain(const Communicator& comm, const std::string& message) {
  if (comm.rank() == 0) LogOnce(LogLevel::kWarning, message);
}

}  // namespace

template <typename T>
absl::StatusOr<std::unique_ptr<Dispatcher<T>>> Dispatcher<T>::Create(
    const DispatcherOptions& options, Communicator& comm, MemoryResource& memory, uint64_t host) {
  const int node_size = options.node_size;
  const bool hierarchical = options.algorithm == DispatchAlgorithm::kHierarchical;
  if (node_size < 0 || (hierarchical && node_size != 0 && comm.size() % node_size != 0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Dispatcher: node size ", node_size, " for ", comm.size(),
        " ranks, expected a divisor of them: ", NearestNodeSizes(node_size, comm.size())));
  }
  const auto stream = MakeInlineStream();
  MOE_ASSIGN_OR_RETURN(const auto hosts, HostsOf(host, comm, *stream));
  auto nodes = NodesOf(node_size, hosts);
  if (!nodes.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("Dispatcher: ", nodes.status().message()));
  }
  const DeviceKind kind = memory.device().kind;
  const bool in_two_hops = hierarchical && kind == DeviceKind::kCpu;
  if (hierarchical && !in_two_hops) {
    Explain(comm, "hierarchical dispatch moves rows of the host's memory: running staged");
  }
  if (options.algorithm == DispatchAlgorithm::kDirect) {
    const absl::Status shared = TryPeerMemory(comm, memory);
    if (shared.ok()) return MakeDirectDispatcher<T>(*std::move(nodes), comm, memory);
    if (!absl::IsUnimplemented(shared)) return shared;
    Explain(comm, absl::StrCat("direct dispatch without peer memory, running staged: ",
                               shared.message()));
  }
  return MakeStagedDispatcher<T>(*std::move(nodes), comm, kind, in_two_hops);
}

template <typename T>
absl::Status Dispatcher<T>::CheckChunk(absl::string_view function, const DispatchCall& call) const {
  const DispatchPlan& plan = call.plan;
  const int chunk = call.chunk;
  const DispatchPlanOptions mine = PlanOptions(plan.chunks());
  if (plan.reads_peers() != mine.reads_peers || plan.node_size() != mine.node_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        function, ": the plan has reads_peers = ", plan.reads_peers(), " and node_size = ",
        plan.node_size(), ", expected ", mine.reads_peers, " and ", mine.node_size));
  }
  if (plan.ranks() == comm_.size() && plan.rank() == comm_.rank() && chunk >= 0 &&
      chunk < plan.chunks()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(function, ": chunk ", chunk, " of a plan of ", plan.chunks(),
                   " chunks for rank ", plan.rank(), " of ", plan.ranks(),
                   ", expected a plan for rank ", comm_.rank(), " of ", comm_.size()));
}

template <typename T>
absl::Status Dispatcher<T>::CheckDevice(absl::string_view function, const Stream& exchange) const {
  if (exchange.device().kind == kind_) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      function, ": the stream is not of the kind of device that the dispatcher is for"));
}

template <typename T>
absl::Status Dispatcher<T>::CheckDispatch(absl::string_view function, const DispatchCall& call,
                                          MatrixView<const T> x, MatrixView<T> expert_rows) const {
  MOE_RETURN_IF_ERROR(CheckChunk(function, call));
  MOE_RETURN_IF_ERROR(CheckShape(function, "input", x, call.plan.tokens(), x.cols()));
  MOE_RETURN_IF_ERROR(
      CheckShape(function, "expert_rows", expert_rows, call.plan.expert_rows(), x.cols()));
  return CheckDevice(function, call.exchange);
}

template <typename T>
absl::Status Dispatcher<T>::Dispatch(const DispatchCall& call, MatrixView<const T> x,
                                     MatrixView<T> expert_rows) {
  MOE_RETURN_IF_ERROR(CheckDispatch("Dispatch", call, x, expert_rows));
  return Out(call, x, std::nullopt, expert_rows);
}

template <typename T>
absl::Status Dispatcher<T>::DispatchScaled(const DispatchCall& call, MatrixView<const T> dy,
                                           absl::Span<const float> weight,
                                           MatrixView<T> expert_rows) {
  constexpr char kName[] = "DispatchScaled";
  MOE_RETURN_IF_ERROR(CheckDispatch(kName, call, dy, expert_rows));
  MOE_RETURN_IF_ERROR(CheckLength(kName, "weight", weight.size(), call.plan.slots()));
  return Out(call, dy, weight, expert_rows);
}

template <typename T>
absl::Status Dispatcher<T>::Return(const DispatchCall& call, MatrixView<const T> expert_rows,
                                   MatrixView<T> home_rows) {
  constexpr char kName[] = "Return";
  const int64_t hidden = home_rows.cols();
  MOE_RETURN_IF_ERROR(CheckChunk(kName, call));
  MOE_RETURN_IF_ERROR(
      CheckShape(kName, "expert_rows", expert_rows, call.plan.expert_rows(), hidden));
  MOE_RETURN_IF_ERROR(CheckShape(kName, "home_rows", home_rows, call.plan.return_rows(), hidden));
  if (home_rows.stride() != hidden) {
    return absl::InvalidArgumentError(absl::StrCat(
        kName, ": home_rows has stride ", home_rows.stride(), ", expected dense rows of ", hidden));
  }
  MOE_RETURN_IF_ERROR(CheckDevice(kName, call.exchange));
  return Back(call, expert_rows, home_rows);
}

template class Dispatcher<float>;
template class Dispatcher<BFloat16>;
template class Dispatcher<Float16>;
}  // namespace moe
