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

// A decision under way: what the gate chose, on the stream's device, and what losses and capacity
// make of it.
struct Decision {
  const RouterConfig& config;
  const Gate& gate;
  const GateInput& input;
  const GateSelection& selection;
  const RouterScores& scores;
  RouterMeasures* measures;
  Workspace& host;  // on a CPU it may be `workspace`
  Workspace& workspace;
  Stream& stream;
};

// ---- losses

absl::Status AddBalance(const Decision& d, absl::Span<const double> expert_share,
                        MatrixView<float> d_logits) {
  LoadBalance balance = {.slot_offset = d.selection.slot_offset,
                         .expert = d.selection.expert,
                         .choices = d.gate.traits().balance_choices,
                         .expert_share = {},
                         .coeff = d.config.aux_loss_coeff};
  TokenGroups units = d.input.groups;
  if (d.config.load_balancing == LoadBalancing::kSeqAuxLoss) {
    MOE_ASSIGN_OR_RETURN(units, MakeTokenGroups({TokenGroup::kSequence}, d.input.batch, d.host));
  }
  if (d.config.load_balancing == LoadBalancing::kGlobalAuxLoss) {
    MOE_ASSIGN_OR_RETURN(units, MakeTokenGroups({TokenGroup::kMicroBatch}, d.input.batch, d.host));
    balance.expert_share = expert_share;
    if (expert_share.empty()) {
      MOE_ASSIGN_OR_RETURN(const absl::Span<double> even,
                           d.host.Array<double>(d.config.num_outputs()));
      std::fill(even.begin(), even.end(), 1.0 / d.config.num_outputs());
      balance.expert_share = even;
    }
  }
  return AddLoadBalanceLoss(d.scores, balance,
                            {.offsets = units.offsets, .micro_batch = units.micro_batch},
                            &d.measures->aux_loss, d_logits, d.workspace, d.stream);
}

// Adds sums over micro-batches to the losses of the measures; before capacity has touched the
// selection. Returns their gradient, [T, logit_sets * E]; empty: no losses. expert_share: see
// RouterInputs. Enqueues. Gates with losses of their own run on CPUs.
absl::StatusOr<MatrixView<const float>> EnqueueLosses(const Decision& d,
                                                      absl::Span<const double> expert_share) {
  const RouterConfig& config = d.config;
  const bool aux = config.load_balancing != LoadBalancing::kNone && config.aux_loss_coeff != 0.0f;
  const bool z = config.z_loss_coeff != 0.0f;
  if (!aux && !z) return MatrixView<const float>();
  const int64_t tokens = d.input.logits.rows(), cols = d.input.logits.cols();
  MOE_ASSIGN_OR_RETURN(const MatrixView<float> d_logits, d.workspace.Matrix<float>(tokens, cols));
  MOE_RETURN_IF_ERROR(d.stream.Zero(d_logits.data(), tokens * cols * int64_t{sizeof(float)}));
  if (aux && d.gate.traits().balance_choices > 0) {
    MOE_RETURN_IF_ERROR(AddBalance(d, expert_share, d_logits));
  }
  if (aux && d.stream.device().kind == DeviceKind::kCpu) {
    MOE_RETURN_IF_ERROR(d.stream.Synchronize());
    MOE_RETURN_IF_ERROR(
        d.gate.AddLosses(d.input, d.selection, &d.measures->aux_loss, d_logits, d.workspace));
  }
  if (z) {
    MOE_RETURN_IF_ERROR(AddZLoss(d.scores, d.input.batch.micro_batch_offsets, config.z_loss_coeff,
                                 &d.measures->z_loss, d_logits, d.workspace, d.stream));
  }
  return d_logits;
}

// ---- capacity

absl::Status ApplyOnHost(const Decision& d, absl::Span<uint8_t> dropped) {
  MOE_RETURN_IF_ERROR(d.stream.Synchronize());  // from here on the host reads the selection
  const GateSelection& selection = d.selection;
  MOE_ASSIGN_OR_RETURN(d.measures->dropped_slots,
                       MarkDropped({.slot_offset = selection.slot_offset,
                                    .expert = selection.expert,
                                    .weight = selection.weight,
                                    .num_experts = d.config.num_experts},
                                   d.input.groups, d.config.top_k, *d.config.capacity_factor,
                                   d.config.drop_policy, dropped, d.workspace));
  if (d.measures->dropped_slots == 0) return absl::OkStatus();
  MOE_RETURN_IF_ERROR(d.gate.Reweigh(selection, dropped, d.stream));
  MOE_RETURN_IF_ERROR(d.stream.Synchronize());
  for (size_t s = 0; s < dropped.size(); ++s) {
    if (dropped[s] != 0) selection.weight[s] = 0.0f;
  }
  return absl::OkStatus();
}

