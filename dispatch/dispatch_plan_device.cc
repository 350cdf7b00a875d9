// Plans that the device of a stream works out.
#include <iterator>

#include "dispatch/dispatch_plan_builder.h"
#include "kernels/base/status_macros.h"
#include "kernels/expert_sort/expert_rows.h"
#include "kernels/expert_sort/expert_sort.h"

namespace moe {

absl::StatusOr<DispatchPlan> DispatchPlan::BuildOnDevice(const DispatchPlanInputs& inputs,
                                                         Workspace& host_workspace,
                                                         Workspace& workspace, Stream& stream) {
  DispatchPlanBuilder builder(inputs, host_workspace, &workspace);
  MOE_RETURN_IF_ERROR(builder.Check());
  if (inputs.options.reads_peers || inputs.options.node_size > 0) {
    return absl::UnimplementedError(
        "DispatchPlan: reads_peers or node_size, of which the host makes plans");
  }
  if (inputs.comm.size() == 1) return OneRankOnDevice(inputs, host_workspace, workspace, stream);
  MOE_RETURN_IF_ERROR(builder.StartMessage());
  MOE_RETURN_IF_ERROR(builder.SortHomeRows(stream));
  MOE_RETURN_IF_ERROR(builder.GatherCounts(stream));
  MOE_RETURN_IF_ERROR(builder.SumCounts());
  MOE_RETURN_IF_ERROR(builder.OrderExpertRows(stream));
  return builder.plan();
}

absl::Status DispatchPlanBuilder::SortHomeRows(Stream& stream) {
  absl::Span<int32_t> order, pair_of_expert, told;
  MOE_RETURN_IF_ERROR(Take(routed_, order));
  MOE_RETURN_IF_ERROR(Take(routed_, pair_of_expert));
  int64_t position = 0;
  ForEachExpert([&](int c, int r, int64_t e) {
    order[position++] = static_cast<int32_t>(e);
    pair_of_expert[e] = c * plan_.ranks_ + r;
  });
  const auto sort = [&](absl::Span<const int32_t> by) {
    return SortByExpert({.slot_offset = routing_.slot_offset,
                         .expert = routing_.expert,
                         .dropped = routing_.dropped,
                         .micro_batch_offsets = offsets_,
                         .num_experts = routed_,
                         .padded_rows = routing_.padded_rows,
                         .order = by},
                        *device_, stream);
  };
  MOE_ASSIGN_OR_RETURN(const SortedSlots home, sort(order));
  plan_.home_row_of_slot_ = home.row_of_slot;
  plan_.home_slot_ = home.slot_of_row;
  plan_.send_token_ = home.token_of_row;
  MOE_RETURN_IF_ERROR(TakeRows(std::ssize(message_), told));
  told_ = told;
  const auto tell = [&](absl::Span<const int32_t> part, int64_t at) {
    return stream.CopyBytes(part.data(), told.data() + at,
                            std::ssize(part) * static_cast<int64_t>(sizeof(int32_t)));
  };
  MOE_RETURN_IF_ERROR(stream.Upload(message_.data(), told.data(),
                                    std::ssize(message_) * static_cast<int64_t>(sizeof(int32_t))));
  MOE_RETURN_IF_ERROR(tell(home.count, kHeaderSize + most_pairs()));
  if (!sends_once()) return absl::OkStatus();
  // Values go by expert, where home rows go by chunk first.
  SortedSlots by_expert = home;
  if (plan_.chunks_ > 1) {
    MOE_ASSIGN_OR_RETURN(by_expert, sort({}));
  }
  MOE_ASSIGN_OR_RETURN(const SentTokens sent,
                       SortTokensByGroup({.slots = {.slot_offset = routing_.slot_offset,
                                                    .expert = routing_.expert,
                                                    .dropped = routing_.dropped,
                                                    .num_experts = routed_},
                                          .group_of_expert = pair_of_expert,
                                          .num_groups = plan_.chunks_ * plan_.ranks_,
                                          .row_of_slot = by_expert.row_of_slot},
                                         *device_, stream));
  plan_.send_token_ = sent.token_of_row;
  values_ = sent.place;
  return tell(sent.count, kHeaderSize);
}

// One rank's home rows and expert rows are all in the order of its experts, so that one sort of the
// slots gives every array.
absl::StatusOr<DispatchPlan> DispatchPlan::OneRankOnDevice(const DispatchPlanInputs& inputs,
                                                           Workspace& host_workspace,
                                                           Workspace& workspace, Stream& stream) {
  const Routing& routing = inputs.routing;
  const int32_t experts = routing.num_routed_experts;
  MOE_ASSIGN_OR_RETURN(const SortedSlots sorted,
                       SortByExpert({.slot_offset = routing.slot_offset,
                                     .expert = routing.expert,
                                     .dropped = routing.dropped,
                                     .micro_batch_offsets = inputs.micro_batch_offsets,
                                     .num_experts = experts,
                                     .padded_rows = routing.padded_rows},
                                    workspace, stream));
  const auto rows = static_cast<int64_t>(sorted.slot_of_row.size());
  DispatchPlan plan;
  plan.tokens_ = plan.max_tokens_ = routing.tokens();
  plan.segments_ = MicroBatches(inputs.micro_batch_offsets);
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
  plan.slot_offset_ = routing.slot_offset;
  plan.home_row_of_slot_ = sorted.row_of_slot;
  plan.home_slot_ = sorted.slot_of_row;
  plan.expert_token_ = sorted.token_of_row;
  plan.return_order_ = sorted.own_row;
  return plan;
}

}  // namespace moe
