#include "kernels/expert_sort/expert_rows.h"

#include <algorithm>

#include "kernels/base/device_arrays.h"
#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/expert_sort/expert_sort_cuda.h"

namespace moe {

absl::StatusOr<SentTokens> SortTokensByGroup(const TokensToSend& tokens, Workspace& workspace,
                                             Stream& stream) {
  constexpr char kName[] = "SortTokensByGroup";
  const SlotsToSort& slots = tokens.slots;
  const auto count = static_cast<int64_t>(slots.expert.size());
  MOE_RETURN_IF_ERROR(
      CheckLength(kName, "group_of_expert", tokens.group_of_expert.size(), slots.num_experts));
  MOE_RETURN_IF_ERROR(CheckLength(kName, "row_of_slot", tokens.row_of_slot.size(), count));
  MOE_ASSIGN_OR_RETURN(const auto group_of_expert,
                       UploadArray(tokens.group_of_expert, workspace, stream));
  MOE_ASSIGN_OR_RETURN(const auto first_group, workspace.Array<int32_t>(count));
  MOE_ASSIGN_OR_RETURN(const auto place, workspace.Array<int32_t>(count));
  const int64_t num_tokens = std::max<int64_t>(slots.slot_offset.size(), 1) - 1;
  const auto launch = [&](auto kernel) {
    return LaunchOn(kName, stream, [&](auto cuda) { return expert_sort::Run(kernel, cuda); });
  };
  MOE_RETURN_IF_ERROR(launch(
      expert_sort::CudaSlotGroups{.tokens = num_tokens,
                                  .slot_offset = slots.slot_offset.data(),
                                  .expert = slots.expert.data(),
                                  .dropped = slots.dropped.empty() ? nullptr : slots.dropped.data(),
                                  .num_experts = slots.num_experts,
                                  .group_of_expert = group_of_expert.data(),
                                  .first_group = first_group.data()}));
  MOE_ASSIGN_OR_RETURN(const SortedSlots sorted, SortByExpert({.slot_offset = slots.slot_offset,
                                                               .expert = first_group,
                                                               .num_experts = tokens.num_groups},
                                                              workspace, stream));
  MOE_RETURN_IF_ERROR(launch(expert_sort::CudaSentPlaces{.tokens = num_tokens,
                                                         .slot_offset = slots.slot_offset.data(),
                                                         .expert = slots.expert.data(),
                                                         .group_of_expert = group_of_expert.data(),
                                                         .first_group = first_group.data(),
                                                         .sent_row = sorted.row_of_slot.data(),
                                                         .group_begin = sorted.expert_begin.data(),
                                                         .row_of_slot = tokens.row_of_slot.data(),
                                                         .place = place.data()}));
  return SentTokens{.token_of_row = sorted.token_of_row, .count = sorted.count, .place = place};
}

absl::Status OrderExpertRows(const ExpertRowOrders& rows, Workspace& workspace, Stream& stream) {
  constexpr char kName[] = "OrderExpertRows";
  int64_t all = 0;
  int32_t most = 0;
  for (const ExpertRun& run : rows.runs) {
    all += run.rows;
    most = std::max(most, run.rows);
  }
  const bool exchanged = !rows.received.empty();
  MOE_RETURN_IF_ERROR(CheckLength(kName, "return_order", rows.return_order.size(), all));
  MOE_RETURN_IF_ERROR(CheckLength(kName, "return_place", rows.return_place.size(), all));
  if (exchanged) {
    MOE_RETURN_IF_ERROR(CheckLength(kName, "received", rows.received.size(), all));
    MOE_RETURN_IF_ERROR(CheckLength(kName, "source", rows.source.size(), all));
  }
  MOE_ASSIGN_OR_RETURN(const auto runs, UploadArray(rows.runs, workspace, stream));
  return LaunchOn(kName, stream, [&](auto cuda) {
    return expert_sort::Run(
        expert_sort::CudaExpertRows{.runs = runs.data(),
                                    .num_runs = static_cast<int32_t>(runs.size()),
                                    .most_rows = most,
                                    .received = exchanged ? rows.received.data() : nullptr,
                                    .return_order = rows.return_order.data(),
                                    .return_place = rows.return_place.data(),
                                    .source = rows.source.data()},
        cuda);
  });
}

}  // namespace moe
