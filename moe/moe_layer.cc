#include "moe/moe_layer.h"

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "kernels/combine/combine.h"
#include "kernels/norm/rms_norm.h"

namespace moe {
namespace {

// The offsets of the batch's micro-batches; without any, the call is one micro-batch.
absl::StatusOr<absl::Span<const int64_t>> MicroBatchOffsets(const Batch& batch, int64_t tokens,
                                                            Workspace& workspace) {
  if (!batch.micro_batch_offsets.empty()) return batch.micro_batch_offsets;
  MOE_ASSIGN_OR_RETURN(const absl::Span<int64_t> offsets, workspace.Array<int64_t>(2));
  offsets[0] = 0;
  offsets[1] = tokens;
  return offsets;
}

// Names what the layer does next in the messages of failed waits; layer and step stay.
void SetPhaseName(Mesh& mesh, const char* name) {
  CommPhase phase = mesh.expert_parallel().phase();
  phase.name = name;
  mesh.SetPhase(phase);
}

// Times `phase` on `stream` around `body`.
template <typename Body>
absl::Status Timed(Phase phase, PhaseClock* clock, Stream& stream, Body body) {
  if (clock == nullptr) return body();
  MOE_RETURN_IF_ERROR(clock->Start(phase, stream));
  MOE_RETURN_IF_ERROR(body());
  return clock->Stop(phase, stream);
}

}  // namespace

template <typename T>
absl::StatusOr<std::unique_ptr<MoeLayer<T>>> MoeLayer<T>::Create(const MoeLayerConfig& config,
                                                                 const std::string& prefix,
                                                                 ParameterStore& store,
                                                                 const Context& context) {
  if (config.overlap_degree < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("MoeLayer: overlap degree ", config.overlap_degree, ", expected >= 1"));
  }
  auto layer = std::unique_ptr<MoeLayer>(new MoeLayer(config, context));
  Communicator& group = context.mesh->expert_parallel();
  const RouterConfig& router = config.router;
  MOE_ASSIGN_OR_RETURN(layer->router_, Router<T>::Create(router));
  MOE_ASSIGN_OR_RETURN(layer->dispatcher_, Dispatcher<T>::Create(config.dispatcher, group));

  MOE_ASSIGN_OR_RETURN(layer->router_weight_, store.Add({.name = prefix + "gate.weight",
                                                         .rows = router.num_experts,
                                                         .cols = router.hidden_size,
                                                         .init_std = config.init_std}));
  ExpertsConfig experts = {.hidden_size = router.hidden_size,
                           .ffn_hidden_size = config.ffn_hidden_size,
                           .activation = config.activation,
                           .init_std = config.init_std,
                           .down_init_std = config.down_init_std};
  std::vector<std::string> prefixes;
  const ExpertPlacement& placement = layer->placement_;
  for (int32_t e = placement.FirstExpert(group.rank()); e < placement.FirstExpert(group.rank() + 1);
       ++e) {
    prefixes.push_back(absl::StrCat(prefix, "experts.", e, "."));
  }
  MOE_ASSIGN_OR_RETURN(layer->experts_,
                       Experts<T>::Create(experts, prefixes, ParameterGroup::kExpert, store));
  if (config.shared_expert_ffn_hidden_size > 0) {
    experts.ffn_hidden_size = config.shared_expert_ffn_hidden_size;
    prefixes = {prefix + "shared_expert."};
    MOE_ASSIGN_OR_RETURN(layer->shared_,
                         Experts<T>::Create(experts, prefixes, ParameterGroup::kReplicated, store));
  }
  return layer;
}

