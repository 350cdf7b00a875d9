// A gate's whole selection: scores, the K chosen experts of every token, combine weights, counts.
#ifndef MOE_KERNELS_TOPK_GATE_SELECT_EXPERTS_H_
#define MOE_KERNELS_TOPK_GATE_SELECT_EXPERTS_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/topk_gate/gate_rule.h"

namespace moe {

struct SelectExpertsInput {
  MatrixView<const float> logits;       // [T, E]
  absl::Span<const float> expert_bias;  // [E] added to the scores for the selection; empty = none
  // [T, E] what the selection compares instead of what GateRule says; empty view = the rule. CPU.
  MatrixView<const float> value;
};

struct SelectExpertsOutput {
  MatrixView<float> score;          // [T, E] rule.score of the logits; none of their memory
  MatrixView<int32_t> expert;       // [T, K], best first
  MatrixView<float> weight;         // [T, K]
  absl::Span<float> log_sum_exp;    // [T] of the logits, as TopKGate; empty = not wanted
  absl::Span<int64_t> count;        // [E] how often an expert was selected
  absl::Span<int64_t> slot_offset;  // [T + 1] t * K; empty = not wanted
};

// What `rule` says of every token. Scores and sums are those of TopKGate or SigmoidScores,
// selections those of TopKSelect; weights are computed in float32, in choice order.
//
// All views live on stream.device() and stay valid until the stream passes this point. Enqueues; on
// CUDA one pass over the logits. Each row alone: the same bits for any T and any number of threads.
// Devices differ by the exponential alone, so that selections by logits are the same on all of
// them. Errors: kInvalidArgument if shapes disagree, K is not in 1 .. E or the groups do not fit E;
// on CUDA if E > 1024, K > 16 or num_groups > 32. kUnimplemented for `value` on CUDA.
absl::Status SelectExperts(const GateRule& rule, const SelectExpertsInput& in,
                           const SelectExpertsOutput& out, Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_TOPK_GATE_SELECT_EXPERTS_H_
