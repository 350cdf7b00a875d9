// The two CPU implementations of TopKSelect for rows [begin, end).
#ifndef MOE_KERNELS_TOPK_GATE_TOPK_SELECT_CPU_H_
#define MOE_KERNELS_TOPK_GATE_TOPK_SELECT_CPU_H_

#include <cstdint>

#include "kernels/base/tensor_view.h"

namespace moe {

// Plain loops: the specification.
void TopKSelectReference(MatrixView<const float> value, MatrixView<int32_t> expert, int64_t begin,
                         int64_t end);

// SIMD for the best target of this machine.
void TopKSelectCpu(MatrixView<const float> value, MatrixView<int32_t> expert, int64_t begin,
                   int64_t end);

}  // namespace moe

#endif  // MOE_KERNELS_TOPK_GATE_TOPK_SELECT_CPU_H_
