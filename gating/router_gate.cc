// The router between the logits and the gradient by them: gate, losses, capacity.
#include <memory>

#include "gating/router.h"
#include "gating/router_capacity.h"
#include "gating/router_losses.h"
#include "kernels/base/device_arrays.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/router_loss/router_loss.h"

namespace moe {
namespace {

RouterScores ScoresOf(MatrixView<const float> logits, const GateSelection& selection,
                      const GateTraits& traits) {
  return {.logits = logits,
          .score = selection.score,
          .function = traits.score,
          .log_sum_exp = selection.log_sum_exp};
}

}  // namespace

template <typename T>
Routing Router<T>::RoutingOf(const GateSelection& selection,
                             absl::Span<const uint8_t> dropped) const {
  return {.slot_offset = selection.slot_offset,
          .expert = selection.expert,
          .weight = selection.weight,
          .dropped = dropped,
          .weight_on = traits_.weight_on,
          .num_experts = config_.num_outputs(),
          .num_routed_experts = config_.num_experts,
          .padded_rows = PaddedRows(config_, traits_)};
}

template <typename T>
absl::Status Router<T>::Decide(const RouterInputs<T>& inputs, Gradient gradient,
                               Workspace& workspace, Workspace& host, Stream& stream,
                               RoutingFor reader, RouterSaved<T>& s, RouterStats* stats) const {
  MOE_ASSIGN_OR_RETURN(const TokenGroups groups,
                       MakeTokenGroups(config_.token_group, s.batch, host));
  MOE_ASSIGN_OR_RETURN(const auto expert_bias, UploadArray(inputs.expert_bias, workspace, stream));
  const GateInput input = {
      .logits = s.logits, .batch = s.batch, .groups = groups, .expert_bias = expert_bias};
  MOE_ASSIGN_OR_RETURN(s.selection, gate_->Select(input, workspace, stream));
  MOE_ASSIGN_OR_RETURN(const auto one, workspace.Array<RouterMeasures>(1));
  RouterMeasures* const measures = one.data();
  MOE_RETURN_IF_ERROR(stream.Zero(measures, sizeof(RouterMeasures)));
  MOE_ASSIGN_OR_RETURN(
      s.d_aux, EnqueueLosses(config_, *gate_, input, s.selection, inputs.expert_share, gradient,
                             measures, host, workspace, stream));
  if (stats != nullptr) {
    MOE_RETURN_IF_ERROR(AddEntropy(ScoresOf(s.logits, s.selection, traits_), &measures->entropy_sum,
                                   &measures->bad_logit, workspace, stream));
  }

  const auto slots = static_cast<int64_t>(s.selection.expert.size());
  MOE_ASSIGN_OR_RETURN(const absl::Span<uint8_t> dropped, workspace.Array<uint8_t>(slots));
  MOE_RETURN_IF_ERROR(ApplyCapacity(config_, *gate_, s.selection, groups, dropped,
                                    &measures->dropped_slots, host, workspace, stream));
  s.dropped = dropped;
  s.on_device = RoutingOf(s.selection, dropped);

  const bool cuda = IsCuda(stream);
  s.routing = cuda ? RoutingOf({}, {}) : s.on_device;
  if (cuda && reader == RoutingFor::kHost) {
    const Routing& device = s.on_device;
    MOE_ASSIGN_OR_RETURN(s.routing.slot_offset, DownloadArray(device.slot_offset, host, stream));
    MOE_ASSIGN_OR_RETURN(s.routing.expert, DownloadArray(device.expert, host, stream));
    MOE_ASSIGN_OR_RETURN(s.routing.weight, DownloadArray(device.weight, host, stream));
    MOE_ASSIGN_OR_RETURN(s.routing.dropped, DownloadArray(device.dropped, host, stream));
  }
  if (stats != nullptr) {
    s.measures = measures;
  }
  if (cuda && reader == RoutingFor::kDevice) return absl::OkStatus();
  MOE_RETURN_IF_ERROR(ReadStats(s, stream, stats));
  s.measures = nullptr;
  return stream.Synchronize();
}

template <typename T>
absl::Status Router<T>::ReadStats(const RouterSaved<T>& saved, Stream& stream,
                                  RouterStats* stats) const {
  if (saved.measures == nullptr) return absl::OkStatus();
  return stats->Take(saved.measures, saved.selection.count,
                     {.columns = saved.logits.cols(),
                      .outputs = config_.num_outputs(),
                      .first_token = saved.batch.first_global_token,
                      .layer = config_.layer},
                     stream);
}

template <typename T>
absl::StatusOr<MatrixView<const float>> Router<T>::LogitGradient(
    absl::Span<const float> d_weight, const RouterSaved<T>& saved, float loss_scale,
    Workspace& workspace, Stream& stream, Workspace* host) const {
  const bool through_host = !GateRunsOn(stream);
  const std::unique_ptr<Stream> host_stream =
      through_host ? MakeInlineStream(&stream.threads()) : nullptr;
  Stream& gate_stream = through_host ? *host_stream : stream;
  Workspace& gate_workspace = through_host ? *host : workspace;
  if (through_host) {
    MOE_ASSIGN_OR_RETURN(d_weight, DownloadArray(d_weight, *host, stream));
    MOE_RETURN_IF_ERROR(stream.Synchronize());
  }
  MOE_ASSIGN_OR_RETURN(const MatrixView<float> d_logits,
                       gate_workspace.Matrix<float>(saved.tokens.rows(), weight_rows()));
  MOE_RETURN_IF_ERROR(gate_->Backward({.logits = saved.logits,
                                       .batch = saved.batch,
                                       .selection = saved.selection,
                                       .dropped = saved.dropped,
                                       .d_weight = d_weight},
                                      d_logits, gate_stream));
  if (saved.d_aux.data() != nullptr) {
    const absl::Span<const float> d_aux = AllOf(saved.d_aux);
    MOE_RETURN_IF_ERROR(
        Scale(d_aux, loss_scale, {d_logits.data(), d_aux.size()}, Write::kAdd, gate_stream));
  }
  if (!through_host) return d_logits;
  MOE_ASSIGN_OR_RETURN(const auto on_device,
                       UploadArray<float>(AllOf<float>(d_logits), workspace, stream));
  return MatrixView<const float>(on_device.data(), d_logits.rows(), d_logits.cols());
}

#define MOE_INSTANTIATE(T)                                                                        \
  template absl::Status Router<T>::Decide(const RouterInputs<T>&, Gradient, Workspace&,           \
                                          Workspace&, Stream&, RoutingFor, RouterSaved<T>&,       \
                                          RouterStats*) const;                                    \
  template absl::Status Router<T>::ReadStats(const RouterSaved<T>&, Stream&, RouterStats*) const; \
  template absl::StatusOr<MatrixView<const float>> Router<T>::LogitGradient(                      \
      absl::Span<const float>, const RouterSaved<T>&, float, Workspace&, Stream&, Workspace*)     \
      const;
MOE_INSTANTIATE(float)
MOE_INSTANTIATE(BFloat16)
MOE_INSTANTIATE(Float16)
#undef MOE_INSTANTIATE

}  // namespace moe
