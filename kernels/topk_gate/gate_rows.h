// SelectExperts and GateBackward on the CPU, for rows [begin, end). Internal.
#ifndef MOE_KERNELS_TOPK_GATE_GATE_ROWS_H_
#define MOE_KERNELS_TOPK_GATE_GATE_ROWS_H_

#include <cmath>
#include <cstddef>
#include <cstdint>

#include <absl/types/span.h>

#include "kernels/base/tensor_view.h"
#include "kernels/topk_gate/select_experts.h"

namespace moe {

// Bits of an id beside the 32 of a score in a rank (gate_rows_cpu.cc): at most 2^20 experts.
inline constexpr int kExpertIdBits = 20;

// Rows of one task: enough to amortise its scratch, few enough to balance threads.
inline constexpr int64_t kGateRowsPerTask = 256;

// Scratch for more experts than this is on the heap.
inline constexpr size_t kMostInlineExperts = 256;

// sum = sum_e exp(row[e] - max), in the order of SelectExperts' contract; max is the largest number
// of the row, -infinity if it has none.
struct ExpSum {
  float max;
  float sum;
};
inline float LogSumExp(const ExpSum& s) {
  return static_cast<float>(static_cast<double>(s.max) + std::log(static_cast<double>(s.sum)));
}

// Computes the scores of a softmax, the K largest logits, their scores in `weight`, and
// log_sum_exp.
void SoftmaxTopKCpu(MatrixView<const float> logits, const SelectExpertsOutput& out, int64_t begin,
                    int64_t end);

// expert[t, :] = ids of the K largest of value[t, :], best first.
void TopKSelectCpu(MatrixView<const float> value, MatrixView<int32_t> expert, int64_t begin,
                   int64_t end);

void SigmoidScoresCpu(MatrixView<const float> logits, MatrixView<float> score,
                      absl::Span<float> log_sum_exp, int64_t begin, int64_t end);

// Rows [begin, end) of weight [T, K], which holds the scores: applies `weights`, `scale` and
// `epsilon` of the rule, with the bits of Normalise (gate_row.h).
void WeighRowsCpu(MatrixView<float> weight, const GateRule& rule, int64_t begin, int64_t end);

}  // namespace moe

#endif  // MOE_KERNELS_TOPK_GATE_GATE_ROWS_H_
