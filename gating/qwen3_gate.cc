// Qwen3-MoE (arXiv:2505.09388) and OLMoE (arXiv:2409.02060): one gate, Hugging Face's
// `norm_topk_prob` apart. True (Qwen3): p_sel / sum p_sel; false (OLMoE): p_sel.
#include <algorithm>

#include "gating/router.h"
#include "gating/softmax_top_k.h"

namespace moe {
namespace {

enum class NormTopKProb : bool { kFalse, kTrue };

class Qwen3Gate final : public SoftmaxTopKGate {
 public:
  Qwen3Gate(int32_t top_k, NormTopKProb norm)
      : SoftmaxTopKGate(top_k), normalised_(norm == NormTopKProb::kTrue) {}

 private:
  void Weigh(absl::Span<float> weight) const override {
    if (normalised_) Normalise(weight);
  }
  void WeighBackward(const TokenWeightGradient& token) const override {
    if (normalised_) return NormaliseBackward(token, SumOver::kSelected);
    std::copy(token.d_weight.begin(), token.d_weight.end(), token.d_prob.begin());
  }

  const bool normalised_;
};

}  // namespace

std::unique_ptr<const Gate> MakeQwen3Gate(const RouterConfig& config) {
  return std::make_unique<Qwen3Gate>(config.top_k, NormTopKProb::kTrue);
}

std::unique_ptr<const Gate> MakeOlmoeGate(const RouterConfig& config) {
  return std::make_unique<Qwen3Gate>(config.top_k, NormTopKProb::kFalse);
}

}  // namespace moe
