// Mixtral, arXiv:2401.04088, section 2.1: softmax over the k selected logits, which is
// p_sel / sum p_sel. Source: transformers/models/mixtral/modeling_mixtral.py.
#include "gating/builtin_gates.h"
#include "gating/token_choice_gate.h"

namespace moe {
namespace {

class MixtralGate final : public ScaledTokenChoiceGate {
 public:
  explicit MixtralGate(int32_t top_k)
      : ScaledTokenChoiceGate({.top_k = top_k}, Weights::kNormalised) {}
};

}  // namespace

GateDefinition MixtralGateDefinition() {
  return {.name = "mixtral", .options = kGateZeroExperts, .make = [](const RouterConfig& config) {
            return std::make_unique<MixtralGate>(config.top_k);
          }};
}

}  // namespace moe
