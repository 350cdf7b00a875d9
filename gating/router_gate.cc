// The router between the logits and the gradient by them: gate, losses, capacity.
#include <algorithm>
#include <memory>

#include "gating/capacity.h"
#include "gating/router.h"
#include "kernels/base/device_arrays.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/expert_capacity/expert_capacity.h"
#include "kernels/router_loss/router_loss.h"

namespace moe {
namespace {

// ---- losses

// The loss's units and shares; in `host_workspace`, as far as they are not the input's.
absl::Status AddBalance(const RouterConfig& config, const GateInput& input, LoadBalance balance,
                        absl::Span<const double> expert_share, const RouterScores& scores,
                        double* loss, MatrixView<float> d_logits, Workspace& host_workspace,
                        Workspace& workspace, Stream& stream) {
  TokenGroups units = input.groups;
  if (config.load_balancing == LoadBalancing::kSeqAuxLoss) {
    MOE_ASSIGN_OR_RETURN(units,
                         MakeTokenGroups({TokenGroup::kSequence}, input.batch, host_workspace));
  }
  if (config.load_balancing == LoadBalancing::kGlobalAuxLoss) {
    MOE_ASSIGN_OR_RETURN(units,
                         MakeTokenGroups({TokenGroup::kMicroBatch}, input.batch, host_workspace));
    balance.expert_share = expert_share;
    if (expert_share.empty()) {
      MOE_ASSIGN_OR_RETURN(const absl::Span<double> even,
                           host_workspace.Array<double>(config.num_outputs()));
      std::fill(even.begin(), even.end(), 1.0 / config.num_outputs());
      balance.expert_share = even;
    }
  }
  return AddLoadBalanceLoss(scores, balance,
                            {.offsets = units.offsets, .micro_batch = units.micro_batch}, loss,
                            d_logits, workspace, stream);
}

// Adds sums over micro-batches to the losses of `measures`; before capacity has touched the
// selection. Returns their gradient, [T, logit_sets * E]; empty: not wanted, or no losses. Logits,
// selection and measures live on stream.device(), batch, groups and expert_share (see RouterInputs)
// in host memory. Enqueues; `workspace` has memory of the device and is in use until the stream has
// passed, `host_workspace` (which may be the same on a CPU) until this returns. Gates with losses
// of their own run on CPUs.
absl::StatusOr<MatrixView<const float>> EnqueueLosses(
    const RouterConfig& config, const Gate& gate, const GateInput& input,
    const GateSelection& selection, const RouterScores& scores,
    absl::Span<const double> expert_share, Gradient gradient, RouterMeasures* measures,
    Workspace& host_workspace, Workspace& workspace, Stream& stream) {
  const bool aux = config.load_balancing != LoadBalancing::kNone && config.aux_loss_coeff != 0.0f;
  const bool z = config.z_loss_coeff != 0.0f;
  if (!aux && !z) return MatrixView<const float>();
  MatrixView<float> d_logits;
  if (gradient == Gradient::kWanted) {
    const int64_t tokens = input.logits.rows(), cols = input.logits.cols();
    MOE_ASSIGN_OR_RETURN(d_logits, workspace.Matrix<float>(tokens, cols));
    MOE_RETURN_IF_ERROR(stream.Zero(d_logits.data(), tokens * cols * int64_t{sizeof(float)}));
  }
  const int32_t choices = gate.traits().balance_choices;
  if (aux && choices > 0) {
    const LoadBalance balance = {.slot_offset = selection.slot_offset,
                                 .expert = selection.expert,
                                 .choices = choices,
                                 .expert_share = {},
                                 .coeff = config.aux_loss_coeff};
    MOE_RETURN_IF_ERROR(AddBalance(config, input, balance, expert_share, scores,
                                   &measures->aux_loss, d_logits, host_workspace, workspace,
                                   stream));
  }
  if (aux && stream.device().kind == DeviceKind::kCpu) {
    MOE_RETURN_IF_ERROR(stream.Synchronize());
    MOE_RETURN_IF_ERROR(gate.AddLosses(input, selection, &measures->aux_loss, d_logits, workspace));
  }
  if (z) {
    MOE_RETURN_IF_ERROR(AddZLoss(scores, input.batch.micro_batch_offsets, config.z_loss_coeff,
                                 &measures->z_loss, d_logits, workspace, stream));
  }
  return d_logits;
}

// ---- capacity

// Rows an expert gets per micro-batch when its input is padded, else 0; from the configuration
// alone, so that a rank without tokens agrees with the others.
int64_t PaddedRows(const RouterConfig& config, const GateTraits& traits) {
  if (!config.pad_to_capacity) return 0;
  const int64_t group =
      config.token_group.tokens > 0 ? config.token_group.tokens : config.micro_batch_tokens;
  const int32_t slots_per_token = traits.limits_itself ? 1 : config.top_k;
  return config.micro_batch_tokens / group *
         ExpertCapacity(group, slots_per_token, config.num_experts, *config.capacity_factor);
}

absl::Status ApplyOnHost(const RouterConfig& config, const Gate& gate,
                         const GateSelection& selection, const TokenGroups& groups,
                         absl::Span<uint8_t> dropped, int64_t* dropped_slots, Workspace& workspace,
                         Stream& stream) {
  MOE_RETURN_IF_ERROR(stream.Synchronize());  // from here on the host reads the selection
  MOE_ASSIGN_OR_RETURN(*dropped_slots, MarkDropped({.slot_offset = selection.slot_offset,
                                                    .expert = selection.expert,
                                                    .weight = selection.weight,
                                                    .num_experts = config.num_experts},
                                                   groups, config.top_k, *config.capacity_factor,
                                                   config.drop_policy, dropped, workspace));
  if (*dropped_slots == 0) return absl::OkStatus();
  MOE_RETURN_IF_ERROR(gate.Reweigh(selection, dropped, stream));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  for (size_t s = 0; s < dropped.size(); ++s) {
    if (dropped[s] != 0) selection.weight[s] = 0.0f;
  }
  return absl::OkStatus();
}

// Marks and unweights the slots that are over capacity, and counts them in *dropped_slots, which
// with the selection and `dropped` [slots] is memory of the stream's device; `groups` and `host`
// are of the host. On a CUDA device, where a gate's Reweigh does nothing, enqueues.
absl::Status ApplyCapacity(const RouterConfig& config, const Gate& gate,
                           const GateSelection& selection, const TokenGroups& groups,
                           absl::Span<uint8_t> dropped, int64_t* dropped_slots, Workspace& host,
                           Workspace& workspace, Stream& stream) {
  if (!config.capacity_factor.has_value() || gate.traits().limits_itself) {
    MOE_RETURN_IF_ERROR(stream.Zero(dropped_slots, sizeof(int64_t)));
    return stream.Zero(dropped.data(), static_cast<int64_t>(dropped.size()));
  }
  if (!IsCuda(stream)) {
    return ApplyOnHost(config, gate, selection, groups, dropped, dropped_slots, workspace, stream);
  }
  MOE_ASSIGN_OR_RETURN(const absl::Span<int64_t> capacity, host.Array<int64_t>(groups.size()));
  for (int64_t g = 0; g < groups.size(); ++g) {
    capacity[g] = ExpertCapacity(groups.offsets[g + 1] - groups.offsets[g], config.top_k,
                                 config.num_experts, *config.capacity_factor);
  }
  return DropOverCapacity(
      {.slot_offset = selection.slot_offset,
       .expert = selection.expert,
       .group_offsets = groups.offsets,
       .capacity = capacity,
       .num_experts = config.num_experts},
      config.drop_policy == DropPolicy::kPosition ? KeptSlots::kFirst : KeptSlots::kLargestWeight,
      selection.weight, dropped, dropped_slots, workspace, stream);
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
  const RouterScores scores = {.logits = s.logits,
                               .score = s.selection.score,
                               .function = traits_.score,
                               .log_sum_exp = s.selection.log_sum_exp};
  MOE_ASSIGN_OR_RETURN(
      s.d_aux, EnqueueLosses(config_, *gate_, input, s.selection, scores, inputs.expert_share,
                             gradient, measures, host, workspace, stream));
  if (stats != nullptr) {
    MOE_RETURN_IF_ERROR(
        AddEntropy(scores, &measures->entropy_sum, &measures->bad_logit, workspace, stream));
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
    MOE_RETURN_IF_ERROR(stats->Take(measures, s.selection.count,
                                    {.columns = s.logits.cols(),
                                     .outputs = config_.num_outputs(),
                                     .first_token = s.batch.first_global_token,
                                     .layer = config_.layer},
                                    stream));
  }
  return cuda && reader == RoutingFor::kDevice ? absl::OkStatus() : stream.Synchronize();
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

#define MOE_INSTANTIATE(T)                                                                    \
  template absl::Status Router<T>::Decide(const RouterInputs<T>&, Gradient, Workspace&,       \
                                          Workspace&, Stream&, RoutingFor, RouterSaved<T>&,   \
                                          RouterStats*) const;                                \
  template absl::StatusOr<MatrixView<const float>> Router<T>::LogitGradient(                  \
      absl::Span<const float>, const RouterSaved<T>&, float, Workspace&, Stream&, Workspace*) \
      const;
MOE_INSTANTIATE(float)
MOE_INSTANTIATE(BFloat16)
MOE_INSTANTIATE(Float16)
#undef MOE_INSTANTIATE

}  // namespace moe
