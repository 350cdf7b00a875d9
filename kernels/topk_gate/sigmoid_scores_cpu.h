// The two CPU implementations of SigmoidScores for rows [begin, end).
#ifndef MOE_KERNELS_TOPK_GATE_SIGMOID_SCORES_CPU_H_
#define MOE_KERNELS_TOPK_GATE_SIGMOID_SCORES_CPU_H_

#include <cstdint>

#include <absl/types/span.h>

#include "kernels/base/tensor_view.h"

namespace moe {

// Plain loops: the specification. Scores are computed in float64 and rounded once.
void SigmoidScoresReference(MatrixView<const float> logits, MatrixView<float> score,
                            absl::Span<float> log_sum_exp, int64_t begin, int64_t end);

// SIMD for the best target of this machine.
void SigmoidScoresCpu(MatrixView<const float> logits, MatrixView<float> score,
                      absl::Span<float> log_sum_exp, int64_t begin, int64_t end);

}  // namespace moe

#endif  // MOE_KERNELS_TOPK_GATE_SIGMOID_SCORES_CPU_H_
