#include "kernels/expert_capacity/expert_capacity.h"

#include <algorithm>

#include "kernels/base/device_arrays.h"
#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/expert_capacity/expert_capacity_cuda.h"
#include "kernels/expert_sort/expert_sort.h"

namespace moe {

absl::Status DropOverCapacity(const CapacityInput& slots, KeptSlots kept, absl::Span<float> weight,
                              absl::Span<uint8_t> dropped, int64_t* dropped_slots,
                              Workspace& workspace, Stream& stream) {
  constexpr char kName[] = "DropOverCapacity";
  const auto count = static_cast<int64_t>(slots.expert.size());
  const int64_t groups = std::max<int64_t>(slots.group_offsets.size(), 1) - 1;
  MOE_RETURN_IF_ERROR(CheckLength(kName, "weight", weight.size(), count));
  MOE_RETURN_IF_ERROR(CheckLength(kName, "dropped", dropped.size(), count));
  MOE_RETURN_IF_ERROR(CheckLength(kName, "capacity", slots.capacity.size(), groups));
  MOE_RETURN_IF_ERROR(stream.Zero(dropped.data(), count));
  MOE_RETURN_IF_ERROR(stream.Zero(dropped_slots, sizeof(int64_t)));
  if (count == 0) return absl::OkStatus();
  const WorkspaceScope scope(workspace);  // later work of the stream may use the memory again

  MOE_ASSIGN_OR_RETURN(const SortedSlots sorted,
                       SortByExpert({.slot_offset = slots.slot_offset,
                                     .expert = slots.expert,
                                     .dropped = {},
                                     .micro_batch_offsets = slots.group_offsets,
                                     .num_experts = slots.num_experts},
                                    workspace, stream));
  MOE_ASSIGN_OR_RETURN(const auto capacity, UploadArray(slots.capacity, workspace, stream));
  MOE_ASSIGN_OR_RETURN(const auto offsets, UploadArray(slots.group_offsets, workspace, stream));
  const bool by_weight = kept == KeptSlots::kLargestWeight;
  return LaunchOn(kName, stream, [&](auto cuda) {
    return expert_capacity::Run(
        expert_capacity::CudaExpertCapacity{
            .num_experts = slots.num_experts,
            .groups = static_cast<int32_t>(groups),
            .capacity = capacity.data(),
            .expert_begin = sorted.expert_begin.data(),
            .count = sorted.count.data(),
            .slot_of_row = sorted.slot_of_row.data(),
            .token_of_row = by_weight ? nullptr : sorted.token_of_row.data(),
            .slot_offset = slots.slot_offset.data(),
            .group_offsets = offsets.data(),
            .weight = weight.data(),
            .dropped = dropped.data(),
            .dropped_slots = dropped_slots},
        cuda);
  });
}

}  // namespace moe
