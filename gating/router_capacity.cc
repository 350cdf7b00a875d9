#include "gating/router_capacity.h"

#include <absl/strings/str_cat.h>

#include "gating/capacity.h"
#include "kernels/base/status_macros.h"
#include "kernels/expert_capacity/expert_capacity.h"

namespace moe {

absl::Status CheckMicroBatchLengths(const RouterConfig& config, const Batch& batch) {
  if (config.micro_batch_tokens == 0) return absl::OkStatus();
  const absl::Span<const int64_t> offsets = batch.micro_batch_offsets;
  for (size_t b = 0; b + 1 < offsets.size(); ++b) {
    const int64_t tokens = offsets[b + 1] - offsets[b];
    if (tokens != 0 && tokens != config.micro_batch_tokens) {
      return absl::InvalidArgumentError(
          absl::StrCat("Router::Forward: micro-batch ", b, " has ", tokens, " tokens, expected ",
                       config.micro_batch_tokens, " (micro_batch_tokens) or none"));
    }
  }
  return absl::OkStatus();
}

int64_t PaddedRows(const RouterConfig& config, const GateTraits& traits) {
  if (!config.pad_to_capacity) return 0;
  const int64_t group =
      config.token_group.tokens > 0 ? config.token_group.tokens : config.micro_batch_tokens;
  const int32_t slots_per_token = traits.limits_itself ? 1 : config.top_k;
  return config.micro_batch_tokens / group *
         ExpertCapacity(group, slots_per_token, config.num_experts, *config.capacity_factor);
}

namespace {

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

}  // namespace

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

}  // namespace moe
