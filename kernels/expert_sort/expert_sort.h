// Sorts the slots of one rank by expert on a CUDA device.
#ifndef MOE_KERNELS_EXPERT_SORT_EXPERT_SORT_H_
#define MOE_KERNELS_EXPERT_SORT_EXPERT_SORT_H_

#include <cstdint>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/base/stream.h"
#include "kernels/base/workspace.h"

namespace moe {

inline constexpr int32_t kMaxSortedExperts = 1024;

// T tokens with S slots (token, choice), in token order; slot s goes to expert[s]. Arrays are
// memory of the stream's device except for micro_batch_offsets and order.
struct SlotsToSort {
  absl::Span<const int64_t> slot_offset;  // [T + 1] slots of token t: slot_offset[t] .. [t + 1]
  absl::Span<const int32_t> expert;       // [S] an id outside [0, E) gets no row
  absl::Span<const uint8_t> dropped;      // [S] 1 = no row; empty = none
  absl::Span<const int64_t> micro_batch_offsets;  // [B + 1], host memory, 0 .. T; empty: B = 1
  int32_t num_experts = 0;                        // E
  int64_t padded_rows = 0;  // P: rows of every expert in every micro-batch; 0 = no padding
  // [E], host memory: the order of the experts' rows; empty: by id.
  absl::Span<const int32_t> order;
};

// Rows are the slots that get one, by (expert, slot), experts in `order`; with padding by (expert,
// micro-batch, place), where a slot takes the first free place. There is room for M = S or E * B *
// P rows; without padding those from expert_begin[E] on are empty places.
struct SortedSlots {
  absl::Span<const int32_t> row_of_slot;   // [S] -1 = none
  absl::Span<const int32_t> slot_of_row;   // [M] -1 = an empty place
  absl::Span<const int32_t> token_of_row;  // [M] likewise
  absl::Span<const int32_t> own_row;       // [M] 0, 1, 2, ...
  // [E + 1] first row of each expert, in `order`; the last entry is the number of rows.
  absl::Span<const int64_t> expert_begin;
  absl::Span<const int64_t> segment_begin;  // [E * B + 1] the same by (expert, micro-batch)
  absl::Span<const int32_t> count;          // [B, E] by id: slots with a row, plus those beyond P
};

// Enqueues the sort without a host wait. Stable and deterministic. Results are memory of the
// stream's device in `workspace`. Slots beyond the first P of an expert and micro-batch get no row
// (-1), which `count` reveals.
// Errors: kUnimplemented on a CPU stream (DispatchPlan::Build sorts there); kInvalidArgument if
// lengths disagree or E is above kMaxSortedExperts; the launch's if E < 1 or there are 2^31 slots
// or places. Cost: the slots' ids are read twice; beside that 14 int32 a slot are written or read.
absl::StatusOr<SortedSlots> SortByExpert(const SlotsToSort& slots, Workspace& workspace,
                                         Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_EXPERT_SORT_EXPERT_SORT_H_
