// Mixtral of Experts, arXiv:2401.04088, section 2.1: softmax over the k largest logits, computed
// as Hugging Face does: p_sel / sum p_sel.
#include "gating/router.h"
#include "gating/softmax_top_k.h"

namespace moe {
namespace {

class MixtralGate final : public SoftmaxTopKGate {
 public:
  explicit MixtralGate(int32_t top_k) : SoftmaxTopKGate(top_k) {}

 private:
  void Weigh(absl::Span<float> weight) const override { Normalise(weight); }
  void WeighBackward(const TokenWeightGradient& token) const override {
    NormaliseBackward(token, SumOver::kSelected);
  }
};

}  // namespace

std::unique_ptr<const Gate> MakeMixtralGate(const RouterConfig& config) {
  return std::make_unique<MixtralGate>(config.top_k);
}

}  // namespace moe