template <typename T>
absl::Status MoeLayer<T>::Forward(MatrixView<const T> x, const Batch& batch, MatrixView<T> y,
                                  MoeLayerSaved<T>* saved, RouterStats* stats) {
  if (x.cols() != config_.router.hidden_size || y.rows() != x.rows() || y.cols() != x.cols()) {
    return absl::InvalidArgumentError(
        absl::StrCat("MoeLayer: x [", x.rows(), ", ", x.cols(), "], y [", y.rows(), ", ", y.cols(),
                     "], expected both [T, ", config_.router.hidden_size, "]"));
  }
  Workspace& workspace = *context_.workspace;
  Stream& compute = *context_.compute;
  Stream& exchange = *context_.exchange;
  MoeLayerSaved<T> local;
  MoeLayerSaved<T>& s = saved != nullptr ? *saved : local;
  s.x = x;

  Routing routing;
  SetPhaseName(*context_.mesh, "plan");
  MOE_RETURN_IF_ERROR(Timed(Phase::kGate, context_.clock, compute, [&]() -> absl::Status {
    MOE_ASSIGN_OR_RETURN(routing, router_->Forward(x, router_weight_->view<T>(), batch, workspace,
                                                   compute, &s.router, stats));
    return absl::OkStatus();
  }));
  MOE_RETURN_IF_ERROR(Timed(Phase::kPlan, context_.clock, compute, [&]() -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const auto offsets, MicroBatchOffsets(batch, x.rows(), workspace));
    MOE_ASSIGN_OR_RETURN(DispatchPlan plan,
                         DispatchPlan::Build(routing, offsets, placement_,
                                             {.overlap_degree = config_.overlap_degree},
                                             context_.mesh->expert_parallel(), workspace, compute));
    s.plan = std::make_shared<const DispatchPlan>(std::move(plan));
    return absl::OkStatus();
  }));
  const DispatchPlan& plan = *s.plan;
  const int64_t hidden = x.cols();
  MOE_ASSIGN_OR_RETURN(const auto rows, workspace.Matrix<T>(plan.expert_rows(), hidden));
  MOE_ASSIGN_OR_RETURN(s.home_rows, workspace.Matrix<T>(plan.return_rows(), hidden));
  MOE_RETURN_IF_ERROR(experts_->Prepare(rows, workspace, s.experts));
  MOE_ASSIGN_OR_RETURN(const auto out, dispatcher_->ReturnBuffer(plan, hidden, workspace));

  MOE_RETURN_IF_ERROR(JoinStreams(exchange, compute));
  SetPhaseName(*context_.mesh, "dispatch");
  MOE_RETURN_IF_ERROR(ExchangeAroundExperts(
      plan, Phase::kDispatch, Phase::kCombine,
      [&](int chunk) { return dispatcher_->Dispatch(plan, chunk, x, rows, workspace, exchange); },
      [&](int first, int last) {
        return experts_->Forward(first, last, plan.expert_offsets(), s.experts, out, context_);
      },
      [&](int chunk) {
        return dispatcher_->Return(plan, chunk, out, s.home_rows, workspace, exchange);
      }));
  if (shared_ != nullptr) MOE_RETURN_IF_ERROR(SharedForward(x, y, s));
  MOE_RETURN_IF_ERROR(JoinStreams(compute, exchange));
  return Timed(Phase::kCombine, context_.clock, compute, [&] {
    return CombineRows<T>(s.home_rows, routing.slot_offset, plan.home_row_of_slot(), routing.weight,
                          y, shared_ != nullptr ? Write::kAdd : Write::kOverwrite, compute);
  });
}

template <typename T>
template <typename Send, typename Compute, typename Receive>
absl::Status MoeLayer<T>::ExchangeAroundExperts(const DispatchPlan& plan, Phase send_phase,
                                                Phase receive_phase, Send send, Compute compute,
                                                Receive receive) {
  Stream& exchange = *context_.exchange;
  std::vector<Event> arrived(plan.chunks());
  for (int c = 0; c < plan.chunks(); ++c) {
    MOE_RETURN_IF_ERROR(Timed(send_phase, context_.clock, exchange, [&] { return send(c); }));
    MOE_ASSIGN_OR_RETURN(arrived[c], exchange.Record());
  }
  for (int c = 0; c < plan.chunks(); ++c) {
    MOE_RETURN_IF_ERROR(context_.compute->WaitFor(arrived[c]));
    const int first = plan.chunk_first_expert()[c], last = plan.chunk_first_expert()[c + 1];
    MOE_RETURN_IF_ERROR(Timed(Phase::kExpert, context_.clock, *context_.compute,
                              [&] { return compute(first, last); }));
    MOE_RETURN_IF_ERROR(JoinStreams(exchange, *context_.compute));
    MOE_RETURN_IF_ERROR(Timed(receive_phase, context_.clock, exchange, [&] { return receive(c); }));
  }
  return absl::OkStatus();
}

template <typename T>
absl::StatusOr<absl::Span<const int64_t>> MoeLayer<T>::SharedOffsets(int64_t tokens) {
  MOE_ASSIGN_OR_RETURN(const auto offsets, context_.workspace->Array<int64_t>(2));
  offsets[0] = 0;
  offsets[1] = tokens;
  return offsets;
}

