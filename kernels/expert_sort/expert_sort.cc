#include "kernels/expert_sort/expert_sort.h"

#include <algorithm>

#include "kernels/base/device_arrays.h"
#include "kernels/base/run_op.h"
#include "kernels/base/status_macros.h"
#include "kernels/expert_sort/expert_sort_cuda.h"

namespace moe {
namespace {

constexpr char kSortByExpert[] = "SortByExpert";
static_assert(kMaxSortedExperts == expert_sort::kMaxExperts);

absl::Status Check(const SlotsToSort& slots, int64_t tokens, const Stream& stream) {
  if (!IsCuda(stream)) {
    return absl::UnimplementedError(absl::StrCat(kSortByExpert, ": a stream of the CPU"));
  }
  MOE_RETURN_IF_ERROR(
      CheckCudaLimit(kSortByExpert, "E (experts)", slots.num_experts, kMaxSortedExperts));
  if (!slots.dropped.empty()) {
    MOE_RETURN_IF_ERROR(CheckLength(kSortByExpert, "dropped", slots.dropped.size(),
                                    static_cast<int64_t>(slots.expert.size())));
  }
  if (!slots.order.empty()) {
    MOE_RETURN_IF_ERROR(CheckLength(kSortByExpert, "order", slots.order.size(), slots.num_experts));
  }
  if (slots.micro_batch_offsets.empty()) return absl::OkStatus();
  return CheckGroups(kSortByExpert, "micro-batches", slots.micro_batch_offsets,
                     slots.micro_batch_offsets.size() - 1, tokens);
}

}  // namespace

absl::StatusOr<SortedSlots> SortByExpert(const SlotsToSort& slots, Workspace& workspace,
                                         Stream& stream) {
  const int64_t tokens = std::max<int64_t>(slots.slot_offset.size(), 1) - 1;
  MOE_RETURN_IF_ERROR(Check(slots, tokens, stream));
  const auto count = static_cast<int64_t>(slots.expert.size());
  const int64_t no_tokens[] = {0};
  const int64_t whole[] = {0, tokens};
  const absl::Span<const int64_t> offsets =
      slots.micro_batch_offsets.empty() ? whole : slots.micro_batch_offsets;
  const int64_t micro_batches = static_cast<int64_t>(offsets.size()) - 1;
  const int64_t places = slots.num_experts * micro_batches * slots.padded_rows;
  const int64_t most_rows = slots.padded_rows > 0 ? places : count;

  MOE_ASSIGN_OR_RETURN(const auto device_offsets, UploadArray(offsets, workspace, stream));
  MOE_ASSIGN_OR_RETURN(const auto order, UploadArray(slots.order, workspace, stream));
  absl::Span<const int64_t> slot_offset = slots.slot_offset;
  if (tokens == 0) {
    MOE_ASSIGN_OR_RETURN(slot_offset, UploadArray<int64_t>(no_tokens, workspace, stream));
  }
  MOE_ASSIGN_OR_RETURN(const auto row_of_slot, workspace.Array<int32_t>(count));
  MOE_ASSIGN_OR_RETURN(const auto rows, workspace.Array<int32_t>(3 * most_rows));
  MOE_ASSIGN_OR_RETURN(const auto expert_begin, workspace.Array<int64_t>(slots.num_experts + 1));
  MOE_ASSIGN_OR_RETURN(const auto segment_begin,
                       workspace.Array<int64_t>(slots.num_experts * micro_batches + 1));
  MOE_ASSIGN_OR_RETURN(const auto counts,
                       workspace.Array<int32_t>(micro_batches * slots.num_experts));
  expert_sort::CudaExpertSort sort = {
      .slots = count,
      .expert = slots.expert.data(),
      .dropped = slots.dropped.empty() ? nullptr : slots.dropped.data(),
      .num_experts = slots.num_experts,
      .order = order.empty() ? nullptr : order.data(),
      .micro_batches = static_cast<int32_t>(micro_batches),
      .micro_batch_offsets = device_offsets.data(),
      .slot_offset = slot_offset.data(),
      .padded_rows = slots.padded_rows,
      .most_rows = most_rows,
      .row_of_slot = row_of_slot.data(),
      .slot_of_row = rows.data(),
      .expert_begin = expert_begin.data(),
      .segment_begin = segment_begin.data(),
      .count = counts.data(),
      .scratch = nullptr};
  MOE_ASSIGN_OR_RETURN(const auto scratch,
                       workspace.Array<int32_t>(expert_sort::ScratchElements(sort)));
  sort.scratch = scratch.data();
  const SortedSlots sorted = {.row_of_slot = row_of_slot,
                              .slot_of_row = rows.first(most_rows),
                              .token_of_row = rows.subspan(most_rows, most_rows),
                              .own_row = rows.subspan(2 * most_rows),
                              .expert_begin = expert_begin,
                              .segment_begin = segment_begin,
                              .count = counts};
  const expert_sort::CudaRowTokens tokens_of_rows = {.most_rows = most_rows,
                                                     .slot_of_row = rows.data(),
                                                     .tokens = tokens,
                                                     .slot_offset = slot_offset.data(),
                                                     .token_of_row = rows.data() + most_rows,
                                                     .own_row = rows.data() + 2 * most_rows};
  MOE_RETURN_IF_ERROR(LaunchOn(kSortByExpert, stream, [&](auto cuda) {
    const auto error = expert_sort::Run(sort, cuda);
    return error != decltype(error){} ? error : expert_sort::Run(tokens_of_rows, cuda);
  }));
  return sorted;
}

}  // namespace moe
