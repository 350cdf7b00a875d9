// SparseMixer as Phi-3.5-MoE evaluates it: the two largest logits c_1, c_2, each weighed by a
// softmax of its own, over the experts not chosen before it whose logits are near,
//   w_j = 1 / sum_e exp(l_e - m), m the logit of c_j, e with (m - l_e) / max(|l_e|, m) <= 2 eps
// and never renormalised. In training transformers draws the experts at random and estimates the
// gradient; here training computes the same as evaluation, and its exact gradient.
// Source: Liu et al., arXiv:2409.12136; transformers/models/phimoe/modeling_phimoe.py.
#include <algorithm>
#include <cmath>
#include <memory>

#include "gating/builtin_gates.h"
#include "gating/token_choice_gate.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

// A token's choice, by its logits.
class Choice {
 public:
  // The first, or the one after `before` (-1 = none).
  Choice(absl::Span<const float> logits, int32_t chosen, int32_t before, float threshold)
      : logits_(logits), chosen_(chosen), before_(before), threshold_(threshold) {
    for (int32_t e = 0; e < static_cast<int32_t>(logits.size()); ++e) sum_ += Exp(e);
  }

  double weight() const { return 1 / sum_; }
  // d weight / d l_e.
  double Derivative(int32_t e) const { return weight() * ((e == chosen_ ? 1 : 0) - Exp(e) / sum_); }

 private:
  // 0 for experts that have no share.
  double Exp(int32_t e) const {
    const float max = logits_[chosen_];
    const float l = logits_[e];
    // In float32, as transformers compares. 0 / 0 is near: both logits are 0.
    const bool is_far = (max - l) / std::max(std::fabs(l), max) > threshold_;
    if (e == before_ || is_far) return 0;
    return std::exp(static_cast<double>(l) - static_cast<double>(max));
  }

  const absl::Span<const float> logits_;
  const int32_t chosen_, before_;
  const float threshold_;
  double sum_ = 0;
};

class SparseMixerGate final : public ScaledTokenChoiceGate {
 public:
  explicit SparseMixerGate(float eps)
      : ScaledTokenChoiceGate({.top_k = 2}, Weights::kScores), threshold_(2 * eps) {}

  bool RunsOn(DeviceKind device) const override { return device == DeviceKind::kCpu; }

  absl::StatusOr<GateSelection> Select(const GateInput& input, Workspace& workspace,
                                       Stream& stream) const override {
    MOE_ASSIGN_OR_RETURN(const GateSelection selection,
                         ScaledTokenChoiceGate::Select(input, workspace, stream));
    MOE_RETURN_IF_ERROR(
        stream.Enqueue([this, logits = input.logits, selection, &threads = stream.threads()] {
          threads.For(logits.rows(), kTokensPerTask, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; ++t) {
              for (size_t j = 0; j < 2; ++j) {
                selection.weight[2 * t + j] =
                    static_cast<float>(ChoiceOf(logits, selection, t, j).weight());
              }
            }
          });
          return absl::OkStatus();
        }));
    return selection;
  }

  absl::Status Backward(const GateGradientInput& input, MatrixView<float> d_logits,
                        Stream& stream) const override {
    return stream.Enqueue([this, logits = input.logits, selection = input.selection,
                           dropped = input.dropped, d_weight = input.d_weight, d_logits,
                           &threads = stream.threads()] {
      threads.For(logits.rows(), kTokensPerTask, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          const auto first = static_cast<size_t>(2 * t);
          const Choice choice[] = {ChoiceOf(logits, selection, t, 0),
                                   ChoiceOf(logits, selection, t, 1)};
          for (int32_t e = 0; e < static_cast<int32_t>(logits.cols()); ++e) {
            double sum = 0;
            for (size_t j = 0; j < 2; ++j) {
              if (dropped[first + j] != 0) continue;
              sum += static_cast<double>(d_weight[first + j]) * choice[j].Derivative(e);
            }
            d_logits(t, e) = static_cast<float>(sum);
          }
        }
      });
      return absl::OkStatus();
    });
  }

 private:
  static constexpr int64_t kTokensPerTask = 512;

  Choice ChoiceOf(MatrixView<const float> logits, const GateSelection& selection, int64_t t,
                  size_t j) const {
    const int32_t* const expert = selection.expert.data() + 2 * t;
    return {{logits.row(t), static_cast<size_t>(logits.cols())},
            expert[j],
            j == 0 ? -1 : expert[0],
            threshold_};
  }

  const float threshold_;
};

}  // namespace

GateDefinition SparseMixerGateDefinition() {
  return {.name = "sparsemixer",
          .only_top_k = 2,
          .options = kGateRouterJitter,
          .make = [](const RouterConfig& config) {
            return std::make_unique<SparseMixerGate>(config.router_jitter);
          }};
}

}  // namespace moe
