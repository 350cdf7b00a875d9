// One batch's way through the layer, forward and backward.
#include <optional>
#include <utility>

#include <absl/container/inlined_vector.h>
#include <absl/strings/str_cat.h>

#include "gating/router_check.h"
#include "kernels/base/caught.h"
#include "kernels/base/status_macros.h"
#include "kernels/combine/combine.h"
#include "kernels/elementwise/elementwise.h"
#include "moe/layer/moe_layer.h"
#include "moe/run/finite.h"
#include "moe/run/turns.h"
#include "moe/state/weight_lease.h"

namespace moe {
namespace {

// Gives back what the exchange stream works on, for that stream to take again in its own order.
// Nothing where it shares the compute stream's workspace: that lends for the round.
std::optional<WorkspaceScope> ExchangeScope(const Context& context) {
  if (context.exchange_workspace == context.workspace) return std::nullopt;
  return std::optional<WorkspaceScope>(std::in_place, *context.exchange_workspace);
}

// What the layer's products leave to its exchange; nullptr where it does not run beside them.
SpareMultiprocessors* SpareForExchange(const Context& context) {
  const bool beside =
      context.exchange != context.compute && context.mesh->size(MeshGroup::kExpert) > 1;
  return beside ? context.gemm.spare : nullptr;
}

// What a pass takes of the context's workspaces for its own length.
class Scratch {
 public:
  explicit Scratch(const Context& context)
      : scope_(*context.workspace), host_scope_(*context.host_workspace) {}

