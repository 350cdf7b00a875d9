// Scores of the experts of every token, and the k best of them: what gates start from.
#ifndef MOE_KERNELS_TOPK_GATE_TOPK_GATE_H_
#define MOE_KERNELS_TOPK_GATE_TOPK_GATE_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"

namespace moe {

// What TopKGate writes; K = expert.cols(), 1 <= K <= E.
struct TopKGateOutput {
  MatrixView<float> probs;        // [T, E] softmax of the row
  MatrixView<int32_t> expert;     // [T, K] ids of the K largest logits, best first
  MatrixView<float> value;        // [T, K] probs at those ids
  absl::Span<float> log_sum_exp;  // [T] log(sum_e exp(logits[t, e])); empty = not wanted
  absl::Span<int64_t> count;      // [E] how often an expert was selected
};

// probs[t, e] = exp(logits[t, e] - m_t) / sum_i exp(logits[t, i] - m_t),  m_t = max_e logits[t, e].
//
//   logits [T, E] float32
//
// Selection compares logits, not probs: rounding and underflow of exp make no ties, and every
// backend selects the same experts. Equal logits (+0 and -0 are equal): the lowest id comes first.
// A NaN ranks below everything, so ids are always in range and distinct; one NaN or +infinity
// makes the whole row of probs NaN, which the loss check reports. A row of -infinity likewise.
//
// Each row alone, in a fixed order: the sum takes its terms as 16 interleaved partials (expert e
// goes to partial e mod 16, ascending), which are then folded pairwise (j with j + 8, 4, 2, 1).
// Same bits for any T and any number of threads, with one SIMD target; exp differs by 1 ulp
// between targets. All views live on stream.device().
// Errors: kInvalidArgument if shapes disagree or E > 2^20, on CUDA if E > 1024 or K > 16.
absl::Status TopKGate(MatrixView<const float> logits, const TopKGateOutput& out, Stream& stream);

// Selection alone, for gates whose scores are no softmax.
//
// expert[t, :] = ids of the K largest of value[t, :], best first.
//
//   value   [T, E]  float32, any stride >= E
//   expert  [T, K]  K = expert.cols(), 1 <= K <= E
//
// The order of TopKGate: larger first; among equals (+0 and -0 are equal) the lowest id; a NaN
// ranks below everything, also below -infinity. Ids are therefore always in range and distinct, and
// every backend selects the same ones.
//
// Both views live on stream.device() and stay valid until the stream passes this point. Enqueues;
// each row alone: the same ids for any T and any number of threads. Cost: K searches of E values a
// row.
// Errors: kInvalidArgument if shapes disagree or E > 2^20, on CUDA if E > 1024 or K > 16.
absl::Status TopKSelect(MatrixView<const float> value, MatrixView<int32_t> expert, Stream& stream);

// Scores of gates whose experts do not compete in a softmax.
//
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

#endif  // MOE_KERNELS_TOPK_GATE_TOPK_GATE_H_
