// The gate that Megatron's --moe-router-* flags describe, every one of them at its own setting
// (megatron/core/transformer/moe/moe_utils.py, topk_routing_with_score_function); the gates named
// after models are points of it.
//   softmax              k largest logits; softmax over the selected
//   softmax, pre_softmax k largest p; weights p_sel
//   sigmoid              k largest s (+ expert bias); weights s_sel / sum s_sel (k = 1: s_sel)
// A group is worth the sum of its k / group_top_k largest values.
#include <algorithm>

#include "gating/builtin_gates.h"
#include "gating/token_choice_gate.h"

namespace moe {
namespace {

class ConfiguredGate final : public ScaledTokenChoiceGate {
 public:
  explicit ConfiguredGate(const RouterConfig& config)
      : ScaledTokenChoiceGate(
            {.top_k = config.top_k,
             .score = config.score_function,
             .expert_bias = config.expert_bias,
             .num_groups = config.num_groups,
             .group_top_k = config.group_top_k,
             .group_sum = std::max(1, config.top_k / std::max(1, config.group_top_k))},
            WeightsOf(config), config.scaling_factor) {}

 private:
  static Weights WeightsOf(const RouterConfig& config) {
    const bool normalised =
        config.score_function == ScoreFunction::kSigmoid ? config.top_k > 1 : !config.pre_softmax;
    return config.norm_topk_prob.value_or(normalised) ? Weights::kNormalised : Weights::kScores;
  }
};

}  // namespace

GateDefinition TopKGateDefinition() {
  return {.name = "topk",
          .options = kGateScoreFunction | kGateGroups | kGateScaling | kGateNormTopK |
                     kGateExpertBias | kGateZeroExperts,
          .make = [](const RouterConfig& config) {
            return std::make_unique<ConfiguredGate>(config);
          }};
}

}  // namespace moe
