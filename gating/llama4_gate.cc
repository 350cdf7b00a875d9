// Llama-4: the k largest logits (k = 1 in every published model), weight sigmoid(l_e) on the
// expert's input: Expert(sigmoid(l_e) * x). Source: transformers/models/llama4/modeling_llama4.py.
#include "gating/builtin_gates.h"
#include "gating/token_choice_gate.h"

namespace moe {
namespace {

class Llama4Gate final : public ScaledTokenChoiceGate {
 public:
  explicit Llama4Gate(int32_t top_k)
      : ScaledTokenChoiceGate({.top_k = top_k, .score = ScoreFunction::kSigmoid},
                              Weights::kScores) {}

  GateTraits traits() const override {
    GateTraits traits = ScaledTokenChoiceGate::traits();
    traits.weight_on = WeightOn::kInput;
    return traits;
  }
};

}  // namespace

GateDefinition Llama4GateDefinition() {
  return {.name = "llama4", .make = [](const RouterConfig& config) {
            return std::make_unique<Llama4Gate>(config.top_k);
          }};
}

}  // namespace moe
