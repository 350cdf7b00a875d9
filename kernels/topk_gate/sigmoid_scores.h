// Sigmoid of the router's logits: scores of gates whose experts do not compete in a softmax.
#ifndef MOE_KERNELS_TOPK_GATE_SIGMOID_SCORES_H_
#define MOE_KERNELS_TOPK_GATE_SIGMOID_SCORES_H_

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"

namespace moe {

// score[t, e] = 1 / (1 + exp(-logits[t, e])).
//
//   logits       [T, E]  float32, any stride >= E
//   score        [T, E]  float32; must not overlap `logits`
//   log_sum_exp  [T]     log(sum_e exp(logits[t, e])), the bits of TopKGate; empty = not wanted
//
// float32, within 2 ulp (all floats tried: 1.97 ulp below 0, 1.19 above), denormal scores included;
// +infinity gives 1, -infinity 0, a NaN stays a NaN. Neighbouring logits may therefore swap their
// order, and above 17.4 every score is 1: where ties and the last ulp matter, select by logits.
//
// All views live on stream.device() and stay valid until the stream passes this point. Enqueues;
// each element (and each row's sum) alone: the same bits for any T, in body or tail, on any number
// of threads, with one SIMD target. Cost: one exponential an element, two with log_sum_exp.
// Errors: kInvalidArgument if shapes disagree or E < 1, on CUDA if E > 1024.
absl::Status SigmoidScores(MatrixView<const float> logits, MatrixView<float> score,
                           absl::Span<float> log_sum_exp, Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_TOPK_GATE_SIGMOID_SCORES_H_
