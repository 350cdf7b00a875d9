#include "gating/router_losses.h"

#include <algorithm>
#include <cmath>

#include "gating/balance.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

// softmax of the experts' logits: the selection's own scores where they are that.
absl::StatusOr<MatrixView<const float>> Probabilities(const GateTraits& traits,
                                                      const GateInput& input,
                                                      const GateSelection& selection,
                                                      Workspace& workspace) {
  if (traits.score == ScoreFunction::kSoftmax) return selection.score;
  MOE_ASSIGN_OR_RETURN(const MatrixView<float> probs,
                       workspace.Matrix<float>(selection.score.rows(), selection.score.cols()));
  for (int64_t t = 0; t < probs.rows(); ++t) {
    const auto log_sum_exp = static_cast<double>(selection.log_sum_exp[static_cast<size_t>(t)]);
    for (int64_t e = 0; e < probs.cols(); ++e) {
      probs(t, e) =
          static_cast<float>(std::exp(static_cast<double>(input.logits(t, e)) - log_sum_exp));
    }
  }
  return probs;
}

absl::Status AddBalance(const RouterConfig& config, const GateTraits& traits,
                        const GateInput& input, const GateSelection& selection,
                        absl::Span<const double> expert_share, double* loss,
                        MatrixView<float> d_logits, Workspace& workspace) {
  BalanceInput balance = {.score = selection.score,
                          .function = traits.score,
                          .slot_offset = selection.slot_offset,
                          .expert = selection.expert,
                          .choices = traits.balance_choices};
  TokenGroups units = input.groups;
  if (config.load_balancing == LoadBalancing::kSeqAuxLoss) {
    MOE_ASSIGN_OR_RETURN(units, MakeTokenGroups({TokenGroup::kSequence}, input.batch, workspace));
  }
  if (config.load_balancing == LoadBalancing::kGlobalAuxLoss) {
    MOE_ASSIGN_OR_RETURN(units, MakeTokenGroups({TokenGroup::kMicroBatch}, input.batch, workspace));
    balance.expert_share = expert_share;
    if (expert_share.empty()) {
      MOE_ASSIGN_OR_RETURN(const absl::Span<double> even,
                           workspace.Array<double>(config.num_outputs()));
      std::fill(even.begin(), even.end(), 1.0 / config.num_outputs());
      balance.expert_share = even;
    }
  }
  return AddLoadBalanceLoss(balance, units, config.aux_loss_coeff, loss, d_logits, workspace);
}

}  // namespace

absl::StatusOr<RouterLosses> ComputeLosses(const RouterConfig& config, const Gate& gate,
                                           const GateInput& input, const GateSelection& selection,
                                           absl::Span<const double> expert_share, Gradient gradient,
                                           Workspace& workspace) {
  const bool aux = config.load_balancing != LoadBalancing::kNone && config.aux_loss_coeff != 0.0f;
  const bool z = config.z_loss_coeff != 0.0f;
  RouterLosses losses;
  if (!aux && !z) return losses;
  const GateTraits traits = gate.traits();
  MatrixView<float> d_logits;
  if (gradient == Gradient::kWanted) {
    MOE_ASSIGN_OR_RETURN(d_logits,
                         workspace.Matrix<float>(input.logits.rows(), input.logits.cols()));
    std::fill_n(d_logits.data(), d_logits.rows() * d_logits.cols(), 0.0f);
  }
  if (aux) {
    if (traits.balance_choices > 0) {
      MOE_RETURN_IF_ERROR(AddBalance(config, traits, input, selection, expert_share, &losses.aux,
                                     d_logits, workspace));
    }
    MOE_RETURN_IF_ERROR(gate.AddLosses(input, selection, &losses.aux, d_logits, workspace));
  }
  if (z) {
    MOE_ASSIGN_OR_RETURN(const MatrixView<const float> probs,
                         Probabilities(traits, input, selection, workspace));
    AddZLoss(probs, selection.log_sum_exp, input.batch.micro_batch_offsets, config.z_loss_coeff,
             &losses.z, d_logits);
  }
  losses.d_logits = d_logits;
  return losses;
}

}  // namespace moe
