// The CUDA paths of select_experts.h and gate_backward.h: scores, selection, weights and counts in
// one pass. Internal: plain C++ between the operations (Abseil) and the .cu files (nvcc).
#ifndef MOE_KERNELS_TOPK_GATE_TOPK_GATE_CUDA_H_
#define MOE_KERNELS_TOPK_GATE_TOPK_GATE_CUDA_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"
#include "kernels/topk_gate/gate_rule.h"

namespace moe::topk_gate {

// Limits that the kernels are compiled for: a lane holds up to 32 experts, and one choice of its
// row.
constexpr int kMaxExperts = 1024;
constexpr int kMaxTopK = 16;
constexpr int kMaxGroups = 32;

// One call, in device memory. Outputs whose data is nullptr are not written, and steps that only
// they need are skipped.
template <typename T>
struct CudaGate {
  MatrixView<const T> logits;  // [T, E]
  GateRule rule;
  const float* expert_bias = nullptr;  // [E]

  MatrixView<float> score;         // [T, E]; must not overlap `logits`, which are read twice
  MatrixView<int32_t> expert;      // [T, K], best first; K = 0 selects nothing
  MatrixView<float> weight;        // [T, K]
  float* log_sum_exp = nullptr;    // [T] log(sum_e exp(logits[t, e]))
  int64_t* count = nullptr;        // [E] number of times that an expert was selected
  int64_t* slot_offset = nullptr;  // [T + 1] t * K
};

// Enqueues on `stream` and returns. Scores and weights differ from the CPU's by the exponential
// alone: sums run in the order of select_experts.h, weights are added in choice order. Given the
// same values, experts and counts are the CPU's. The same bits for any T. T = float, BFloat16 or
// Float16, which give the results of the float32 logits that they widen to.
// Errors: cudaErrorInvalidValue, before anything is enqueued, if E is not in 1 .. kMaxExperts, K
// not in 0 .. min(E, kMaxTopK), num_groups not in 0 .. kMaxGroups or no divisor of E, or
// group_top_k or group_sum below 1 with groups; else that of the launch.
template <typename T>
cudaError_t Run(const CudaGate<T>& gate, cudaStream_t stream);

// Most slots of a token in the gradient: a lane owns one slot of its warp's token.
constexpr int kMaxSlots = 32;

// The arguments of GateBackward, in device memory. No token has more than kMaxSlots slots.
struct CudaGateGradient {
  GateRule rule;                  // score, weights, scale and epsilon
  MatrixView<const float> score;  // [T, E]
  const int64_t* slot_offset;     // [T + 1]
  const int32_t* expert;          // [slots]
  const uint8_t* dropped;         // [slots]
  const float* d_weight;          // [slots]
  MatrixView<float> d_logits;     // [T, E]
};

// Enqueues on `stream` and returns the launch error alone. The bits are those of gate_backward.cc:
// lanes exchange their terms in choice order.
cudaError_t Run(const CudaGateGradient& gradient, cudaStream_t stream);

}  // namespace moe::topk_gate

#endif  // MOE_KERNELS_TOPK_GATE_TOPK_GATE_CUDA_H_
