// LongCat-Flash (arXiv:2509.01322): softmax over routed and identity experts together; p + b
// selects, b without gradient; weights p_sel * scaling_factor. An identity expert returns the token
// itself and costs no communication. b moves by the sign rule of DeepSeek-V3 here (the report's
// own controller aims at a share of identity experts).
#include "gating/builtin_gates.h"
#include "gating/token_choice_gate.h"

namespace moe {
namespace {

class LongCatGate final : public ScaledTokenChoiceGate {
 public:
  explicit LongCatGate(const RouterConfig& config)
      : ScaledTokenChoiceGate(
            {.top_k = config.top_k, .expert_bias = true},
            config.norm_topk_prob.value_or(false) ? Weights::kNormalised : Weights::kScores,
            config.scaling_factor) {}
};

}  // namespace

GateDefinition LongCatGateDefinition() {
  return {.name = "longcat",
          .options = kGateScaling | kGateNormTopK | kGateZeroExperts,
          .make = [](const RouterConfig& config) {
            return std::make_unique<LongCatGate>(config);
          }};
}

}  // namespace moe