// Marks and unweights the slots that are over capacity, `dropped` [slots] of the stream's device,
// and counts them in the measures. On a CUDA device, where a gate's Reweigh does nothing, enqueues.
absl::Status ApplyCapacity(const Decision& d, absl::Span<uint8_t> dropped) {
  int64_t* const dropped_slots = &d.measures->dropped_slots;
  if (!d.config.capacity_factor.has_value() || d.gate.traits().limits_itself) {
    MOE_RETURN_IF_ERROR(d.stream.Zero(dropped_slots, sizeof(int64_t)));
    return d.stream.Zero(dropped.data(), static_cast<int64_t>(dropped.size()));
  }
  if (!IsCuda(d.stream)) return ApplyOnHost(d, dropped);
  const TokenGroups& groups = d.input.groups;
  MOE_ASSIGN_OR_RETURN(const absl::Span<int64_t> capacity, d.host.Array<int64_t>(groups.size()));
  for (int64_t g = 0; g < groups.size(); ++g) {
    capacity[g] = ExpertCapacity(groups.offsets[g + 1] - groups.offsets[g], d.config.top_k,
                                 d.config.num_experts, *d.config.capacity_factor);
  }
  return DropOverCapacity(
      {.slot_offset = d.selection.slot_offset,
       .expert = d.selection.expert,
       .group_offsets = groups.offsets,
       .capacity = capacity,
       .num_experts = d.config.num_experts},
      d.config.drop_policy == DropPolicy::kPosition ? KeptSlots::kFirst : KeptSlots::kLargestWeight,
      d.selection.weight, dropped, dropped_slots, d.workspace, d.stream);
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
absl::Status Router<T>::DecideOn(const RouterCall<T>& call, RouterSaved<T>& s,
                                 RouterStats* stats) const {
  Workspace& workspace = call.workspace;
  Workspace& host = call.host;
  Stream& stream = call.stream;
  MOE_ASSIGN_OR_RETURN(const TokenGroups groups,
                       MakeTokenGroups(config_.token_group, s.batch, host));
  MOE_ASSIGN_OR_RETURN(const auto expert_bias,
                       UploadArray(call.inputs.expert_bias, workspace, stream));
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
  const Decision decision = {.config = config_,
                             .gate = *gate_,
                             .input = input,
                             .selection = s.selection,
                             .scores = scores,
                             .measures = measures,
                             .host = host,
                             .workspace = workspace,
                             .stream = stream};
  MOE_ASSIGN_OR_RETURN(s.d_aux, EnqueueLosses(decision, call.inputs.expert_share));
  if (stats != nullptr) {
    MOE_RETURN_IF_ERROR(
        AddEntropy(scores, &measures->entropy_sum, &measures->bad_logit, workspace, stream));
  }

  const auto slots = static_cast<int64_t>(s.selection.expert.size());
  MOE_ASSIGN_OR_RETURN(const absl::Span<uint8_t> dropped, workspace.Array<uint8_t>(slots));
  MOE_RETURN_IF_ERROR(ApplyCapacity(decision, dropped));
  s.dropped = dropped;
  s.on_device = RoutingOf(s.selection, dropped);

  const bool cuda = IsCuda(stream);
  s.routing = cuda ? RoutingOf({}, {}) : s.on_device;
  if (cuda && call.reader == RoutingFor::kHost) {
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
  return cuda && call.reader == RoutingFor::kDevice ? absl::OkStatus() : stream.Synchronize();
}

template <typename T>
absl::StatusOr<MatrixView<const float>> Router<T>::LogitGradient(
    const RouterBackwardCall<T>& call, const RouterSaved<T>& saved) const {
  const bool through_host = !GateRunsOn(call.stream);
  const std::unique_ptr<Stream> host_stream =
      through_host ? MakeInlineStream(&call.stream.threads()) : nullptr;
  Stream& gate_stream = through_host ? *host_stream : call.stream;
  Workspace& gate_workspace = through_host ? call.host : call.workspace;
  absl::Span<const float> d_weight = call.d_weight;
  if (through_host) {
    MOE_ASSIGN_OR_RETURN(d_weight, DownloadArray(d_weight, call.host, call.stream));
    MOE_RETURN_IF_ERROR(call.stream.Synchronize());
  }
  MOE_ASSIGN_OR_RETURN(const MatrixView<float> d_logits,
                       gate_workspace.Matrix<float>(saved.logits.rows(), weight_rows()));
  MOE_RETURN_IF_ERROR(gate_->Backward({.logits = saved.logits,
                                       .batch = saved.batch,
                                       .selection = saved.selection,
                                       .dropped = saved.dropped,
                                       .d_weight = d_weight},
                                      d_logits, gate_stream));
  if (saved.d_aux.data() != nullptr) {
    const absl::Span<const float> d_aux = AllOf(saved.d_aux);
    MOE_RETURN_IF_ERROR(
        Scale(d_aux, call.loss_scale, {d_logits.data(), d_aux.size()}, Write::kAdd, gate_stream));
  }
  if (!through_host) return d_logits;
  MOE_ASSIGN_OR_RETURN(const auto on_device,
                       UploadArray<float>(AllOf(d_logits), call.workspace, call.stream));
  return MatrixView<const float>(on_device.data(), d_logits.rows(), d_logits.cols());
}

#define MOE_INSTANTIATE(T)                                                                       \
  template absl::Status Router<T>::DecideOn(const RouterCall<T>&, RouterSaved<T>&, RouterStats*) \
      const;                                                                                     \
  template absl::StatusOr<MatrixView<const float>> Router<T>::LogitGradient(                     \
      const RouterBackwardCall<T>&, const RouterSaved<T>&) const;
MOE_INSTANTIATE(float)
MOE_INSTANTIATE(BFloat16)
MOE_INSTANTIATE(Float16)
#undef MOE_INSTANTIATE

}  // namespace moe
