// Softmax over the experts and the k best of them: what every softmax gate starts from.
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

}  // namespace moe

#endif  // MOE_KERNELS_TOPK_GATE_TOPK_GATE_H_
