#include "gating/router_losses.h"

#include <algorithm>

#include "kernels/base/status_macros.h"
#include "kernels/router_loss/router_loss.h"

namespace moe {
namespace {

// The loss's units and shares; in `host_workspace`, as far as they are not the input's.
absl::Status AddBalance(const RouterConfig& config, const GateInput& input, LoadBalance balance,
                        absl::Span<const double> expert_share, const RouterScores& scores,
                        double* loss, MatrixView<float> d_logits, Workspace& host_workspace,
                        Workspace& workspace, Stream& stream) {
  TokenGroups units = input.groups;
  if (config.load_balancing == LoadBalancing::kSeqAuxLoss) {
    MOE_ASSIGN_OR_RETURN(units,
                         MakeTokenGroups({TokenGroup::kSequence}, input.batch, host_workspace));
  }
  if (config.load_balancing == LoadBalancing::kGlobalAuxLoss) {
    MOE_ASSIGN_OR_RETURN(units,
                         MakeTokenGroups({TokenGroup::kMicroBatch}, input.batch, host_workspace));
    balance.expert_share = expert_share;
    if (expert_share.empty()) {
      MOE_ASSIGN_OR_RETURN(const absl::Span<double> even,
                           host_workspace.Array<double>(config.num_outputs()));
      std::fill(even.begin(), even.end(), 1.0 / config.num_outputs());
      balance.expert_share = even;
    }
  }
  return AddLoadBalanceLoss(scores, balance,
                            {.offsets = units.offsets, .micro_batch = units.micro_batch}, loss,
                            d_logits, workspace, stream);
}

}  // namespace

absl::StatusOr<MatrixView<const float>> EnqueueLosses(
    const RouterConfig& config, const Gate& gate, const GateInput& input,
    const GateSelection& selection, absl::Span<const double> expert_share, Gradient gradient,
    RouterMeasures* measures, Workspace& host_workspace, Workspace& workspace, Stream& stream) {
  const bool aux = config.load_balancing != LoadBalancing::kNone && config.aux_loss_coeff != 0.0f;
  const bool z = config.z_loss_coeff != 0.0f;
  if (!aux && !z) return MatrixView<const float>();
  const GateTraits traits = gate.traits();
  const RouterScores scores = {.logits = input.logits,
                               .score = selection.score,
                               .function = traits.score,
                               .log_sum_exp = selection.log_sum_exp};
  MatrixView<float> d_logits;
  if (gradient == Gradient::kWanted) {
    const int64_t tokens = input.logits.rows(), cols = input.logits.cols();
    MOE_ASSIGN_OR_RETURN(d_logits, workspace.Matrix<float>(tokens, cols));
    MOE_RETURN_IF_ERROR(stream.Zero(d_logits.data(), tokens * cols * int64_t{sizeof(float)}));
  }
  if (aux && traits.balance_choices > 0) {
    const LoadBalance balance = {.slot_offset = selection.slot_offset,
                                 .expert = selection.expert,
                                 .choices = traits.balance_choices,
                                 .expert_share = {},
                                 .coeff = config.aux_loss_coeff};
    MOE_RETURN_IF_ERROR(AddBalance(config, input, balance, expert_share, scores,
                                   &measures->aux_loss, d_logits, host_workspace, workspace,
                                   stream));
  }
  if (aux && stream.device().kind == DeviceKind::kCpu) {
    MOE_RETURN_IF_ERROR(stream.Synchronize());
    MOE_RETURN_IF_ERROR(gate.AddLosses(input, selection, &measures->aux_loss, d_logits, workspace));
  }
  if (z) {
    MOE_RETURN_IF_ERROR(AddZLoss(scores, input.batch.micro_batch_offsets, config.z_loss_coeff,
                                 &measures->z_loss, d_logits, workspace, stream));
  }
  return d_logits;
}

}  // namespace moe
