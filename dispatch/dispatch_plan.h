// Where every row of one batch goes and comes back. Built once, used four times:
// dispatch and combine, forward and backward.
#ifndef MOE_DISPATCH_DISPATCH_PLAN_H_
#define MOE_DISPATCH_DISPATCH_PLAN_H_

#include <cstdint>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "comm/communicator.h"
#include "dispatch/placement.h"
#include "gating/routing.h"
#include "kernels/base/stream.h"
#include "kernels/base/workspace.h"

namespace moe {

struct DispatchPlanOptions {
  // d of --moe-overlap-degree: local experts are cut into this many chunks, each exchanged and
  // computed on its own. At most the largest LocalExperts count; more are cut to that.
  int overlap_degree = 1;
};

// The permutation, and its split over ranks and chunks, that `Routing` implies.
//
// Chunk c of rank r is its local experts [L_r * c / d, L_r * (c + 1) / d).
//   slots          (token, choice) pairs of this rank, in token order: Routing's own order
//   send rows      one per distinct (chunk, destination rank, token): a token whose experts share a
//                  rank (and chunk) travels there once. Sorted by (chunk, destination, token).
//                  With padding to capacity: one per (chunk, destination, expert, micro-batch,
//                  place in capacity), -1 for an empty place, so that shapes are static.
//   received rows  sorted by (chunk, source rank, ...) as they arrive
//   expert rows    one per kept slot of all ranks for my experts (capacity places when padded),
//                  sorted by (expert, source rank, token, choice) = (expert, global token, choice).
//                  This is what Experts reads; chunks are contiguous in it.
//   return rows    expert rows on their way home: sorted by (chunk, source = home rank, expert,
//                  token, choice) at the expert's rank, arriving by (chunk, expert's rank, expert,
//                  token, choice) at home
//
// Immutable after Build; its arrays live in the workspace given to Build (host memory).
// Layout after Lepikhin et al., "GShard" (2020), arXiv:2006.16668, without its capacity limit;
// the dropless form follows Gale et al., "MegaBlocks" (2022), arXiv:2211.15841.
class DispatchPlan {
 public:
  // Collective over `comm` (the expert-parallel group); every rank passes the same number of
  // micro-batches B (micro_batch_offsets [B + 1], empty ones allowed), the same options and E.
  // Costs one AllGather of B*E int32 counts, one all-to-all of one int32 per expert row (which send
  // row it reads), and one host wait. With padding no host wait would be needed; on the CPU a wait
  // is free. Errors: kInvalidArgument if routing and placement disagree or an id is out of range;
  // any error of the communicator.
  static absl::StatusOr<DispatchPlan> Build(const Routing& routing,
                                            absl::Span<const int64_t> micro_batch_offsets,
                                            const ExpertPlacement& placement,
                                            const DispatchPlanOptions& options, Communicator& comm,
                                            Workspace& workspace, Stream& stream);

  int chunks() const;           // d
  int64_t tokens() const;       // T
  int64_t send_rows() const;    // S, all chunks
  int64_t recv_rows() const;    // received rows, all chunks
  int64_t expert_rows() const;  // N, all chunks
  int64_t return_rows() const;  // rows that come home = kept slots (or padded)
  absl::Span<const int32_t> chunk_first_expert() const;  // [d + 1] local expert ids

  // [L + 1] expert l reads expert rows expert_offsets[l] .. expert_offsets[l + 1].
  absl::Span<const int64_t> expert_offsets() const;
  // [L * G + 1] row offsets per (local expert, segment); G = R * B segments, one per (source rank,
  // micro-batch), ascending: a weight gradient's partials run over exactly one of these.
  absl::Span<const int64_t> segment_offsets() const;
  int64_t segments() const;  // G

  // [slots] row of home_rows where the slot's expert row comes back; -1 = dropped.
  absl::Span<const int32_t> home_row_of_slot() const;
};

}  // namespace moe

#endif  // MOE_DISPATCH_DISPATCH_PLAN_H_
