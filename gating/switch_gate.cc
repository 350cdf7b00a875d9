// Switch Transformers, arXiv:2101.03961, section 2.1: the one largest p, weighed by p itself. Never
// renormalised: p / p = 1 would leave the router without a gradient. In training the router may see
// jittered tokens, x * U[1 - e, 1 + e] (section 2.4, "selective precision": multiplied, not added).
#include "gating/builtin_gates.h"
#include "gating/token_choice_gate.h"

namespace moe {
namespace {

class SwitchGate final : public ScaledTokenChoiceGate {
 public:
  explicit SwitchGate(float input_jitter)
      : ScaledTokenChoiceGate({.top_k = 1}, Weights::kScores), input_jitter_(input_jitter) {}

  GateTraits traits() const override {
    GateTraits traits = ScaledTokenChoiceGate::traits();
    traits.input_jitter = input_jitter_;
    return traits;
  }

 private:
  const float input_jitter_;
};

}  // namespace

GateDefinition SwitchGateDefinition() {
  return {.name = "switch",
          .only_top_k = 1,
          .options = kGateJitter | kGateZeroExperts,
          .make = [](const RouterConfig& config) {
            return std::make_unique<SwitchGate>(config.input_jitter);
          }};
}

}  // namespace moe