 private:
  const WorkspaceScope scope_, host_scope_;
};

// What experts give back, [N, H], and the same rows at home: one memory where none has to move.
template <typename T>
struct ReturnedRows {
  MatrixView<T> out, home;
};
// out: in the context's scratch, if it is not home; home: in `at_home`.
template <typename T>
absl::StatusOr<ReturnedRows<T>> MakeReturnedRows(Dispatcher<T>& dispatcher,
                                                 const DispatchPlan& plan, int64_t hidden,
                                                 const Pass& pass, Workspace& at_home) {
  const bool in_place = dispatcher.ReturnsInPlace(plan);
  MOE_ASSIGN_OR_RETURN(
      const auto out,
      dispatcher.ReturnBuffer(plan, hidden, in_place ? at_home : *pass.context.workspace,
                              pass.site.Named("plan")));
  if (in_place) return ReturnedRows<T>{out, out};
  MOE_ASSIGN_OR_RETURN(const auto home, at_home.Matrix<T>(plan.return_rows(), hidden));
  return ReturnedRows<T>{out, home};
}

// Forward and backward, as the time line names them. Backward's first exchange is combine's.
constexpr Work kGate = {.phase = Phase::kGate, .name = "gate"};
constexpr Work kGateBackward = {.phase = Phase::kGate, .name = "gate backward"};
constexpr Work kWeightBackward = {.phase = Phase::kGate, .name = "combine weights backward"};
constexpr Work kPlan = {.phase = Phase::kPlan, .name = "plan"};
constexpr Work kDispatch = {.phase = Phase::kDispatch, .name = "dispatch"};
constexpr Work kDispatchBackward = {.phase = Phase::kDispatch, .name = "dispatch backward"};
constexpr Work kDispatchBackwardSum = {.phase = Phase::kDispatch, .name = "dispatch backward sum"};
constexpr Work kExperts = {.phase = Phase::kExpert, .name = "experts"};
constexpr Work kExpertsBackward = {.phase = Phase::kExpert, .name = "experts backward"};
constexpr Work kExpertsWeightGradients = {.phase = Phase::kExpert,
                                          .name = "experts weight gradients"};
constexpr Work kShared = {.phase = Phase::kExpert, .name = "shared expert"};
constexpr Work kSharedBackward = {.phase = Phase::kExpert, .name = "shared expert backward"};
constexpr Work kCombine = {.phase = Phase::kCombine, .name = "combine"};
constexpr Work kCombineSum = {.phase = Phase::kCombine, .name = "combine sum"};
constexpr Work kCombineBackward = {.phase = Phase::kCombine, .name = "combine backward"};

// Local experts [first, last) of a plan.
LinearRows Networks(const DispatchPlan& plan, int first, int last, const Pass& pass) {
  return {.first = first, .last = last, .offsets = plan.expert_offsets(), .site = pass.site};
}

// Their rows; none where a device alone knows them.
template <typename T>
MatrixView<T> RowsOf(MatrixView<T> expert_rows, const DispatchPlan& plan, int first, int last) {
  const absl::Span<const int64_t> offsets = plan.expert_offsets().host();
  if (offsets.empty()) return {};
  return RowRange(expert_rows, offsets[first], offsets[last]);
}

// `status` of a pass; after a failure the streams are empty.
absl::Status Settle(absl::Status status, const Context& context) {
  if (status.ok()) return status;
  // A peer may wait for what this rank will not send, and this rank's exchange for the peer.
  if (!absl::IsInvalidArgument(status)) context.mesh->Abort(status);
  context.exchange->Synchronize().IgnoreError();
  context.compute->Synchronize().IgnoreError();
  return status;
}

}  // namespace

template <typename T>
absl::Status MoeLayer<T>::Forward(const Pass& pass, MatrixView<const T> x, MatrixView<T> y) {
  MOE_RETURN_IF_ERROR(CheckForward(pass, x, y));
  const Scratch scratch(pass.context);
  const auto run = [&]() -> absl::Status {
    Saved& saved = saved_.Begin(pass.stash);
    saved = {.given = x};
    MOE_ASSIGN_OR_RETURN(const WeightLease lease, WeightLease::Take(pass, parameters_));
    MOE_RETURN_IF_ERROR(ForwardTokens(pass, y, saved));
    MOE_RETURN_IF_ERROR(CountSlots(pass, saved));
    saved.ended = Saved::Ended::kForward;
    return absl::OkStatus();
  };
  return Settle(Caught(run), pass.context);
}

template <typename T>
absl::Status MoeLayer<T>::ForwardRows(const Pass& pass, MatrixView<const T> x, MatrixView<T> y,
                                      Saved& s) {
  const Context& context = pass.context;
  Workspace& kept = pass.kept();
  Stream& compute = *context.compute;
  Stream& exchange = *context.exchange;
  const std::optional<WorkspaceScope> exchange_scope = ExchangeScope(context);
  s.x = x;

  MOE_RETURN_IF_ERROR(Route(pass, s));
  const DispatchPlan& plan = *s.plan;
  const bool weigh_input = s.router.routing.weight_on == WeightOn::kInput;
  const int64_t hidden = x.cols();
  Workspace& of_rows = s.gathered.has_value() ? *context.workspace : kept;
  MOE_ASSIGN_OR_RETURN(const auto rows, of_rows.Matrix<T>(plan.expert_rows(), hidden));
  MOE_RETURN_IF_ERROR(experts_->Prepare(rows, kept, s.experts, s.gathered));
  MOE_ASSIGN_OR_RETURN(const auto rows_back,
                       MakeReturnedRows(*dispatcher_, plan, hidden, pass, kept));
  const MatrixView<T> out = rows_back.out;
  s.home_rows = rows_back.home;
  const auto compute_experts = [&](int first, int last) -> absl::Status {
    const LinearRows networks = Networks(plan, first, last, pass);
    MOE_RETURN_IF_ERROR(experts_->Forward(context, networks, s.experts, out));
    return CheckFinite(pass, kExperts.name, RowsOf(out, plan, first, last));
  };
  const auto compute_chunk = [&](int first, int last) {
    const ExpertRows rows = {first, last, plan.expert_offsets().host(), experts_->weights()};
    return ForExperts(pass, rows, compute_experts);
  };

  MOE_RETURN_IF_ERROR(JoinStreams(exchange, compute));
  const SpareMultiprocessors::Use exchanging(SpareForExchange(context));
  MOE_RETURN_IF_ERROR(ExchangeAroundExperts(
      pass, {.plan = plan, .send = kDispatch, .compute = kExperts, .receive = kCombine},
      [&](const DispatchCall& call) {
        if (!weigh_input) return dispatcher_->Dispatch(call, x, rows);
        return dispatcher_->DispatchScaled(call, x, s.own.weight, rows);
      },
      compute_chunk,
      [&](const DispatchCall& call) { return dispatcher_->Return(call, out, s.home_rows); }));
  MOE_ASSIGN_OR_RETURN(const Write write, HomeForward(pass, y, s));
  MOE_RETURN_IF_ERROR(JoinExchange(context));
  MOE_RETURN_IF_ERROR(Timed(pass, kCombineSum, compute, [&] {
    return CombineRows<T>(s.home_rows, s.own.slot_offset, plan.home_row_of_slot(),
                          weigh_input ? absl::Span<const float>() : s.own.weight, y, write,
                          compute);
  }));
  return CheckFinite(pass, kCombine.name, y);
}

template <typename T>
absl::Status MoeLayer<T>::Route(const Pass& pass, Saved& saved) {
  RouterStats* const stats = pass.router_stats.empty() ? nullptr : &pass.router_stats.front();
  const Context& context = pass.context;
  Workspace& host = pass.kept_host();
  Stream& compute = *context.compute;
  const bool identities = config_.router.num_outputs() > config_.router.num_experts;
  const RoutingFor reader =
      plans_on_device_ && !identities ? RoutingFor::kDevice : RoutingFor::kHost;
  const RouterCall<T> call = {.tokens = saved.x,
                              .first_token = saved.rows.begin(),
                              .batch_tokens = saved.rows.all(),
                              .inputs = router_inputs(),
                              .batch = pass.batch,
                              .workspace = pass.kept(),
                              .host = host,
                              .stream = compute,
                              .reader = reader,
                              .bfloat16_order = context.gemm.bfloat16_order};
  const auto gate = [&]() -> absl::Status {
    MOE_RETURN_IF_ERROR(router_->Logits(call, saved.router));
    ReplaceValue(pass, kGate.name, saved.rows.Of(saved.router.logits));
    MOE_RETURN_IF_ERROR(GatherLogits(pass, saved));
    return router_->Decide(call, saved.router, stats);
  };
  MOE_RETURN_IF_ERROR(Timed(pass, kGate, compute, gate));
  if (expert_bias_ != nullptr) {
    const int64_t layer = pass.site.layer;
    MOE_RETURN_IF_ERROR(AtPlace(CheckExpertBias(expert_bias_->master(), expert_bias_->spec().name,
                                                layer >= 0 ? layer : config_.router.layer),
                                pass, kGate.name));
  }
  if (stats != nullptr && !OnCuda(context)) {
    MOE_RETURN_IF_ERROR(AtPlace(stats->Wait(), pass, kGate.name));
  }
  MOE_ASSIGN_OR_RETURN(const Routing planned, TakeOwnSlots(pass, saved));
  MOE_RETURN_IF_ERROR(FindIdentities(pass, share_.cut() ? planned : saved.router.routing, saved));
  return Timed(pass, kPlan, compute, [&]() -> absl::Status {
    absl::Span<const int64_t> offsets = saved.router.batch.micro_batch_offsets;
    if (share_.cut()) {
      MOE_ASSIGN_OR_RETURN(const auto own, host.Array<int64_t>(2));
      own[0] = 0;
      own[1] = saved.rows.count();
      offsets = own;
    }
    MOE_ASSIGN_OR_RETURN(saved.plan, MakePlan(planned, offsets, pass));
    return GatherCounts(pass, saved);
  });
}

template <typename T>
absl::Status MoeLayer<T>::CountSlots(const Pass& pass, const Saved& saved) {
  if (counted_slots_.empty() || !pass.counts) return absl::OkStatus();
  const Context& context = pass.context;
  const WorkspaceScope scope(*context.host_workspace);
  absl::Span<const int32_t> kept = saved.plan->kept_slots();
  if (plans_on_device_ && saved.plan->ranks() == 1) {
    MOE_ASSIGN_OR_RETURN(kept, OnHost(kept, context));
  }
  // [B, E]
  const size_t experts = saved.router.routing.num_routed_experts;
  for (size_t i = 0; i < kept.size(); ++i) counted_slots_[i % experts] += kept[i];
  return absl::OkStatus();
}

template <typename T>
absl::StatusOr<DispatchPlan> MoeLayer<T>::MakePlan(const Routing& routing,
                                                   absl::Span<const int64_t> offsets,
                                                   const Pass& pass) {
  const Context& context = pass.context;
  Workspace& host = pass.kept_host();
  Workspace& workspace = pass.kept();
  const DispatchPlanInputs inputs = {.routing = routing,
                                     .micro_batch_offsets = offsets,
                                     .placement = placement_,
                                     .options = dispatcher_->PlanOptions(config_.overlap_degree),
                                     .comm = context.mesh->group(MeshGroup::kExpert),
                                     .site = pass.site.Named("plan")};
  if (plans_on_device_) {
    return DispatchPlan::BuildOnDevice(inputs, host, workspace, *context.compute);
  }
  MOE_ASSIGN_OR_RETURN(const DispatchPlan plan, DispatchPlan::Build(inputs, host, *context.host));
  return plan.OnDevice(workspace, *context.compute);
}

template <typename T>
template <typename Send, typename Compute, typename Receive>
absl::Status MoeLayer<T>::ExchangeAroundExperts(const Pass& pass, ExchangeWork work, Send send,
                                                Compute compute, Receive receive) {
  const DispatchPlan& plan = work.plan;
  const Context& context = pass.context;
  Stream& exchange = *context.exchange;
  const int chunks = plan.chunks();
  work.send.moved = work.receive.moved = &dispatcher_->bytes();
  absl::InlinedVector<Event, 16> arrived(chunks), computed(chunks);
  const auto call = [&](int c, const Work& part) -> DispatchCall {
    return {plan, c, *context.exchange_workspace, exchange, pass.site.Named(part.name)};
  };
  const auto send_chunk = [&](int c) -> absl::Status {
    work.send.chunk = c;
    MOE_RETURN_IF_ERROR(Timed(pass, work.send, exchange, [&] { return send(call(c, work.send)); }));
    MOE_ASSIGN_OR_RETURN(arrived[c], exchange.Record());
    return absl::OkStatus();
  };
  const auto compute_chunk = [&](int c) -> absl::Status {
    MOE_RETURN_IF_ERROR(WaitForExchange(context, arrived[c]));
    const int first = plan.chunk_first_expert()[c], last = plan.chunk_first_expert()[c + 1];
    work.compute.chunk = c;
    MOE_RETURN_IF_ERROR(
        Timed(pass, work.compute, *context.compute, [&] { return compute(first, last); }));
    MOE_ASSIGN_OR_RETURN(computed[c], context.compute->Record());
    return absl::OkStatus();
  };
  const auto receive_chunk = [&](int c) -> absl::Status {
    if (&exchange != context.compute) MOE_RETURN_IF_ERROR(exchange.WaitFor(computed[c]));
    work.receive.chunk = c;
    return Timed(pass, work.receive, exchange, [&] { return receive(call(c, work.receive)); });
  };
  if (OnCuda(context)) {
    // An exchange through the host's memory holds the host: chunk c is being computed meanwhile.
    for (int c = 0; c < chunks; ++c) {
      MOE_RETURN_IF_ERROR(send_chunk(c));
      if (c > 0) MOE_RETURN_IF_ERROR(receive_chunk(c - 1));
      MOE_RETURN_IF_ERROR(compute_chunk(c));
    }
    return receive_chunk(chunks - 1);
  }
  for (int c = 0; c < chunks; ++c) MOE_RETURN_IF_ERROR(send_chunk(c));
  for (int c = 0; c < chunks; ++c) {
    MOE_RETURN_IF_ERROR(compute_chunk(c));
    MOE_RETURN_IF_ERROR(receive_chunk(c));
  }
  return absl::OkStatus();
}

template <typename T>
absl::StatusOr<Write> MoeLayer<T>::HomeForward(const Pass& pass, MatrixView<T> y, Saved& saved) {
  Stream& compute = *pass.context.compute;
  Write write = Write::kOverwrite;
  if (shared_ != nullptr) {
    MOE_RETURN_IF_ERROR(Timed(pass, kShared, compute, [&] {
      return shared_->Forward(pass, saved.rows, saved.x, y, saved.shared);
    }));
    write = Write::kAdd;
  }
  if (saved.identity_row.empty()) return write;
  MOE_RETURN_IF_ERROR(CombineRows<T>(saved.x, saved.own.slot_offset, saved.identity_row,
                                     saved.own.weight, y, write, compute));
  return Write::kAdd;
}

template <typename T>
absl::Status MoeLayer<T>::HomeBackward(const Pass& pass, const HomeGradients& gradients,
                                       Saved& saved, GradientReady ready) {
  const Context& context = pass.context;
  const MatrixView<const T> dy = gradients.dy;
  const MatrixView<T> dx = gradients.dx;
  Workspace& workspace = *context.workspace;
  Stream& compute = *context.compute;
  if (!saved.identity_row.empty()) {
    const auto slots = static_cast<int64_t>(saved.identity_row.size());
    MOE_ASSIGN_OR_RETURN(const auto by_identity, workspace.Array<float>(slots));
    MOE_RETURN_IF_ERROR(CombineWeightGradient<T>(dy, saved.x, saved.own.slot_offset,
                                                 saved.identity_row, by_identity, compute));
    // One of the two is 0: a slot travels or is added at home.
    MOE_RETURN_IF_ERROR(Scale(by_identity, 1, gradients.d_weight, Write::kAdd, compute));
    MOE_RETURN_IF_ERROR(CombineRows<T>(dy, saved.own.slot_offset, saved.identity_row,
                                       saved.own.weight, dx, Write::kAdd, compute));
  }
  if (shared_ == nullptr) return absl::OkStatus();
  return Timed(pass, kSharedBackward, compute, [&] {
    return shared_->Backward(pass,
                             {.dy = dy,
                              .dx = dx,
                              .own = saved.rows,
                              .micro_batch_offsets = saved.router.batch.micro_batch_offsets,
                              .segments = gradients.segments},
                             saved.shared, ready);
  });
}

template <typename T>
absl::Status MoeLayer<T>::Backward(const Pass& pass, MatrixView<const T> dy, MatrixView<T> dx,
                                   GradientReady ready) {
  MOE_ASSIGN_OR_RETURN(Saved* const saved, SavedOf(pass));
  MOE_RETURN_IF_ERROR(CheckBackward(dy, *saved, dx));
  saved->ended = Saved::Ended::kBackward;
  const Scratch scratch(pass.context);
  const auto run = [&]() -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const WeightLease lease, WeightLease::Take(pass, parameters_));
    return BackwardTokens(pass, dy, *saved, dx, ready);
  };
  return Settle(Caught(run), pass.context);
}

