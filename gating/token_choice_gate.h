// The frame of the gates in which every token chooses its k experts: one file per rule of selection
// and weighing. Also the base to derive a gate of one's own from (examples/custom_gate.cc).
#ifndef MOE_GATING_TOKEN_CHOICE_GATE_H_
#define MOE_GATING_TOKEN_CHOICE_GATE_H_

#include <cstdint>

#include <absl/types/span.h>

#include "gating/gate.h"

namespace moe {

// How a token's k experts are selected. Without groups and expert bias by the largest logits, else
// by the largest v = score + expert bias among the experts of the group_top_k best groups (the
// others count as -infinity). Ties: the lowest expert id; between groups the lowest group id.
struct TokenChoiceRule {
  int32_t top_k = 1;
  ScoreFunction score = ScoreFunction::kSoftmax;
  bool expert_bias = false;
  int32_t num_groups = 0;  // 0 = no groups; else it divides E
  int32_t group_top_k = 0;
  int32_t group_sum = 1;  // a group is worth the sum of so many of its largest v
};

// One token's slots in backward: in [K], out [K].
struct TokenWeightGradient {
  absl::Span<const float> score;      // at the selected experts
  absl::Span<const uint8_t> dropped;  // 1 = over capacity
  absl::Span<const float> d_weight;   // gradient by the combine weights; 0 where dropped
  absl::Span<double> d_score;         // out: gradient by the score at the selected experts
};

class TokenChoiceGate : public Gate {
 public:
  GateTraits traits() const override;
  absl::StatusOr<GateSelection> Select(const GateInput& input, Workspace& workspace,
                                       Stream& stream) const override;
  absl::Status Backward(const GateGradientInput& input, MatrixView<float> d_logits,
                        Stream& stream) const final;

 protected:
  explicit TokenChoiceGate(const TokenChoiceRule& rule) : rule_(rule) {}
  const TokenChoiceRule& rule() const { return rule_; }

 private:
  // Whether selection compares logits (the fast way), or what FillValues writes.
  virtual bool SelectsByLogits() const { return !rule_.expert_bias && rule_.num_groups == 0; }
  // value [T, E]: what selection compares, larger is better.
  virtual absl::Status FillValues(const GateInput& input, MatrixView<const float> score,
                                  MatrixView<float> value, Stream& stream) const;
  // One token: scores of the selected experts in (unbiased), combine weights out, in place.
  virtual void Weigh(absl::Span<float> weight) const = 0;
  // One token: the gradient of Weigh (after Reweigh).
  virtual void WeighBackward(const TokenWeightGradient& token) const = 0;

  absl::Status Score(const GateInput& input, MatrixView<float> score, MatrixView<int32_t> expert,
                     MatrixView<float> weight, absl::Span<float> log_sum_exp,
                     absl::Span<int64_t> count, Workspace& workspace, Stream& stream) const;

  const TokenChoiceRule rule_;
};

// One token: d_logits [E] from the gradient by the scores of its experts, which is 0 for the others.
//   softmax  d_l_e = p_e (d_p_e - sum_i p_i d_p_i)        sigmoid  d_l_e = s_e (1 - s_e) d_s_e
void ScoreBackward(ScoreFunction function, absl::Span<const float> score,
                   absl::Span<const int32_t> expert, absl::Span<const double> d_score,
                   float* d_logits);

// w_j = u_j / S, S = sum_j u_j, in place. Where every u is 0 (underflow), w is 0.
void Normalise(absl::Span<float> u);

// d_score_j = (dw_j - sum_m w_m dw_m) / S. kSelected: S, w and j range over every slot. kKept: over
// those that are not dropped; d_score is 0 for the others.
enum class SumOver : uint8_t { kSelected, kKept };
void NormaliseBackward(const TokenWeightGradient& token, SumOver sum_over);

// Weights that are the scores themselves, or the scores divided by their sum, times a factor: what
// most gates of the field come down to.
class ScaledTokenChoiceGate : public TokenChoiceGate {
 public:
  enum class Weights : bool { kScores, kNormalised };

 protected:
  ScaledTokenChoiceGate(const TokenChoiceRule& rule, Weights weights, float scale = 1.0f)
      : TokenChoiceGate(rule), normalised_(weights == Weights::kNormalised), scale_(scale) {}

 private:
  void Weigh(absl::Span<float> weight) const override;
  void WeighBackward(const TokenWeightGradient& token) const override;

  const bool normalised_;
  const float scale_;
};

}  // namespace moe

#endif  // MOE_GATING_TOKEN_CHOICE_GATE_H_
