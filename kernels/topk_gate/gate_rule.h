// How a gate selects experts by their scores and weighs them. Data only, for every device; no
// Abseil, because .cu files include it.
#ifndef MOE_KERNELS_TOPK_GATE_GATE_RULE_H_
#define MOE_KERNELS_TOPK_GATE_GATE_RULE_H_

#include <cstdint>

#include "kernels/base/choice.h"

namespace moe {

// The score of a logit: its probability in the softmax of the row, or its sigmoid.
enum class ScoreFunction : uint8_t { kSoftmax, kSigmoid };
inline constexpr Choice<ScoreFunction> kScoreFunctionWords[] = {
    {"softmax", ScoreFunction::kSoftmax}, {"sigmoid", ScoreFunction::kSigmoid}};

// The scores at the selected experts, or those divided by their sum.
enum class GateWeights : bool { kScores, kNormalised };

// Let v = score + expert bias. Without groups and expert bias the K largest logits are selected,
// else the K largest v among the experts of the group_top_k best groups (the others count as
// -infinity). Groups are num_groups runs of E / num_groups experts, rated by the sum of their
// group_sum largest v, in which a NaN counts as -infinity. Ties: the lowest expert id; between
// groups the lowest group id. A NaN ranks below everything.
//   weight[t, j] = scale * score[t, expert[t, j]], kNormalised: / (the sum of those K scores, in
//   choice order, + epsilon) (0 where that is 0)
struct GateRule {
  ScoreFunction score = ScoreFunction::kSoftmax;
  int32_t num_groups = 0;  // 0 = no groups; else it divides E
  int32_t group_top_k = 0;
  int32_t group_sum = 1;
  GateWeights weights = GateWeights::kScores;
  float scale = 1;
  float epsilon = 0;
};

}  // namespace moe

#endif  // MOE_KERNELS_TOPK_GATE_GATE_RULE_H_
