// The router's own losses: load balance and z-loss, values and gradients.
#ifndef MOE_GATING_BALANCE_H_
#define MOE_GATING_BALANCE_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "gating/router_config.h"
#include "gating/token_groups.h"
#include "kernels/base/parallel.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/workspace.h"

namespace moe {

// What the load-balance loss of a batch is computed from.
struct BalanceInput {
  MatrixView<const float> score;  // [T, E]; p = score, or score / sum of the row if sigmoid
  ScoreFunction function = ScoreFunction::kSoftmax;
  absl::Span<const int64_t> slot_offset;  // [T + 1]
  absl::Span<const int32_t> expert;       // [slots]
  // Of each token's slots only the first this many enter c, and the formula's k; GShard: 1.
  int32_t choices = 1;
  // [E] shares f_i that stand for c_i / (k * T_g); empty = c is counted in the group itself.
  absl::Span<const double> expert_share;
};

// *loss += sum over micro-batches of mean over the micro-batch's groups g of
//
//   L_g = coeff * E / (k * T_g^2) * sum_i (sum_{t in g} p_ti) * c_i,
//
// c_i = slots of the group routed to expert i, those that capacity drops included (as Megatron).
// L_g = coeff at perfect balance. c has no gradient, so by the logits
//   softmax: dL_g/dl_ti = p_ti * (G_i - sum_j p_tj G_j),  G_i = coeff * E * c_i / (k * T_g^2)
//   sigmoid: the same times (1 - score_ti).
// The gradient is added to d_logits [T, >= E] (empty view = not wanted).
// Sums are float64: over tokens ascending, then experts ascending, then groups ascending.
// (Switch Transformers, arXiv:2101.03961, eq. 4 to 6; over sequences and of sigmoid scores:
// DeepSeek-V3, 2412.19437.)
absl::Status AddLoadBalanceLoss(const BalanceInput& input, const TokenGroups& groups, float coeff,
                                double* loss, MatrixView<float> d_logits, Workspace& workspace);

// The probabilities of a batch as its gate has them.
struct EntropyInput {
  MatrixView<const float> logits;  // [T, >= E]
  MatrixView<const float> score;   // [T, E]; p as in BalanceInput
  ScoreFunction function = ScoreFunction::kSoftmax;
  absl::Span<const float> log_sum_exp;  // [T]; read for a softmax
};

// Sum over tokens, ascending, of the entropy of p, nats; 0 log 0 = 0. Rows of NaN give NaN.
//   softmax  lse_t - sum_i p_ti l_ti        sigmoid  log S_t - sum_i s_ti log s_ti / S_t
// float64; the same bits on any number of threads. A softmax costs T * E multiply-adds, no
// logarithm.
absl::StatusOr<double> EntropySum(const EntropyInput& input, Workspace& workspace,
                                  ThreadPool& threads);

// *loss += sum over micro-batches b of coeff * mean_{t in b} lse_t^2, whatever the token group.
//   log_sum_exp [T] of the logits. d_logits += coeff * 2 * lse_t * p_ti / T_b.
// (ST-MoE, arXiv:2202.08906, eq. 5.)
void AddZLoss(MatrixView<const float> probs, absl::Span<const float> log_sum_exp,
              absl::Span<const int64_t> micro_batch_offsets, float coeff, double* loss,
              MatrixView<float> d_logits);

}  // namespace moe

#endif  // MOE_GATING_BALANCE_H_
