// A gate's complete selection: scores, the K chosen experts of every token, combine weights,
// counts.
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
  absl::Span<const float> expert_bias;  // [E] added to the scores for selection alone; empty = none
  // [T, E] values to select by, in place of the rule's; empty view = the rule. CPU.
  MatrixView<const float> value;
};

struct SelectExpertsOutput {
  MatrixView<float> score;          // [T, E] rule.score of the logits; must not overlap them
  MatrixView<int32_t> expert;       // [T, K], best first
  MatrixView<float> weight;         // [T, K]
  absl::Span<float> log_sum_exp;    // [T] log(sum_e exp(logits[t, e])); empty = not wanted
  absl::Span<int64_t> count;        // [E] number of times that an expert was selected
  absl::Span<int64_t> slot_offset;  // [T + 1] t * K; empty = not wanted
};

// Applies `rule` to every token. Weights are computed in float32, in choice order.
//
// Softmax: score[t, e] = exp(l_e - m) / sum_i exp(l_i - m), m the row's largest logit. The sum
// takes its terms as 16 interleaved partials (expert e goes to partial e mod 16, ascending), which
// are then folded pairwise (j with j + 8, 4, 2, 1). One NaN or +infinity makes the whole row of
// scores NaN, which the loss check reports; a row of -infinity likewise.
// Sigmoid: score[t, e] = 1 / (1 + exp(-l_e)) within 2 ulp (tested on all floats: 1.97 ulp below 0,
// 1.19 above), denormal scores included; +infinity gives 1, -infinity 0, a NaN stays a NaN.
// Neighbouring logits may therefore swap their order, and above 17.4 every score is 1.
//
// Selection by logits compares logits and not scores: rounding and underflow of exp create no ties,
// and every backend selects the same experts. Among equal values (+0 and -0 are equal) the lowest
// id comes first. A NaN ranks below everything, also below -infinity, so ids are always in range
// and distinct.
//
// All views are memory of stream.device() and stay valid until the stream passes this point.
// Enqueues; on CUDA one pass over the logits. Each row is computed alone, in a fixed order: the
// same bits for any T and any number of threads, with one SIMD target; exp differs by 1 ulp between
// targets. Devices differ by the exponential alone.
// Errors: kInvalidArgument if shapes disagree, K is not in 1 .. E, E > 2^20 or the groups do not
// fit E; on CUDA if E > 1024, K > 16 or num_groups > 32. kUnimplemented for `value` on CUDA.
absl::Status SelectExperts(const GateRule& rule, const SelectExpertsInput& in,
                           const SelectExpertsOutput& out, Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_TOPK_GATE_SELECT_EXPERTS_H_
