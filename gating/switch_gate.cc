// Switch Transformers, arXiv:2101.03961, section 2.1: the one largest p, weighed by p itself.
#include "gating/router.h"
#include "gating/softmax_top_k.h"

namespace moe {
namespace {

class SwitchGate final : public SoftmaxTopKGate {
 public:
  SwitchGate() : SoftmaxTopKGate(1) {}

 private:
  // Never renormalised: p / p = 1 would leave the router without a gradient.
  void Weigh(absl::Span<float> /*weight*/) const override {}
  void WeighBackward(const TokenWeightGradient& token) const override {
    token.d_prob[0] = token.d_weight[0];
  }
};

}  // namespace

std::unique_ptr<const Gate> MakeSwitchGate(const RouterConfig& /*config*/) {
  return std::make_unique<SwitchGate>();
}

}  // namespace moe
