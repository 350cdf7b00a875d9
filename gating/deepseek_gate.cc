// DeepSeek-V2 (arXiv:2405.04434): the k largest p, among the group_top_k groups with the largest
// best p if there are groups; weights p_sel * scaling_factor.
// DeepSeek-V3 (arXiv:2412.19437, section 2.1.2): v = sigmoid(l) + b selects, b without gradient;
// a group is worth its two largest v, and v outside the kept groups is -infinity (a mask of 0, as
// some ports have, selects a masked expert where v < 0). Weights from the unbiased score:
// s_sel / (sum s_sel) * scaling_factor. After each step b_i += gamma * sign(mean(c) - c_i).
// Source: transformers/models/deepseek_v2, deepseek_v3.
#include "gating/builtin_gates.h"
#include "gating/token_choice_gate.h"

namespace moe {
namespace {

class DeepSeekV2Gate final : public ScaledTokenChoiceGate {
 public:
  explicit DeepSeekV2Gate(const RouterConfig& config)
      : ScaledTokenChoiceGate(
            {.top_k = config.top_k,
             .num_groups = config.num_groups,
             .group_top_k = config.group_top_k,
             .group_sum = 1},
            config.norm_topk_prob.value_or(false) ? Weights::kNormalised : Weights::kScores,
            config.scaling_factor) {}
};

class DeepSeekV3Gate final : public ScaledTokenChoiceGate {
 public:
  explicit DeepSeekV3Gate(const RouterConfig& config)
      : ScaledTokenChoiceGate(
            {.top_k = config.top_k,
             .score = ScoreFunction::kSigmoid,
             .expert_bias = true,
             .num_groups = config.num_groups,
             .group_top_k = config.group_top_k,
             .group_sum = 2},
            config.norm_topk_prob.value_or(true) ? Weights::kNormalised : Weights::kScores,
            config.scaling_factor) {}
};

}  // namespace

GateDefinition DeepSeekV2GateDefinition() {
  return {.name = "deepseek-v2",
          .options = kGateGroups | kGateScaling | kGateNormTopK | kGateZeroExperts,
          .make = [](const RouterConfig& config) {
            return std::make_unique<DeepSeekV2Gate>(config);
          }};
}

GateDefinition DeepSeekV3GateDefinition() {
  return {.name = "deepseek-v3",
          .options = kGateGroups | kGateScaling | kGateNormTopK | kGateZeroExperts,
          .make = [](const RouterConfig& config) {
            return std::make_unique<DeepSeekV3Gate>(config);
          }};
}

}  // namespace moe