template <typename T>
absl::Status MoeLayer<T>::BackwardRows(const Pass& pass, MatrixView<const T> dy, Saved& saved,
                                       MatrixView<T> dx, GradientReady ready) {
  const Context& context = pass.context;
  Workspace& workspace = *context.workspace;
  Stream& compute = *context.compute;
  Stream& exchange = *context.exchange;
  const std::optional<WorkspaceScope> exchange_scope = ExchangeScope(context);
  const DispatchPlan& plan = *saved.plan;
  const Routing& routing = saved.router.routing;
  const int64_t hidden = dy.cols();

  MOE_ASSIGN_OR_RETURN(
      const auto d_weight,
      workspace.Array<float>(static_cast<int64_t>(saved.router.on_device.weight.size())));
  const auto own_d_weight = d_weight.subspan(
      saved.own.weight.data() - saved.router.on_device.weight.data(), saved.own.weight.size());
  MOE_ASSIGN_OR_RETURN(const auto d_out, workspace.Matrix<T>(plan.expert_rows(), hidden));
  MOE_ASSIGN_OR_RETURN(const auto rows_back,
                       MakeReturnedRows(*dispatcher_, plan, hidden, pass, workspace));
  MOE_RETURN_IF_ERROR(experts_->PrepareBackward(workspace, saved.experts));
  const MatrixView<T> d_rows = rows_back.out, home_dx = rows_back.home;

  // A weight on the output has its gradient from what came home in forward, one on the input from
  // what comes home now.
  const bool weigh_input = routing.weight_on == WeightOn::kInput;
  const auto weight_gradient = [&](MatrixView<const T> at_home,
                                   MatrixView<const T> returned) -> absl::Status {
    MOE_RETURN_IF_ERROR(Timed(pass, kWeightBackward, compute, [&] {
      return CombineWeightGradient<T>(at_home, returned, saved.own.slot_offset,
                                      plan.home_row_of_slot(), own_d_weight, compute);
    }));
    NoteNonFinite(pass, kCombineBackward.name,
                  MatrixView<float>(own_d_weight.data(), std::ssize(own_d_weight), 1));
    return absl::OkStatus();
  };
  const auto input_gradient = [&](int first, int last) -> absl::Status {
    MOE_RETURN_IF_ERROR(experts_->InputGradient(context, Networks(plan, first, last, pass),
                                                saved.experts, d_out, d_rows));
    NoteNonFinite(pass, kExpertsBackward.name, RowsOf(d_rows, plan, first, last));
    return absl::OkStatus();
  };
  MOE_RETURN_IF_ERROR(JoinStreams(exchange, compute));
  std::optional<SpareMultiprocessors::Use> exchanging(SpareForExchange(context));
  if (!weigh_input) MOE_RETURN_IF_ERROR(weight_gradient(dy, saved.home_rows));
  MOE_RETURN_IF_ERROR(ExchangeAroundExperts(
      pass,
      {.plan = plan,
       .send = kCombineBackward,
       .compute = kExpertsBackward,
       .receive = kDispatchBackward},
      [&](const DispatchCall& call) {
        if (weigh_input) return dispatcher_->Dispatch(call, dy, d_out);
        return dispatcher_->DispatchScaled(call, dy, saved.own.weight, d_out);
      },
      input_gradient,
      [&](const DispatchCall& call) { return dispatcher_->Return(call, d_rows, home_dx); }));
  MOE_ASSIGN_OR_RETURN(const GroupOffsets segments, SegmentsOf(plan, *context.host_workspace));
  // For all chunks at once, while the last rows travel home.
  MOE_RETURN_IF_ERROR(Timed(pass, kExpertsWeightGradients, compute, [&] {
    return experts_->WeightGradient(context, segments, saved.experts, d_out, ready);
  }));

  MOE_RETURN_IF_ERROR(JoinExchange(context));
  exchanging.reset();
  if (weigh_input) {
    MOE_RETURN_IF_ERROR(weight_gradient(saved.x, home_dx));
  }
  MOE_RETURN_IF_ERROR(Timed(pass, kDispatchBackwardSum, compute, [&] {
    return CombineRows<T>(home_dx, saved.own.slot_offset, plan.home_row_of_slot(),
                          weigh_input ? saved.own.weight : absl::Span<const float>(), dx,
                          Write::kOverwrite, compute);
  }));
  NoteNonFinite(pass, kDispatchBackward.name, dx);
  absl::Span<const int64_t> row_segments = saved.segments;
  if (row_segments.empty()) {
    MOE_ASSIGN_OR_RETURN(row_segments, moe::SegmentsOf(saved.router.batch.micro_batch_offsets,
                                                       context, *context.host_workspace));
  }
  MOE_RETURN_IF_ERROR(HomeBackward(pass, {dy, own_d_weight, dx, row_segments}, saved, ready));
  MOE_RETURN_IF_ERROR(GatherSlots(pass, saved, d_weight));
  std::optional<RouterGradients> gradients;
  if (config_.train_router) {
    gradients.emplace();
    MOE_ASSIGN_OR_RETURN(gradients->weight, router_weight_->OpenGradient());
    if (router_bias_ != nullptr) {
      MOE_ASSIGN_OR_RETURN(gradients->bias, router_bias_->OpenGradient());
    }
  }
  MOE_RETURN_IF_ERROR(Timed(pass, kGateBackward, compute, [&] {
    return router_->Backward({.d_weight = d_weight,
                              .weight = router_weight_->view<T>(),
                              .loss_scale = pass.d_loss,
                              .d_tokens = dx,
                              .segments = row_segments,
                              .gradients = gradients,
                              .workspace = workspace,
                              .host = *context.host_workspace,
                              .stream = compute},
                             saved.router);
  }));
  NoteNonFinite(pass, kGateBackward.name, dx);
  if (!config_.train_router) return absl::OkStatus();
  if (router_bias_ != nullptr) MOE_RETURN_IF_ERROR(ready(*router_bias_));
  return ready(*router_weight_);
}

#define MOE_INSTANTIATE(T)                                                                        \
  template absl::Status MoeLayer<T>::Forward(const Pass&, MatrixView<const T>, MatrixView<T>);    \
  template absl::Status MoeLayer<T>::ForwardRows(const Pass&, MatrixView<const T>, MatrixView<T>, \
                                                 MoeLayer<T>::Saved&);                            \
  template absl::Status MoeLayer<T>::BackwardRows(                                                \
      const Pass&, MatrixView<const T>, MoeLayer<T>::Saved&, MatrixView<T>, GradientReady);       \
  template absl::Status MoeLayer<T>::Backward(const Pass&, MatrixView<const T>, MatrixView<T>,    \
                                              GradientReady);
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe
