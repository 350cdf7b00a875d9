// What becomes of the selected experts' scores. On the CPU.
#ifndef MOE_KERNELS_TOPK_GATE_WEIGH_ROWS_CPU_H_
#define MOE_KERNELS_TOPK_GATE_WEIGH_ROWS_CPU_H_

#include <cstdint>

#include <absl/types/span.h>

#include "kernels/base/tensor_view.h"
#include "kernels/topk_gate/gate_rule.h"

namespace moe {

// Rows [begin, end) of weight [T, K], which holds the scores: `weights`, `scale` and `epsilon` of
// the rule, with the bits of Normalise (gate_row.h).
void WeighRowsCpu(MatrixView<float> weight, const GateRule& rule, int64_t begin, int64_t end);

// count [E] = how often each id stands in expert [T, K].
void CountSelected(MatrixView<const int32_t> expert, absl::Span<int64_t> count);

}  // namespace moe

#endif  // MOE_KERNELS_TOPK_GATE_WEIGH_ROWS_CPU_H_