template <typename T>
absl::Status MoeLayer<T>::SharedForward(MatrixView<const T> x, MatrixView<T> y,
                                        MoeLayerSaved<T>& saved) {
  MOE_RETURN_IF_ERROR(shared_->Prepare(x, *context_.workspace, saved.shared));
  MOE_ASSIGN_OR_RETURN(const auto offsets, SharedOffsets(x.rows()));
  return Timed(Phase::kExpert, context_.clock, *context_.compute,
               [&] { return shared_->Forward(0, 1, offsets, saved.shared, y, context_); });
}

template <typename T>
absl::Status MoeLayer<T>::SharedBackward(MatrixView<const T> dy, MoeLayerSaved<T>& saved,
                                         MatrixView<T> dx) {
  Workspace& workspace = *context_.workspace;
  MOE_ASSIGN_OR_RETURN(const auto offsets, SharedOffsets(dy.rows()));
  MOE_ASSIGN_OR_RETURN(const auto segments,
                       MicroBatchOffsets(saved.router.batch, dy.rows(), workspace));
  MOE_ASSIGN_OR_RETURN(const auto d_shared, workspace.Matrix<T>(dy.rows(), dy.cols()));
  MOE_RETURN_IF_ERROR(Timed(Phase::kExpert, context_.clock, *context_.compute, [&] {
    return shared_->Backward(0, 1, offsets, segments, static_cast<int64_t>(segments.size()) - 1,
                             saved.shared, dy, d_shared, context_);
  }));
  return AddRows<T>(dx, d_shared, dx, *context_.compute);
}

template <typename T>
absl::Status MoeLayer<T>::Backward(MatrixView<const T> dy, MoeLayerSaved<T>& saved,
                                   float loss_scale, MatrixView<T> dx, GradientReady ready) {
  Workspace& workspace = *context_.workspace;
  Stream& compute = *context_.compute;
  Stream& exchange = *context_.exchange;
  const DispatchPlan& plan = *saved.plan;
  const Routing& routing = saved.router.routing;
  const int64_t hidden = dy.cols();

  MOE_ASSIGN_OR_RETURN(const auto d_weight, workspace.Array<float>(routing.slots()));
  MOE_ASSIGN_OR_RETURN(const auto d_out, workspace.Matrix<T>(plan.expert_rows(), hidden));
  MOE_ASSIGN_OR_RETURN(const auto home_dx, workspace.Matrix<T>(plan.return_rows(), hidden));
  MOE_ASSIGN_OR_RETURN(const auto d_rows, dispatcher_->ReturnBuffer(plan, hidden, workspace));

  MOE_RETURN_IF_ERROR(JoinStreams(exchange, compute));
  MOE_RETURN_IF_ERROR(Timed(Phase::kGate, context_.clock, compute, [&] {
    return CombineWeightGradient<T>(dy, saved.home_rows, routing.slot_offset,
                                    plan.home_row_of_slot(), d_weight, compute);
  }));
  SetPhaseName(*context_.mesh, "combine backward");
  MOE_RETURN_IF_ERROR(ExchangeAroundExperts(
      plan, Phase::kCombine, Phase::kDispatch,
      [&](int chunk) {
        return dispatcher_->DispatchScaled(plan, chunk, dy, routing.weight, d_out, workspace,
                                           exchange);
      },
      [&](int first, int last) {
        return experts_->Backward(first, last, plan.expert_offsets(), plan.segment_offsets(),
                                  plan.segments(), saved.experts, d_out, d_rows, context_);
      },
      [&](int chunk) {
        return dispatcher_->Return(plan, chunk, d_rows, home_dx, workspace, exchange);
      }));
  for (Parameter* parameter : experts_->parameters()) MOE_RETURN_IF_ERROR(ready(*parameter));

  MOE_RETURN_IF_ERROR(JoinStreams(compute, exchange));
  MOE_RETURN_IF_ERROR(Timed(Phase::kDispatch, context_.clock, compute, [&] {
    return CombineRows<T>(home_dx, routing.slot_offset, plan.home_row_of_slot(), {}, dx,
                          Write::kOverwrite, compute);
  }));
  if (shared_ != nullptr) {
    MOE_RETURN_IF_ERROR(SharedBackward(dy, saved, dx));
    for (Parameter* parameter : shared_->parameters()) MOE_RETURN_IF_ERROR(ready(*parameter));
  }
  MOE_RETURN_IF_ERROR(Timed(Phase::kGate, context_.clock, compute, [&] {
    return router_->Backward(d_weight, saved.router, router_weight_->view<T>(), loss_scale, dx,
                             router_weight_->grad(), workspace, compute);
  }));
  return ready(*router_weight_);
}

template class MoeLayer<float>;
template class MoeLayer<BFloat16>;

}  // namespace moe
