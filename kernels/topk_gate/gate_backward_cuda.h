// The CUDA path of gate_backward.h. Internal: plain C++ between gate_backward.cc (Abseil) and
// gate_backward_cuda.cu (nvcc, no Abseil).
#ifndef MOE_KERNELS_TOPK_GATE_GATE_BACKWARD_CUDA_H_
#define MOE_KERNELS_TOPK_GATE_GATE_BACKWARD_CUDA_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"
#include "kernels/base/tensor_view.h"
#include "kernels/topk_gate/gate_rule.h"

namespace moe::topk_gate {

// A lane takes one slot of its warp's token.
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

// Enqueues on `stream` and returns; the error of the launch alone. The bits of gate_backward.cc:
// lanes pass their terms round in choice order.
cudaError_t Run(const CudaGateGradient& gradient, cudaStream_t stream);

}  // namespace moe::topk_gate

#endif  // MOE_KERNELS_TOPK_GATE_GATE_BACKWARD_CUDA_H_
