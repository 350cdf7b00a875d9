// The frame of the gates in which every token chooses its k experts: one file per rule of selection
// and weighing. Also the base to derive a gate of one's own from (examples/custom_gate.cc).
#ifndef MOE_GATING_TOKEN_CHOICE_GATE_H_
#define MOE_GATING_TOKEN_CHOICE_GATE_H_

#include <cstdint>

#include <absl/types/span.h>

#include "gating/gate.h"
#include "kernels/topk_gate/gate_row.h"

namespace moe {

// How a token's k experts are selected: GateRule, without weights.
struct TokenChoiceRule {
  int32_t top_k = 1;
  ScoreFunction score = ScoreFunction::kSoftmax;
  bool expert_bias = false;
  int32_t num_groups = 0;  // 0 = no groups; else it divides E
  int32_t group_top_k = 0;
  int32_t group_sum = 1;  // a group is worth the sum of so many of its largest v
};

// Weights are what the derived gate makes of the scores, a token at a time. On the host.
class TokenChoiceGate : public Gate {
 public:
  GateTraits traits() const override;
  absl::StatusOr<GateSelection> Select(const GateInput& input, Workspace& workspace,
                                       Stream& stream) const override;
  absl::Status Backward(const GateGradientInput& input, MatrixView<float> d_logits,
                        Stream& stream) const final;

 protected:
  explicit TokenChoiceGate(const TokenChoiceRule& rule) : rule_(rule) {}

 private:
  // One token: scores of the selected experts in (unbiased), combine weights out, in place.
  virtual void Weigh(absl::Span<float> weight) const = 0;
  // One token: the gradient of Weigh (after Reweigh).
  virtual void WeighBackward(const TokenWeightGradient& token) const = 0;

  const TokenChoiceRule rule_;
};

// Weights that are the scores themselves, or the scores divided by their sum + epsilon, times a
// factor: what most gates of the field come down to. On every device.
class ScaledTokenChoiceGate : public Gate {
 public:
  using Weights = GateWeights;

  GateTraits traits() const override;
  // A gate made from this one that overrides Select, or has Reweigh or AddLosses, says kCpu alone.
  bool RunsOn(DeviceKind /*device*/) const override { return true; }
  absl::StatusOr<GateSelection> Select(const GateInput& input, Workspace& workspace,
                                       Stream& stream) const override;
  absl::Status Backward(const GateGradientInput& input, MatrixView<float> d_logits,
                        Stream& stream) const override;

 protected:
  ScaledTokenChoiceGate(const TokenChoiceRule& rule, Weights weights, float scale = 1.0f,
                        float epsilon = 0.0f)
      : rule_(rule), weights_(weights), scale_(scale), epsilon_(epsilon) {}

  // Select, but comparing value [T, E]. On the CPU.
  absl::StatusOr<GateSelection> SelectByValue(const GateInput& input, MatrixView<const float> value,
                                              Workspace& workspace, Stream& stream) const;

 private:
  const TokenChoiceRule rule_;
  const Weights weights_;
  const float scale_, epsilon_;
};

}  // namespace moe

#endif  // MOE_GATING_TOKEN_CHOICE_GATE_H_
