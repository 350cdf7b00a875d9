#include "gating/token_choice_gate.h"

#include "kernels/base/status_macros.h"
#include "kernels/topk_gate/gate_backward.h"
#include "kernels/topk_gate/select_experts.h"

namespace moe {
namespace {

// Tokens that one task takes.
constexpr int64_t kTokensPerTask = 512;

GateTraits TraitsOf(const TokenChoiceRule& rule) {
  return {.expert_bias = rule.expert_bias, .score = rule.score, .balance_choices = rule.top_k};
}

GateGradient GradientOf(const TokenChoiceRule& rule, const GateGradientInput& input) {
  return {.score = input.selection.score,
          .slot_offset = input.selection.slot_offset,
          .expert = input.selection.expert,
          .dropped = input.dropped,
          .d_weight = input.d_weight,
          .top_k = rule.top_k};
}

// `value`: see SelectExpertsInput.
absl::StatusOr<GateSelection> SelectAll(const TokenChoiceRule& rule, GateWeights weights,
                                        float scale, float epsilon, const GateInput& input,
                                        MatrixView<const float> value, Workspace& workspace,
                                        Stream& stream) {
  const int64_t tokens = input.logits.rows();
  const int64_t experts = input.logits.cols();
  MOE_ASSIGN_OR_RETURN(const absl::Span<int64_t> offset, workspace.Array<int64_t>(tokens + 1));
  MOE_ASSIGN_OR_RETURN(const MatrixView<int32_t> expert,
                       workspace.Matrix<int32_t>(tokens, rule.top_k));
  MOE_ASSIGN_OR_RETURN(const absl::Span<float> weight, workspace.Array<float>(tokens * rule.top_k));
  MOE_ASSIGN_OR_RETURN(const MatrixView<float> score, workspace.Matrix<float>(tokens, experts));
  MOE_ASSIGN_OR_RETURN(const absl::Span<float> log_sum_exp, workspace.Array<float>(tokens));
  MOE_ASSIGN_OR_RETURN(const absl::Span<int64_t> count, workspace.Array<int64_t>(experts));
  MOE_RETURN_IF_ERROR(
      SelectExperts({.score = rule.score,
                     .num_groups = rule.num_groups,
                     .group_top_k = rule.group_top_k,
                     .group_sum = rule.group_sum,
                     .weights = weights,
                     .scale = scale,
                     .epsilon = epsilon},
                    {.logits = input.logits, .expert_bias = input.expert_bias, .value = value},
                    {.score = score,
                     .expert = expert,
                     .weight = MatrixView<float>(weight.data(), tokens, rule.top_k),
                     .log_sum_exp = log_sum_exp,
                     .count = count,
                     .slot_offset = offset},
                    stream));
  return GateSelection{.slot_offset = offset,
                       .expert = {expert.data(), weight.size()},
                       .weight = weight,
                       .count = count,
                       .score = score,
                       .log_sum_exp = log_sum_exp};
}

}  // namespace

GateTraits TokenChoiceGate::traits() const {
  return TraitsOf(rule_);
}

absl::StatusOr<GateSelection> TokenChoiceGate::Select(const GateInput& input, Workspace& workspace,
                                                      Stream& stream) const {
  MOE_ASSIGN_OR_RETURN(const GateSelection selection,
                       SelectAll(rule_, GateWeights::kScores, /*scale=*/1.0f,
                                 /*epsilon=*/0.0f, input, {}, workspace, stream));
  MOE_RETURN_IF_ERROR(stream.Enqueue(
      [this, weight = selection.weight, tokens = input.logits.rows(), &threads = stream.threads()] {
        const auto k = static_cast<size_t>(rule_.top_k);
        threads.For(tokens, kTokensPerTask, [&](int64_t begin, int64_t end) {
          for (int64_t t = begin; t < end; ++t) {
            Weigh(weight.subspan(static_cast<size_t>(t) * k, k));
          }
        });
        return absl::OkStatus();
      }));
  return selection;
}

absl::Status TokenChoiceGate::Backward(const GateGradientInput& input, MatrixView<float> d_logits,
                                       Stream& stream) const {
  // Captured by value: the task may run after this call.
  return stream.Enqueue(
      [this, gradient = GradientOf(rule_, input), d_logits, &threads = stream.threads()] {
        threads.For(d_logits.rows(), kTokensPerTask, [&](int64_t begin, int64_t end) {
          GateBackwardRows(
              rule_.score, gradient, begin, end,
              [&](const TokenWeightGradient& token) { WeighBackward(token); }, d_logits);
        });
        return absl::OkStatus();
      });
}

GateTraits ScaledTokenChoiceGate::traits() const {
  return TraitsOf(rule_);
}

absl::StatusOr<GateSelection> ScaledTokenChoiceGate::Select(const GateInput& input,
                                                            Workspace& workspace,
                                                            Stream& stream) const {
  return SelectByValue(input, {}, workspace, stream);
}

absl::StatusOr<GateSelection> ScaledTokenChoiceGate::SelectByValue(const GateInput& input,
                                                                   MatrixView<const float> value,
                                                                   Workspace& workspace,
                                                                   Stream& stream) const {
  return SelectAll(rule_, weights_, scale_, epsilon_, input, value, workspace, stream);
}

absl::Status ScaledTokenChoiceGate::Backward(const GateGradientInput& input,
                                             MatrixView<float> d_logits, Stream& stream) const {
  return GateBackward(
      {.score = rule_.score, .weights = weights_, .scale = scale_, .epsilon = epsilon_},
      GradientOf(rule_, input), d_logits, stream);
}

}  // namespace moe
