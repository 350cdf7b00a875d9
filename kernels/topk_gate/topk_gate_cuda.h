// The CUDA path of topk_gate.h, sigmoid_scores.h and topk_select.h, and of the gates that select by
// a biased score or within groups of experts: scores, selection, weights and counts in one pass.
// Internal: plain C++ between the operations (Abseil) and topk_gate_cuda.cu (nvcc, no Abseil).
#ifndef MOE_KERNELS_TOPK_GATE_TOPK_GATE_CUDA_H_
#define MOE_KERNELS_TOPK_GATE_TOPK_GATE_CUDA_H_

#include <cstdint>

#include <cuda_runtime_api.h>

#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"

namespace moe::topk_gate {

// What the kernel is compiled for: a lane keeps up to 32 experts, and one choice of its row.
constexpr int kMaxExperts = 1024;
constexpr int kMaxTopK = 16;
constexpr int kMaxGroups = 32;

enum class Score : uint8_t { kSoftmax, kSigmoid };
enum class Weights : uint8_t { kScores, kNormalised };

// One call, in device memory. Outputs whose data is nullptr are not written, and what they alone
// would need is not computed: TopKSelect is `logits` and `expert`, SigmoidScores is `logits`, `score`
// and `log_sum_exp`, TopKGate is all but the rule of selection.
//
// With v = score + expert_bias, the K largest logits are selected, or with `expert_bias` or groups
// the K largest v. Groups are num_groups runs of E / num_groups experts; a group is worth the sum
// of its group_sum largest v, and v counts as -infinity outside the group_top_k best groups.
// The order is that of TopKGate: equal values the lowest id, a NaN below everything.
//   weight[t, j] = scale * score[t, expert[t, j]], kNormalised: / the sum of those K scores
template <typename T>
struct CudaGate {
  MatrixView<const T> logits;  // [T, E]
  Score function = Score::kSoftmax;
  const float* expert_bias = nullptr;  // [E]
  int32_t num_groups = 0;              // 0 = no groups
  int32_t group_top_k = 0;
  int32_t group_sum = 1;
  Weights weights = Weights::kScores;
  float scale = 1;

  MatrixView<float> score;       // [T, E]; none of `logits`, which weights read again
  MatrixView<int32_t> expert;    // [T, K], best first; K = 0 selects nothing
  MatrixView<float> weight;      // [T, K]
  float* log_sum_exp = nullptr;  // [T] log(sum_e exp(logits[t, e]))
  int64_t* count = nullptr;      // [E] how often an expert was selected
};

// Enqueues on `stream` and returns. Scores and weights differ from the CPU's by the exponential
// alone: sums run in the order of topk_gate.h, weights are added in choice order. Given the same
// values, experts and counts are the CPU's. The same bits for any T. T = float or BFloat16, whose
// logits are as good as the float32 they widen to.
// Errors: cudaErrorInvalidValue, before anything is enqueued, if E is not in 1 .. kMaxExperts, K not
// in 0 .. min(E, kMaxTopK), num_groups not in 0 .. kMaxGroups or no divisor of E, or group_top_k or
// group_sum below 1 with groups; else that of the launch.
template <typename T>
cudaError_t Run(const CudaGate<T>& gate, cudaStream_t stream);

}  // namespace moe::topk_gate

#endif  // MOE_KERNELS_TOPK_GATE_TOPK_GATE_CUDA_H_
