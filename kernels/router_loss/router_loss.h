// The router's own losses, load balance and z-loss, with their gradients, and the entropy of its
// probabilities.
#ifndef MOE_KERNELS_ROUTER_LOSS_ROUTER_LOSS_H_
#define MOE_KERNELS_ROUTER_LOSS_ROUTER_LOSS_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/workspace.h"
#include "kernels/router_loss/router_loss_op.h"
#include "kernels/topk_gate/gate_rule.h"

namespace moe {

using router_loss::kFirstLogit;

// The probabilities of a batch from its gate, on the stream's device.
struct RouterScores {
  MatrixView<const float> logits;  // [T, >= E], the experts first; not read by AddLoadBalanceLoss
  MatrixView<const float> score;   // [T, E]
  ScoreFunction function = ScoreFunction::kSoftmax;
  // [T] of the experts' logits; not read by AddLoadBalanceLoss
  absl::Span<const float> log_sum_exp;
};

// The units of the load-balance loss. Host memory on every device.
struct LossGroups {
  absl::Span<const int64_t> offsets;      // [groups + 1] tokens, 0 .. T; no group is empty
  absl::Span<const int64_t> micro_batch;  // [B + 1] groups of micro-batch b: [b] .. [b + 1]
};

struct LoadBalance {
  // Token t has slots [slot_offset[t], slot_offset[t + 1]). On the stream's device.
  absl::Span<const int64_t> slot_offset;  // [T + 1]
  absl::Span<const int32_t> expert;       // [slots]
  // The number of each token's first slots that count in c, and the formula's k; GShard: 1.
  int32_t choices = 1;
  // [E] shares f_i that replace c_i / (k * T_g); empty = c is counted in the group itself. Host
  // memory on every device.
  absl::Span<const double> expert_share;
  float coeff = 0;
};

// All functions: `loss` [1], scores, slots and d_logits are memory of stream.device(), and so is
// `workspace`. Views, and memory taken from the workspace, stay valid until the stream passes this
// point; host memory may change once the call has returned. They enqueue; no host wait.
//
// Sums are float64, in one order on every device: the tokens of a group (z-loss: of a micro-batch;
// entropy: of the call) are cut into blocks of 256. A sum of probabilities per expert runs over the
// block's tokens, then over the blocks, ascending. Every other sum, over experts, over the tokens
// of a block, over blocks and over the groups of a micro-batch, is that of WideDot: 16 interleaved
// partial sums, folded pairwise. Micro-batches are added ascending. So a micro-batch's loss and
// gradient depend on nothing else, and have the same bits on any number of threads. CUDA has the
// bits of the CPU, except for the exponentials and logarithms of entropies and of a sigmoid's
// z-loss. Errors: kInvalidArgument if shapes disagree; AddLoadBalanceLoss on CUDA if E > 1024.

// *loss += sum over micro-batches of mean over the micro-batch's groups g of
//
//   L_g = coeff * E / (k * T_g^2) * sum_i (sum_{t in g} p_ti) * c_i,
//
// p = score, or score / sum of the row if sigmoid; c_i = slots of the group routed to expert i,
// including those dropped by capacity (as Megatron). L_g = coeff at perfect balance. c has no
// gradient, so with respect to the logits
//   softmax: dL_g/dl_ti = p_ti * (G_i - sum_j p_tj G_j),  G_i = coeff * E * c_i / (k * T_g^2)
//   sigmoid: the same times (1 - score_ti).
// The gradient is added to d_logits [T, >= E] (empty view = not wanted).
// (Switch Transformers, arXiv:2101.03961, eq. 4 to 6; over sequences and for sigmoid scores:
// DeepSeek-V3, 2412.19437.)
absl::Status AddLoadBalanceLoss(const RouterScores& scores, const LoadBalance& balance,
                                const LossGroups& groups, double* loss, MatrixView<float> d_logits,
                                Workspace& workspace, Stream& stream);

// *loss += sum over micro-batches b of coeff * mean_{t in b} lse_t^2, whatever the token group.
//   micro_batch_offsets [B + 1] tokens, 0 .. T; host memory
// d_logits [T, >= E] += coeff * 2 * lse_t * p_ti / T_b (empty view = not wanted), p the softmax of
// the logits whatever the score. (ST-MoE, arXiv:2202.08906, eq. 5.)
absl::Status AddZLoss(const RouterScores& scores, absl::Span<const int64_t> micro_batch_offsets,
                      float coeff, double* loss, MatrixView<float> d_logits, Workspace& workspace,
                      Stream& stream);

// *sum += sum over tokens of the entropy of p, nats; 0 log 0 = 0. NaN where any logit of a token,
// including columns beyond E, is NaN or infinite: then *bad_logit, 0 before, becomes kFirstLogit
// minus the index t * columns + c of the first one.
//   softmax  lse_t - sum_i p_ti l_ti        sigmoid  log S_t - sum_i s_ti log s_ti / S_t
// A softmax costs T * E multiply-adds, no logarithm.
absl::Status AddEntropy(const RouterScores& scores, double* sum, int64_t* bad_logit,
                        Workspace& workspace, Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_ROUTER_LOSS_ROUTER_LOSS_H_
