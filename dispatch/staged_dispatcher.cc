// Staged dispatch: gather to send order, AllToAllV, regroup by index; and back. A group of one rank
// gathers once, straight into the order that is wanted.
#include "dispatch/dispatcher_base.h"
#include "kernels/permute/permute.h"

namespace moe {
namespace {

template <typename T>
class StagedDispatcher final : public DispatcherBase<T> {
 public:
  StagedDispatcher(const DispatcherOptions& options, Communicator& comm, DeviceKind kind)
      : DispatcherBase<T>(options, comm, kind) {}

  DispatchAlgorithm algorithm() const override { return DispatchAlgorithm::kStaged; }

  absl::StatusOr<MatrixView<T>> ReturnBuffer(const DispatchPlan& plan, int64_t hidden,
                                             Workspace& workspace) override {
    return workspace.Matrix<T>(plan.expert_rows(), hidden);
  }

  absl::Status Dispatch(const DispatchPlan& plan, int chunk, MatrixView<const T> x,
                        MatrixView<T> expert_rows, Workspace& workspace,
                        Stream& exchange) override {
    MOE_RETURN_IF_ERROR(this->CheckDispatch("Dispatch", plan, chunk, x, expert_rows, exchange));
    if (plan.ranks() == 1) {
      CountReturned(plan, chunk, x.cols());
      return GatherRows<T>(x, plan.expert_token(chunk),
                           this->ExpertRowsOf(plan, chunk, expert_rows), exchange);
    }
    MOE_ASSIGN_OR_RETURN(const auto received, SendTokens(plan, chunk, x, workspace, exchange));
    return GatherRows<T>(received, plan.expert_source(chunk),
                         this->ExpertRowsOf(plan, chunk, expert_rows), exchange);
  }

  absl::Status DispatchScaled(const DispatchPlan& plan, int chunk, MatrixView<const T> dy,
                              absl::Span<const float> weight, MatrixView<T> expert_rows,
                              Workspace& workspace, Stream& exchange) override {
    MOE_RETURN_IF_ERROR(
        this->CheckDispatch("DispatchScaled", plan, chunk, dy, expert_rows, exchange));
    MOE_RETURN_IF_ERROR(this->CheckWeights(plan, weight));
    if (plan.ranks() == 1) {
      CountReturned(plan, chunk, dy.cols());
      CountWeights(plan, chunk);
      MOE_ASSIGN_OR_RETURN(const auto scale,  // one rank's home rows are its expert rows
                           WeightsInHomeOrder(plan, chunk, weight, workspace, exchange));
      return GatherScaledRows<T>(dy, plan.expert_token(chunk),
                                 {scale.data(), static_cast<size_t>(scale.rows())},
                                 this->ExpertRowsOf(plan, chunk, expert_rows), exchange);
    }
    MOE_ASSIGN_OR_RETURN(const auto received, SendTokens(plan, chunk, dy, workspace, exchange));
    MOE_ASSIGN_OR_RETURN(const auto scale, SendWeights(plan, chunk, weight, workspace, exchange));
    return GatherScaledRows<T>(received, plan.expert_source(chunk), scale,
                               this->ExpertRowsOf(plan, chunk, expert_rows), exchange);
  }

  absl::Status Return(const DispatchPlan& plan, int chunk, MatrixView<const T> expert_rows,
                      MatrixView<T> home_rows, Workspace& workspace, Stream& exchange) override {
    MOE_RETURN_IF_ERROR(this->CheckReturn(plan, chunk, expert_rows, home_rows, exchange));
    const int64_t hidden = home_rows.cols();
    const auto order = plan.return_order(chunk);
    const auto home = this->HomeRowsOf(plan, chunk, home_rows);
    const int me = plan.rank();
    CountReturned(plan, chunk, hidden);
    if (plan.ranks() == 1) return GatherRows<T>(expert_rows, order, home, exchange);
    MOE_ASSIGN_OR_RETURN(const auto send,
                         workspace.Matrix<T>(static_cast<int64_t>(order.size()), hidden));
    MOE_RETURN_IF_ERROR(GatherRows<T>(expert_rows, order, send, exchange));
    return ExchangeRows<T>(
        this->comm_, send, [&](int p) { return plan.ExpertRows(chunk, p, me); }, home,
        [&](int p) { return plan.ExpertRows(chunk, me, p); }, exchange);
  }

