// Rows that are exchanged between ranks, computed on a CUDA device: which tokens are sent, and
// which received row an expert reads.
#ifndef MOE_KERNELS_EXPERT_SORT_EXPERT_ROWS_H_
#define MOE_KERNELS_EXPERT_SORT_EXPERT_ROWS_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/base/stream.h"
#include "kernels/base/workspace.h"
#include "kernels/expert_sort/expert_run.h"
#include "kernels/expert_sort/expert_sort.h"

namespace moe {

// Groups of experts. A token is sent once to each group, however many kept slots it has there.
struct TokensToSend {
  SlotsToSort slots;                          // micro-batches, padding and order are ignored
  absl::Span<const int32_t> group_of_expert;  // [E] host memory, each in 0 .. G - 1
  int32_t num_groups = 0;                     // G
  // [S] position of each kept slot in some order, 0 .. S - 1; -1 for the others; device memory.
  absl::Span<const int32_t> row_of_slot;
};

// Results, in device memory.
struct SentTokens {
  absl::Span<const int32_t> token_of_row;  // [S] by (group, token); -1 beyond the last
  absl::Span<const int32_t> count;         // [G] rows of each group
  // [S] by row_of_slot: the position of the slot's token among its group's rows. Not written beyond
  // the last row.
  absl::Span<const int32_t> place;
};

// Enqueues; deterministic. Errors: as SortByExpert, for E or G. Cost: that of sorting the slots by
// group, and twice K^2 / 2 reads a token.
absl::StatusOr<SentTokens> SortTokensByGroup(const TokensToSend& tokens, Workspace& workspace,
                                             Stream& stream);

// Device arrays except for `runs`, [N] each, written completely.
struct ExpertRowOrders {
  absl::Span<const ExpertRun> runs;  // host memory; together they cover all rows
  // [N] positions as sources sent them; may be empty, see `source`
  absl::Span<const int32_t> received;
  absl::Span<int32_t> return_order;  // [return rows] their expert rows
  absl::Span<int32_t> return_place;  // [expert rows] its return row, relative to the chunk's first
  // [expert rows] its received row, relative to the chunk's first: the first row of its source plus
  // its position there. A position out of the source's range is clamped. Not written if `received`
  // is empty.
  absl::Span<int32_t> source;
};

// Enqueues. Errors: kUnimplemented on a CPU stream (DispatchPlan::Build does it there);
// kInvalidArgument if lengths disagree.
absl::Status OrderExpertRows(const ExpertRowOrders& rows, Workspace& workspace, Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_EXPERT_SORT_EXPERT_ROWS_H_
