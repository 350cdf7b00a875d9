// Staged dispatch: gather to send order, AllToAllV, regroup by index; and back. A group of one rank
// gathers once, straight into the order that is wanted. Hierarchical dispatch is staged, with two
// hops on the way out (two_hop_exchange.h).
#include <algorithm>
#include <memory>
#include <utility>

#include "dispatch/exchange_rows.h"
#include "dispatch/two_hop_exchange.h"
#include "kernels/base/device_arrays.h"
#include "kernels/permute/permute.h"

namespace moe {
namespace {

// [home rows of the chunk, 1] weight of each, 0 for empty places. Enqueues.
absl::StatusOr<MatrixView<float>> WeightsInHomeOrder(const DispatchCall& call,
                                                     absl::Span<const float> weight) {
  const absl::Span<const int32_t> slot = call.plan.home_slot(call.chunk);
  MOE_ASSIGN_OR_RETURN(const auto out,
                       call.workspace.Matrix<float>(static_cast<int64_t>(slot.size()), 1));
  const MatrixView<const float> by_slot(weight.data(), static_cast<int64_t>(weight.size()), 1);
  MOE_RETURN_IF_ERROR(GatherRows<float>(by_slot, slot, out, call.exchange));
  return out;
}

// [expert rows of the chunk, 1] the same weights, received in return order. Enqueues.
absl::StatusOr<MatrixView<float>> WeightsInExpertOrder(const DispatchCall& call,
                                                       MatrixView<const float> received) {
  const absl::Span<const int32_t> place = call.plan.return_place(call.chunk);
  MOE_ASSIGN_OR_RETURN(const auto out,
                       call.workspace.Matrix<float>(static_cast<int64_t>(place.size()), 1));
  MOE_RETURN_IF_ERROR(GatherRows<float>(received, place, out, call.exchange));
  return out;
}

template <typename T>
class StagedDispatcher : public Dispatcher<T> {
 public:
  StagedDispatcher(Nodes nodes, Communicator& comm, DeviceKind kind)
      : Dispatcher<T>(std::move(nodes), comm, kind) {}

  DispatchAlgorithm algorithm() const override { return DispatchAlgorithm::kStaged; }

  absl::StatusOr<MatrixView<T>> ReturnBuffer(const DispatchPlan& plan, int64_t hidden,
                                             Workspace& workspace, const Site&) override {
    return workspace.Matrix<T>(plan.expert_rows(), hidden);
  }

  bool ReturnsInPlace(const DispatchPlan& plan) const override { return GathersOnce(plan); }

 private:
  absl::Status Out(const DispatchCall& call, MatrixView<const T> x,
                   std::optional<absl::Span<const float>> weight,
                   MatrixView<T> expert_rows) override {
    const DispatchPlan& plan = call.plan;
    const int chunk = call.chunk;
    const auto rows = this->ExpertRowsOf(call, expert_rows);
    if (GathersOnce(plan)) {
      CountReturned(plan, chunk, x.cols());
      if (weight.has_value()) CountWeights(plan, chunk);
      const TokenRows tokens = {.slot_offset = plan.slot_offset(),
                                .row_of_slot = plan.home_row_of_slot(),  // expert rows, too
                                .token_of_row = plan.expert_token(chunk),
                                .first_row = plan.expert_begin(chunk)};
      return GatherTokens<T>(x, tokens, weight.value_or(absl::Span<const float>()), rows,
                             call.exchange);
    }
    MOE_ASSIGN_OR_RETURN(const auto received, SendTokens(call, x));
    const auto source = plan.expert_source(chunk);
    if (!weight.has_value()) return GatherRows<T>(received, source, rows, call.exchange);
    MOE_ASSIGN_OR_RETURN(const auto home, WeightsInHomeOrder(call, *weight));
    MOE_ASSIGN_OR_RETURN(const auto weights, SendWeights(call, home));
    MOE_ASSIGN_OR_RETURN(const MatrixView<const float> scale, WeightsInExpertOrder(call, weights));
    return GatherScaledRows<T>(received, source, AllOf(scale), rows, call.exchange);
  }

  absl::Status Back(const DispatchCall& call, MatrixView<const T> expert_rows,
                    MatrixView<T> home_rows) override {
    const DispatchPlan& plan = call.plan;
    const int chunk = call.chunk;
    const int64_t hidden = home_rows.cols();
    const auto home = this->HomeRowsOf(call, home_rows);
    if (GathersOnce(plan)) {
      CountReturned(plan, chunk, hidden);
      if (home_rows.data() == expert_rows.data()) return absl::OkStatus();
      return GatherRows<T>(expert_rows, plan.return_order(chunk), home, call.exchange);
    }
    const auto order = plan.return_order(chunk);
    MOE_ASSIGN_OR_RETURN(const auto send,
                         call.workspace.Matrix<T>(static_cast<int64_t>(order.size()), hidden));
    MOE_RETURN_IF_ERROR(GatherRows<T>(expert_rows, order, send, call.exchange));
    return SendHome(call, send, home);
  }

