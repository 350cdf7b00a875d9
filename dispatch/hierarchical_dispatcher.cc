// Hierarchical dispatch: staged, with every all-to-all in two hops (two_hop_exchange.h).
#include <algorithm>
#include <memory>
#include <utility>

#include "dispatch/dispatcher_base.h"
#include "dispatch/two_hop_exchange.h"
#include "kernels/permute/permute.h"

namespace moe {
namespace {

template <typename T>
class HierarchicalDispatcher final : public DispatcherBase<T> {
 public:
  HierarchicalDispatcher(const DispatcherOptions& options, Communicator& comm,
                         TwoHopExchange two_hops)
      : DispatcherBase<T>(options, comm), two_hops_(std::move(two_hops)) {}

  DispatchAlgorithm algorithm() const override { return DispatchAlgorithm::kHierarchical; }

  absl::StatusOr<MatrixView<T>> ReturnBuffer(const DispatchPlan& plan, int64_t hidden,
                                             Workspace& workspace) override {
    return workspace.Matrix<T>(plan.expert_rows(), hidden);
  }

  absl::Status Dispatch(const DispatchPlan& plan, int chunk, MatrixView<const T> x,
                        MatrixView<T> expert_rows, Workspace& workspace,
                        Stream& exchange) override {
    MOE_RETURN_IF_ERROR(this->CheckDispatch("Dispatch", plan, chunk, x, expert_rows, exchange));
    MOE_ASSIGN_OR_RETURN(const auto received, SendTokens(plan, chunk, x, workspace, exchange));
    MOE_ASSIGN_OR_RETURN(const auto source, ExpertSource(plan, chunk, workspace));
    return GatherRows<T>(received, source, this->ExpertRowsOf(plan, chunk, expert_rows), exchange);
  }

  absl::Status DispatchScaled(const DispatchPlan& plan, int chunk, MatrixView<const T> dy,
                              absl::Span<const float> weight, MatrixView<T> expert_rows,
                              Workspace& workspace, Stream& exchange) override {
    MOE_RETURN_IF_ERROR(
        this->CheckDispatch("DispatchScaled", plan, chunk, dy, expert_rows, exchange));
    MOE_RETURN_IF_ERROR(this->CheckWeights(plan, weight));
    MOE_ASSIGN_OR_RETURN(const auto received, SendTokens(plan, chunk, dy, workspace, exchange));
    MOE_ASSIGN_OR_RETURN(const auto source, ExpertSource(plan, chunk, workspace));
    MOE_ASSIGN_OR_RETURN(const auto scale, SendWeights(plan, chunk, weight, workspace, exchange));
    return GatherScaledRows<T>(received, source, scale,
                               this->ExpertRowsOf(plan, chunk, expert_rows), exchange);
  }

  absl::Status Return(const DispatchPlan& plan, int chunk, MatrixView<const T> expert_rows,
                      MatrixView<T> home_rows, Workspace& workspace, Stream& exchange) override {
    MOE_RETURN_IF_ERROR(this->CheckReturn(plan, chunk, expert_rows, home_rows, exchange));
    MOE_ASSIGN_OR_RETURN(const auto order, ReturnOrderByRail(plan, chunk, workspace));
    MOE_ASSIGN_OR_RETURN(const auto send,
                         workspace.Matrix<T>(static_cast<int64_t>(order.size()), home_rows.cols()));
    MOE_RETURN_IF_ERROR(GatherRows<T>(expert_rows, order, send, exchange));
    return two_hops_.Back<T>(
        send, [&](int home, int sender) { return plan.ExpertRows(chunk, home, sender); },
        this->HomeRowsOf(plan, chunk, home_rows),
        [this](int peer, int64_t bytes) { this->CountBytes(peer, bytes); }, workspace, exchange);
  }

 private:
  // The chunk's received rows, by (local rank, node) of their source.
  absl::StatusOr<MatrixView<const T>> SendTokens(const DispatchPlan& plan, int chunk,
                                                 MatrixView<const T> x, Workspace& workspace,
                                                 Stream& exchange) {
    const auto token = plan.send_token(chunk);
    MOE_ASSIGN_OR_RETURN(const auto send,
                         workspace.Matrix<T>(static_cast<int64_t>(token.size()), x.cols()));
    MOE_RETURN_IF_ERROR(GatherRows<T>(x, token, send, exchange));
    return two_hops_.Out<T>(
        send, [&](int source, int to) { return plan.SendRows(chunk, source, to); },
        [this](int peer, int64_t bytes) { this->CountBytes(peer, bytes); }, workspace, exchange);
  }

