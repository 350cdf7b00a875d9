// A plan that the device of a stream works out.
#include <iterator>

#include "dispatch/dispatch_plan_builder.h"
#include "kernels/base/status_macros.h"
#include "kernels/expert_sort/expert_sort.h"

namespace moe {

// One rank's home rows and expert rows are all in the order of its experts, so that one sort of the
// slots gives every array.
absl::StatusOr<DispatchPlan> DispatchPlan::BuildOnDevice(
    const Routing& routing, absl::Span<const int64_t> micro_batch_offsets,
    Workspace& host_workspace, Workspace& workspace, Stream& stream) {
  MOE_RETURN_IF_ERROR(DispatchPlanBuilder::CheckRouting(routing, micro_batch_offsets));
  const int32_t experts = routing.num_routed_experts;
  MOE_ASSIGN_OR_RETURN(const SortedSlots sorted,
                       SortByExpert({.slot_offset = routing.slot_offset,
                                     .expert = routing.expert,
                                     .dropped = routing.dropped,
                                     .micro_batch_offsets = micro_batch_offsets,
                                     .num_experts = experts,
                                     .padded_rows = routing.padded_rows},
                                    workspace, stream));
  const auto rows = static_cast<int64_t>(sorted.slot_of_row.size());
  DispatchPlan plan;
  plan.tokens_ = plan.max_tokens_ = routing.tokens();
  plan.segments_ = MicroBatches(micro_batch_offsets);
  plan.max_return_rows_ = plan.max_expert_rows_ = rows;
  MOE_ASSIGN_OR_RETURN(const auto begin, host_workspace.Array<int64_t>(2));
  MOE_ASSIGN_OR_RETURN(const auto chunk, host_workspace.Array<int32_t>(2));
  MOE_ASSIGN_OR_RETURN(const auto pair, host_workspace.Array<int32_t>(1));
  begin[0] = chunk[0] = 0;
  begin[1] = rows;
  chunk[1] = experts;
  pair[0] = static_cast<int32_t>(rows);
  plan.send_begin_ = plan.recv_begin_ = plan.home_begin_ = plan.expert_begin_ = begin;
  plan.chunk_first_expert_ = chunk;
  plan.send_table_ = plan.expert_table_ = pair;
  // Multiples of `each`, up to all rows, where padding fixes them.
  const auto offsets = [&](absl::Span<const int64_t> device,
                           int64_t each) -> absl::StatusOr<GroupOffsets> {
    if (each == 0) return GroupOffsets::OnDevice(device, {});
    MOE_ASSIGN_OR_RETURN(const auto host, host_workspace.Array<int64_t>(std::ssize(device)));
    for (int64_t i = 0; i < std::ssize(host); ++i) host[i] = i * each;
    return GroupOffsets::OnDevice(device, host);
  };
  MOE_ASSIGN_OR_RETURN(plan.expert_offsets_,
                       offsets(sorted.expert_begin, plan.segments_ * routing.padded_rows));
  MOE_ASSIGN_OR_RETURN(plan.segment_offsets_, offsets(sorted.segment_begin, routing.padded_rows));
  plan.kept_slots_ = sorted.count;
  plan.home_row_of_slot_ = sorted.row_of_slot;
  plan.home_slot_ = sorted.slot_of_row;
  plan.expert_token_ = sorted.token_of_row;
  plan.return_order_ = sorted.own_row;
  return plan;
}

}  // namespace moe