  // send: the chunk's send rows. Its received rows.
  virtual absl::StatusOr<MatrixView<const T>> SendRows(const DispatchCall& call,
                                                       MatrixView<const T> send) {
    const DispatchPlan& plan = call.plan;
    const int chunk = call.chunk;
    const int64_t received_rows = plan.recv_begin(chunk + 1) - plan.recv_begin(chunk);
    MOE_ASSIGN_OR_RETURN(const auto received, call.workspace.Matrix<T>(received_rows, send.cols()));
    const int me = plan.rank();
    MOE_RETURN_IF_ERROR(ExchangeRows<T>(
        ExchangeOf(call), send, [&](int p) { return plan.SendRows(chunk, me, p); }, received,
        [&](int p) { return plan.SendRows(chunk, p, me); }));
    for (int p = 0; p < plan.ranks(); ++p) {
      this->CountBytes(p, plan.SendRows(chunk, me, p) * RowBytes<T>(send.cols()));
    }
    return received;
  }
  // send: weights in the order of home rows, which at the experts' rank is return order.
  absl::StatusOr<MatrixView<const float>> SendWeights(const DispatchCall& call,
                                                      MatrixView<const float> send) {
    const DispatchPlan& plan = call.plan;
    const int chunk = call.chunk;
    const int64_t rows = plan.expert_begin(chunk + 1) - plan.expert_begin(chunk);
    MOE_ASSIGN_OR_RETURN(const auto received, call.workspace.Matrix<float>(rows, 1));
    const int me = plan.rank();
    MOE_RETURN_IF_ERROR(ExchangeRows<float>(
        ExchangeOf(call), send, [&](int p) { return plan.ExpertRows(chunk, me, p); }, received,
        [&](int p) { return plan.ExpertRows(chunk, p, me); }));
    CountWeights(plan, chunk);
    return received;
  }
  // send: in return order. home: in the order of home rows.
  absl::Status SendHome(const DispatchCall& call, MatrixView<const T> send, MatrixView<T> home) {
    const DispatchPlan& plan = call.plan;
    const int chunk = call.chunk;
    CountReturned(plan, chunk, send.cols());
    const int me = plan.rank();
    return ExchangeRows<T>(
        ExchangeOf(call), send, [&](int p) { return plan.ExpertRows(chunk, p, me); }, home,
        [&](int p) { return plan.ExpertRows(chunk, me, p); });
  }

  RowExchange ExchangeOf(const DispatchCall& call) {
    return {this->comm_, call.exchange, this->clock(), call.site};
  }
  static bool GathersOnce(const DispatchPlan& plan) { return plan.ranks() == 1; }
  absl::StatusOr<MatrixView<const T>> SendTokens(const DispatchCall& call, MatrixView<const T> x) {
    const auto token = call.plan.send_token(call.chunk);
    MOE_ASSIGN_OR_RETURN(const auto send,
                         call.workspace.Matrix<T>(static_cast<int64_t>(token.size()), x.cols()));
    MOE_RETURN_IF_ERROR(GatherRows<T>(x, token, send, call.exchange));
    return SendRows(call, send);
  }

  // What goes home; within one rank also what comes, gathered without a send order.
  void CountReturned(const DispatchPlan& plan, int chunk, int64_t hidden) {
    for (int p = 0; p < plan.ranks(); ++p) {
      this->CountBytes(p, plan.ExpertRows(chunk, p, plan.rank()) * RowBytes<T>(hidden));
    }
  }
  void CountWeights(const DispatchPlan& plan, int chunk) {
    for (int p = 0; p < plan.ranks(); ++p) {
      this->CountBytes(
          p, plan.ExpertRows(chunk, plan.rank(), p) * static_cast<int64_t>(sizeof(float)));
    }
  }
};

template <typename T>
class HierarchicalDispatcher final : public StagedDispatcher<T> {
 public:
  HierarchicalDispatcher(Nodes nodes, Communicator& comm, TwoHopExchange two_hops)
      : StagedDispatcher<T>(std::move(nodes), comm, DeviceKind::kCpu),
        two_hops_(std::move(two_hops)) {}

  DispatchAlgorithm algorithm() const override { return DispatchAlgorithm::kHierarchical; }
  void set_clock(ExchangeClock* clock) override {
    StagedDispatcher<T>::set_clock(clock);
    two_hops_.set_clock(clock);
  }

 private:
  absl::StatusOr<MatrixView<const T>> SendRows(const DispatchCall& call,
                                               MatrixView<const T> send) override {
    const DispatchPlan& plan = call.plan;
    const int chunk = call.chunk;
    return two_hops_.Send<T>(
        send, [&](int source, int to) { return plan.SendRows(chunk, source, to); },
        {[this](int peer, int64_t bytes) { this->CountBytes(peer, bytes); }, call.workspace,
         call.exchange, call.site},
        {plan.rail_sent(chunk), plan.rail_received(chunk), plan.relay_source(chunk)});
  }

  TwoHopExchange two_hops_;
};

}  // namespace

template <typename T>
absl::StatusOr<std::unique_ptr<Dispatcher<T>>> MakeStagedDispatcher(Nodes nodes, Communicator& comm,
                                                                    DeviceKind kind,
                                                                    bool in_two_hops) {
  if (!in_two_hops) return std::make_unique<StagedDispatcher<T>>(std::move(nodes), comm, kind);
  MOE_ASSIGN_OR_RETURN(TwoHopExchange two_hops, TwoHopExchange::Create(comm, nodes.size));
  return std::make_unique<HierarchicalDispatcher<T>>(std::move(nodes), comm, std::move(two_hops));
}

template absl::StatusOr<std::unique_ptr<Dispatcher<float>>> MakeStagedDispatcher(Nodes,
                                                                                 Communicator&,
                                                                                 DeviceKind, bool);
template absl::StatusOr<std::unique_ptr<Dispatcher<BFloat16>>> MakeStagedDispatcher(Nodes,
                                                                                    Communicator&,
                                                                                    DeviceKind,
                                                                                    bool);
template absl::StatusOr<std::unique_ptr<Dispatcher<Float16>>> MakeStagedDispatcher(Nodes,
                                                                                   Communicator&,
                                                                                   DeviceKind,
                                                                                   bool);

}  // namespace moe
