// gpt-oss: the k largest logits, which have a trained bias; softmax over the selected logits.
// Source: transformers/models/gpt_oss/modeling_gpt_oss.py.
#include "gating/builtin_gates.h"
#include "gating/token_choice_gate.h"

namespace moe {
namespace {

class GptOssGate final : public ScaledTokenChoiceGate {
 public:
  explicit GptOssGate(int32_t top_k)
      : ScaledTokenChoiceGate({.top_k = top_k}, Weights::kNormalised) {}

  GateTraits traits() const override {
    GateTraits traits = ScaledTokenChoiceGate::traits();
    traits.router_bias = true;
    return traits;
  }
};

}  // namespace

GateDefinition GptOssGateDefinition() {
  return {.name = "gpt-oss", .options = kGateZeroExperts, .make = [](const RouterConfig& config) {
            return std::make_unique<GptOssGate>(config.top_k);
          }};
}

}  // namespace moe
