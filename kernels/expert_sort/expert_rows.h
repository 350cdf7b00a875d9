// Rows that travel between ranks, worked out on a CUDA device: which tokens leave, and which
// received row an expert reads.
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

// Groups of experts, each of which gets a token once, however many of its experts the token has
// kept slots of.
struct TokensToSend {
  SlotsToSort slots;                          // micro-batches, padding and order have no say
  absl::Span<const int32_t> group_of_expert;  // [E] of the host, each in 0 .. G - 1
  int32_t num_groups = 0;                     // G
  // [S] rows of an order of the kept slots, 0 .. S - 1, -1 for the others; of the device.
  absl::Span<const int32_t> row_of_slot;
};

// Of the device.
struct SentTokens {
  absl::Span<const int32_t> token_of_row;  // [S] by (group, token); -1 beyond the last
  absl::Span<const int32_t> count;         // [G] rows of each group
  // [S] by row_of_slot: the place of the slot's token among its group's rows. Not written beyond
  // the last row.
  absl::Span<const int32_t> place;
};

// Enqueues; the same bits every time. Errors: as SortByExpert, of E or G. Cost: as sorting the
// slots by group, and twice K^2 / 2 reads a token.
absl::StatusOr<SentTokens> SortTokensByGroup(const TokensToSend& tokens, Workspace& workspace,
                                             Stream& stream);

// Arrays of the device but for `runs`, [N] each, written whole.
struct ExpertRowOrders {
  absl::Span<const ExpertRun> runs;    // of the host; all rows together
  absl::Span<const int32_t> received;  // [N] places as their sources sent them; empty: see source
  absl::Span<int32_t> return_order;    // [return rows] expert row of each
  absl::Span<int32_t> return_place;  // [expert rows] its return row, counted from the chunk's first
  // [expert rows] its received row, counted from the chunk's first: where its source's rows begin,
  // and its place among them. A place that is none of the source's becomes its nearest one. Not
  // written without `received`.
  absl::Span<int32_t> source;
};

// Enqueues. Errors: kUnimplemented on a CPU stream (DispatchPlan::Build has the loop);
// kInvalidArgument if lengths disagree.
absl::Status OrderExpertRows(const ExpertRowOrders& rows, Workspace& workspace, Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_EXPERT_SORT_EXPERT_ROWS_H_
