// The two CPU implementations of TopKGate for rows [begin, end). `count` is not touched.
#ifndef MOE_KERNELS_TOPK_GATE_TOPK_GATE_CPU_H_
#define MOE_KERNELS_TOPK_GATE_TOPK_GATE_CPU_H_

#include <cstdint>

#include "kernels/base/tensor_view.h"
#include "kernels/topk_gate/topk_gate.h"

namespace moe {

// Plain loops: the specification.
void TopKGateReference(MatrixView<const float> logits, const TopKGateOutput& out, int64_t begin,
                       int64_t end);

// SIMD for the best target of this machine.
void TopKGateCpu(MatrixView<const float> logits, const TopKGateOutput& out, int64_t begin,
                 int64_t end);

}  // namespace moe

#endif  // MOE_KERNELS_TOPK_GATE_TOPK_GATE_CPU_H_
