// Steps of this folder's operations for one token, on the host: for gates that select or weigh in
// their own way.
#ifndef MOE_KERNELS_TOPK_GATE_GATE_ROW_H_
#define MOE_KERNELS_TOPK_GATE_GATE_ROW_H_

#include <cmath>
#include <cstdint>

#include <absl/types/span.h>

#include "kernels/topk_gate/gate_rule.h"

namespace moe {

// The order of selection: the larger score first, then the lower id; NaNs last. (KeyOf of
// gate_rows_cpu.cc and of cuda_float_keys.h map it to integers.)
inline bool RanksBefore(float a, int64_t id_a, float b, int64_t id_b) {
  if (std::isnan(a) != std::isnan(b)) return std::isnan(b);
  if (a != b && !std::isnan(a)) return a > b;
  return id_a < id_b;
}

// w_j = u_j / S, S = sum_j u_j + epsilon, in place. Where every u is 0 (underflow), w is 0.
void Normalise(absl::Span<float> u, float epsilon = 0);

// One token's slots in backward. Inputs [K], output [K].
struct TokenWeightGradient {
  absl::Span<const float> score;      // at the selected experts
  absl::Span<const uint8_t> dropped;  // 1 = over capacity
  // gradient with respect to the combine weights; 0 where dropped
  absl::Span<const float> d_weight;
  // output: gradient with respect to the scores of the selected experts
  absl::Span<double> d_score;
};

// d_score_j = (dw_j - sum_m w_m dw_m) / S. kSelected: S, w and j range over every slot. kKept: over
// the slots that are not dropped; d_score is 0 for the others.
enum class SumOver : uint8_t { kSelected, kKept };
void NormaliseBackward(const TokenWeightGradient& token, SumOver sum_over, float epsilon = 0);

// d_logits [E] from the gradient with respect to the scores of the token's experts; for the others
// it is 0.
//   softmax  d_l_e = p_e (d_p_e - sum_i p_i d_p_i)        sigmoid  d_l_e = s_e (1 - s_e) d_s_e
// float64, sums in choice order, one rounding.
void ScoreBackward(ScoreFunction function, absl::Span<const float> score,
                   absl::Span<const int32_t> expert, absl::Span<const double> d_score,
                   float* d_logits);

}  // namespace moe

#endif  // MOE_KERNELS_TOPK_GATE_GATE_ROW_H_