 private:
  static int64_t RowBytes(int64_t hidden) { return hidden * static_cast<int64_t>(sizeof(T)); }

  void CountSent(const DispatchPlan& plan, int chunk, int64_t hidden) {
    for (int p = 0; p < plan.ranks(); ++p) {
      this->CountBytes(p, plan.SendRows(chunk, plan.rank(), p) * RowBytes(hidden));
    }
  }
  // What goes home; within one rank also what comes, gathered without a send order.
  void CountReturned(const DispatchPlan& plan, int chunk, int64_t hidden) {
    for (int p = 0; p < plan.ranks(); ++p) {
      this->CountBytes(p, plan.ExpertRows(chunk, p, plan.rank()) * RowBytes(hidden));
    }
  }
  void CountWeights(const DispatchPlan& plan, int chunk) {
    for (int p = 0; p < plan.ranks(); ++p) {
      this->CountBytes(
          p, plan.ExpertRows(chunk, plan.rank(), p) * static_cast<int64_t>(sizeof(float)));
    }
  }

  // The chunk's received rows.
  absl::StatusOr<MatrixView<const T>> SendTokens(const DispatchPlan& plan, int chunk,
                                                 MatrixView<const T> x, Workspace& workspace,
                                                 Stream& exchange) {
    const int64_t hidden = x.cols();
    const auto token = plan.send_token(chunk);
    const int64_t received_rows = plan.recv_begin(chunk + 1) - plan.recv_begin(chunk);
    MOE_ASSIGN_OR_RETURN(const auto send,
                         workspace.Matrix<T>(static_cast<int64_t>(token.size()), hidden));
    MOE_ASSIGN_OR_RETURN(const auto received, workspace.Matrix<T>(received_rows, hidden));
    MOE_RETURN_IF_ERROR(GatherRows<T>(x, token, send, exchange));
    const int me = plan.rank();
    MOE_RETURN_IF_ERROR(ExchangeRows<T>(
        this->comm_, send, [&](int p) { return plan.SendRows(chunk, me, p); }, received,
        [&](int p) { return plan.SendRows(chunk, p, me); }, exchange));
    CountSent(plan, chunk, hidden);
    return received;
  }

  // [expert rows of the chunk] the weight of each. Weights travel in the order of home rows, which
  // at the experts' rank is return order.
  absl::StatusOr<absl::Span<const float>> SendWeights(const DispatchPlan& plan, int chunk,
                                                      absl::Span<const float> weight,
                                                      Workspace& workspace, Stream& exchange) {
    const int64_t rows = plan.expert_begin(chunk + 1) - plan.expert_begin(chunk);
    MOE_ASSIGN_OR_RETURN(const auto send,
                         WeightsInHomeOrder(plan, chunk, weight, workspace, exchange));
    MOE_ASSIGN_OR_RETURN(const auto received, workspace.Matrix<float>(rows, 1));
    const int me = plan.rank();
    MOE_RETURN_IF_ERROR(ExchangeRows<float>(
        this->comm_, send, [&](int p) { return plan.ExpertRows(chunk, me, p); }, received,
        [&](int p) { return plan.ExpertRows(chunk, p, me); }, exchange));
    CountWeights(plan, chunk);
    return WeightsInExpertOrder(plan, chunk, received, workspace, exchange);
  }
};

}  // namespace

template <typename T>
std::unique_ptr<Dispatcher<T>> MakeStagedDispatcher(const DispatcherOptions& options,
                                                    Communicator& comm, DeviceKind kind) {
  return std::make_unique<StagedDispatcher<T>>(options, comm, kind);
}

template std::unique_ptr<Dispatcher<float>> MakeStagedDispatcher(const DispatcherOptions&,
                                                                 Communicator&, DeviceKind);
template std::unique_ptr<Dispatcher<BFloat16>> MakeStagedDispatcher(const DispatcherOptions&,
                                                                    Communicator&, DeviceKind);
template std::unique_ptr<Dispatcher<Float16>> MakeStagedDispatcher(const DispatcherOptions&,
                                                                   Communicator&, DeviceKind);

}  // namespace moe
