// What a router is asked to be. Data only.
#ifndef MOE_GATING_ROUTER_CONFIG_H_
#define MOE_GATING_ROUTER_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>

#include <absl/status/status.h>

#include "gating/capacity.h"
#include "gating/token_groups.h"
#include "kernels/base/choice.h"
#include "kernels/topk_gate/gate_rule.h"

namespace moe {

// The unit of the load-balance loss: the token group; the sequence whatever the group is; or the
// micro-batch's probabilities against the whole previous step's counts.
enum class LoadBalancing : uint8_t { kNone, kAuxLoss, kSeqAuxLoss, kGlobalAuxLoss };
inline constexpr Choice<LoadBalancing> kLoadBalancingWords[] = {
    {"aux_loss", LoadBalancing::kAuxLoss},
    {"seq_aux_loss", LoadBalancing::kSeqAuxLoss},
    {"global_aux_loss", LoadBalancing::kGlobalAuxLoss},
    {"sinkhorn", LoadBalancing::kNone},  // the gate balances
    {"none", LoadBalancing::kNone}};

// Parts of RouterConfig that only some gates read (GateDefinition::options).
enum GateOption : uint32_t {
  kGateScoreFunction = 1 << 0,  // score_function, pre_softmax
  kGateGroups = 1 << 1,         // num_groups, group_top_k
  kGateScaling = 1 << 2,        // scaling_factor
  kGateNormTopK = 1 << 3,       // norm_topk_prob, norm_epsilon
  kGateExpertBias = 1 << 4,     // expert_bias: optional; gates that always have one do not read it
  kGateJitter = 1 << 5,         // input_jitter
  kGateRandomSecond = 1 << 6,   // random_second_expert
  kGateZeroExperts = 1 << 7,    // num_zero_experts
  kGateRouterJitter = 1 << 8,   // router_jitter
};

struct RouterConfig {
  std::string gate = "mixtral";  // a name of GateNames()
  int32_t num_experts = 0;       // routed experts, over all ranks
  int32_t num_zero_experts = 0;  // identity experts after them; E = num_experts + these
  int32_t top_k = 2;             // K (1 for switch, 2 for gshard and sparsemixer)
  int64_t hidden_size = 0;       // H

  // topk: the score selected on and weighed by. Softmax with pre_softmax: weights are p_sel;
  // without it: softmax over the selected logits.
  ScoreFunction score_function = ScoreFunction::kSoftmax;
  bool pre_softmax = false;
  // Node-limited routing: experts in num_groups groups of equal size, of which a token uses
  // group_top_k. 0 = no groups.
  int32_t num_groups = 0;
  int32_t group_top_k = 0;
  float scaling_factor = 1.0f;  // multiplies the combine weights
  // Divide weights by their sum; empty = as the gate defines.
  std::optional<bool> norm_topk_prob = {};
  std::optional<float> norm_epsilon = {};  // added to that sum; empty = as the gate defines
  bool expert_bias = false;                // topk: a selection bias as DeepSeek-V3's
  float bias_update_rate = 1e-3f;          // gamma; gates with an expert bias
  float input_jitter = 0.0f;          // switch: the router sees x * U[1 - e, 1 + e] in training
  bool random_second_expert = false;  // gshard: in training
  // sparsemixer: logits within twice this part of a chosen one share its softmax
  // (transformers' router_jitter_noise; nothing is drawn).
  float router_jitter = 0.01f;

  // Empty = dropless. Read as the shortest decimal that is this double (ExpertCapacity).
  std::optional<double> capacity_factor = {};
  DropPolicy drop_policy = DropPolicy::kProbability;
  bool pad_to_capacity = false;
  TokenGroup token_group = {};
  // Length of every micro-batch; 0 = they may differ. Needed to pad: a rank without a micro-batch
  // must know the same number of rows as the others.
  int64_t micro_batch_tokens = 0;

  LoadBalancing load_balancing = LoadBalancing::kAuxLoss;
  float aux_loss_coeff = 0.0f;
  float z_loss_coeff = 0.0f;

  // Key of the gate's random numbers.
  uint64_t seed = 0;
  uint32_t layer = 0;

  int32_t num_outputs() const { return num_experts + num_zero_experts; }  // E
};

// kInvalidArgument naming field, value and the nearest valid choice.
absl::Status ValidateRouterConfig(const RouterConfig& config);

}  // namespace moe

#endif  // MOE_GATING_ROUTER_CONFIG_H_
