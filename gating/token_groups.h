// The units over which capacity and losses are defined.
#ifndef MOE_GATING_TOKEN_GROUPS_H_
#define MOE_GATING_TOKEN_GROUPS_H_

#include <cstdint>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "gating/routing.h"
#include "kernels/base/workspace.h"

namespace moe {

// The unit over which capacity and load balance are defined; never "the tokens of a rank".
// Zero: the micro-batch. -1: the sequence. N > 0: blocks of N tokens within a micro-batch (N must
// divide every micro-batch's length).
struct TokenGroup {
  int64_t tokens = 0;

  static constexpr int64_t kMicroBatch = 0;
  static constexpr int64_t kSequence = -1;
};

// The groups of one batch, in token order. None is empty; together they hold every token once, and
// none crosses a micro-batch.
struct TokenGroups {
  absl::Span<const int64_t> offsets;      // [groups + 1] tokens
  absl::Span<const int64_t> micro_batch;  // [B + 1] groups of micro-batch b: [b] .. [b + 1]

  int64_t size() const { return static_cast<int64_t>(offsets.size()) - 1; }
};

// Checks the offsets of `batch` and returns a copy whose spans live in `workspace`. In the copy an
// empty micro_batch_offsets has become one micro-batch of all tokens, an empty sequence_offsets
// one sequence of them; what routers do not read is empty. kInvalidArgument unless these offsets
// ascend from 0 to `tokens`.
absl::StatusOr<Batch> CopyBatch(const Batch& batch, int64_t tokens, Workspace& workspace);

// `batch` as CopyBatch returns it. kInvalidArgument if a sequence crosses a micro-batch (sequence
// groups) or a micro-batch is no multiple of N (blocks).
absl::StatusOr<TokenGroups> MakeTokenGroups(TokenGroup group, const Batch& batch,
                                            Workspace& workspace);

}  // namespace moe

#endif  // MOE_GATING_TOKEN_GROUPS_H_