  // plan.expert_source, which counts received rows by source rank, for rows in SendTokens' order.
  absl::StatusOr<absl::Span<const int32_t>> ExpertSource(const DispatchPlan& plan, int chunk,
                                                         Workspace& workspace) const {
    MOE_ASSIGN_OR_RETURN(const auto shift, workspace.Array<int64_t>(plan.ranks()));
    int64_t row = 0;
    two_hops_.ForEachRankByRail([&](int r) {
      shift[r] = row;
      row += plan.SendRows(chunk, r, plan.rank());
    });
    row = 0;
    for (int r = 0; r < plan.ranks(); ++r) {
      shift[r] -= row;
      row += plan.SendRows(chunk, r, plan.rank());
    }
    const auto source = plan.expert_source(chunk), peer = plan.expert_peer(chunk);
    MOE_ASSIGN_OR_RETURN(const auto shifted,
                         workspace.Array<int32_t>(static_cast<int64_t>(source.size())));
    for (size_t n = 0; n < source.size(); ++n) {
      shifted[n] = static_cast<int32_t>(source[n] + shift[peer[n]]);
    }
    return shifted;
  }

  // [expert rows of the chunk] the weight of each.
  absl::StatusOr<absl::Span<const float>> SendWeights(const DispatchPlan& plan, int chunk,
                                                      absl::Span<const float> weight,
                                                      Workspace& workspace, Stream& exchange) {
    MOE_ASSIGN_OR_RETURN(const auto send,
                         WeightsInHomeOrder(plan, chunk, weight, workspace, exchange));
    MOE_ASSIGN_OR_RETURN(
        const auto by_rail,
        two_hops_.Out<float>(
            send, [&](int source, int to) { return plan.ExpertRows(chunk, source, to); },
            [this](int peer, int64_t bytes) { this->CountBytes(peer, bytes); }, workspace,
            exchange));
    MOE_ASSIGN_OR_RETURN(const auto by_source,
                         TwoHopExchange::Transpose<float>(
                             by_rail, two_hops_.node_size(), two_hops_.nodes(),
                             [&](int l, int m) {
                               return plan.ExpertRows(chunk, two_hops_.RankOf(m, l), plan.rank());
                             },
                             workspace, exchange));
    return WeightsInExpertOrder(plan, chunk, by_source, workspace, exchange);
  }

  // The chunk's return order, by (local rank, node) of home instead of by home rank.
  absl::StatusOr<absl::Span<const int32_t>> ReturnOrderByRail(const DispatchPlan& plan, int chunk,
                                                              Workspace& workspace) const {
    const auto order = plan.return_order(chunk);
    MOE_ASSIGN_OR_RETURN(const auto by_rail,
                         workspace.Array<int32_t>(static_cast<int64_t>(order.size())));
    MOE_ASSIGN_OR_RETURN(const auto begin, workspace.Array<int64_t>(plan.ranks()));
    int64_t row = 0;
    for (int r = 0; r < plan.ranks(); ++r) {
      begin[r] = row;
      row += plan.ExpertRows(chunk, r, plan.rank());
    }
    auto to = by_rail.begin();
    two_hops_.ForEachRankByRail([&](int home) {
      to = std::copy_n(order.begin() + begin[home], plan.ExpertRows(chunk, home, plan.rank()), to);
    });
    return by_rail;
  }

  TwoHopExchange two_hops_;
};

}  // namespace

template <typename T>
absl::StatusOr<std::unique_ptr<Dispatcher<T>>> MakeHierarchicalDispatcher(
    const DispatcherOptions& options, Communicator& comm) {
  MOE_ASSIGN_OR_RETURN(
      TwoHopExchange two_hops,
      TwoHopExchange::Create(comm, options.node_size == 0 ? comm.size() : options.node_size));
  return std::make_unique<HierarchicalDispatcher<T>>(options, comm, std::move(two_hops));
}

template absl::StatusOr<std::unique_ptr<Dispatcher<float>>> MakeHierarchicalDispatcher(
    const DispatcherOptions&, Communicator&);
template absl::StatusOr<std::unique_ptr<Dispatcher<BFloat16>>> MakeHierarchicalDispatcher(
    const DispatcherOptions&, Communicator&);
template absl::StatusOr<std::unique_ptr<Dispatcher<Float16>>> MakeHierarchicalDispatcher(
    const DispatcherOptions&, Communicator&);

}  // namespace moe
