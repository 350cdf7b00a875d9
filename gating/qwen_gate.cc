// Qwen2-MoE, Qwen3-MoE (arXiv:2505.09388) and OLMoE (arXiv:2409.02060): one gate, Hugging Face's
// `norm_topk_prob` apart. True (Qwen3): p_sel / sum p_sel; false (Qwen2-MoE, OLMoE): p_sel.
#include "gating/builtin_gates.h"
#include "gating/token_choice_gate.h"

namespace moe {
namespace {

class QwenGate final : public ScaledTokenChoiceGate {
 public:
  QwenGate(int32_t top_k, bool norm_topk_prob)
      : ScaledTokenChoiceGate({.top_k = top_k},
                              norm_topk_prob ? Weights::kNormalised : Weights::kScores) {}
};

GateDefinition Definition(const char* name, bool norm_topk_prob) {
  return {.name = name,
          .options = kGateNormTopK | kGateZeroExperts,
          .make = [norm_topk_prob](const RouterConfig& config) {
            return std::make_unique<QwenGate>(config.top_k,
                                              config.norm_topk_prob.value_or(norm_topk_prob));
          }};
}

}  // namespace

GateDefinition Qwen2GateDefinition() {
  return Definition("qwen2", false);
}
GateDefinition Qwen3GateDefinition() {
  return Definition("qwen3", true);
}
GateDefinition OlmoeGateDefinition() {
  return Definition("olmoe", false);
}

}  // namespace moe
