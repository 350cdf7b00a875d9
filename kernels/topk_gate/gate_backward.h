// The gradient with respect to the logits, from the gradient with respect to the combine weights.
#ifndef MOE_KERNELS_TOPK_GATE_GATE_BACKWARD_H_
#define MOE_KERNELS_TOPK_GATE_GATE_BACKWARD_H_

#include <cstdint>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/topk_gate/gate_row.h"
#include "kernels/topk_gate/gate_rule.h"

namespace moe {

// Inputs of a gate's backward. Token t has slots [slot_offset[t], slot_offset[t + 1]).
struct GateGradient {
  MatrixView<const float> score;          // [T, E]
  absl::Span<const int64_t> slot_offset;  // [T + 1]
  absl::Span<const int32_t> expert;       // [slots], distinct within a token
  absl::Span<const uint8_t> dropped;      // [slots] 1 = over capacity
  absl::Span<const float> d_weight;       // [slots] gradient with respect to the combine weights
  int32_t top_k = 1;                      // no token has more slots
};

// d_logits [T, E] is overwritten with the gradient of SelectExperts' weights. Weights of dropped
// slots are constants (their d_weight is not read). The selection has no gradient.
//   d_score_j = scale * d_weight_j, kNormalised: scale * (d_weight_j - sum_m w_m d_weight_m) / S,
//   S the sum of the scores + epsilon and w = score / S
//   softmax  d_l_e = p_e (d_p_e - sum_i p_i d_p_i)        sigmoid  d_l_e = s_e (1 - s_e) d_s_e
// float64, sums in choice order, one rounding an element: the same bits on every device.
//
// All views live on stream.device() and stay valid until the stream passes this point. Enqueues.
// Errors: kInvalidArgument if shapes disagree, on CUDA if top_k > 32.
absl::Status GateBackward(const GateRule& rule, const GateGradient& in, MatrixView<float> d_logits,
                          Stream& stream);

// The same for tokens [begin, end), on the host, with other weights: weigh_backward computes
// d_score of one token.
void GateBackwardRows(ScoreFunction function, const GateGradient& in, int64_t begin, int64_t end,
                      absl::FunctionRef<void(const TokenWeightGradient&)> weigh_backward,
                      MatrixView<float> d_logits);

}  // namespace moe

#endif  // MOE_KERNELS_TOPK_GATE_GATE_BACKWARD_H_
