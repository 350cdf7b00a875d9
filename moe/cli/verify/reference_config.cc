// From a layer's configuration to the reference's: gates by their definitions.
#include <absl/strings/str_cat.h>

#include "moe/cli/verify/problem.h"

namespace moe::verify {
namespace {

// What DeepSeek-V3 and Megatron add to a sum of sigmoids.
constexpr double kSigmoidEpsilon = 1e-20;

ReferenceGate TopK(const RouterConfig& router, bool normalised) {
  return {.normalised = router.norm_topk_prob.value_or(normalised),
          .balance_choices = router.top_k};
}

ReferenceGate Grouped(ReferenceGate gate, const RouterConfig& router, int64_t group_sum) {
  gate.groups = router.num_groups;
  gate.group_top_k = router.group_top_k;
  gate.group_sum = group_sum;
  gate.scale = static_cast<double>(router.scaling_factor);
  gate.select_by_logits = gate.groups == 0 && !gate.expert_bias;
  return gate;
}

// Megatron's flags, every one at its own setting.
ReferenceGate Configured(const RouterConfig& router) {
  const bool sigmoid = router.score_function == ScoreFunction::kSigmoid;
  ReferenceGate gate = TopK(router, sigmoid ? router.top_k > 1 : !router.pre_softmax);
  gate.score = router.score_function;
  gate.epsilon = sigmoid ? kSigmoidEpsilon : 0;
  gate.expert_bias = router.expert_bias;
  const int32_t per_group = router.group_top_k > 0 ? router.top_k / router.group_top_k : 1;
  return Grouped(gate, router, std::max(1, per_group));
}

absl::StatusOr<ReferenceGate> GateOf(const RouterConfig& router) {
  const std::string& name = router.gate;
  ReferenceGate gate = TopK(router, true);
  if (name == "mixtral" || name == "qwen3") return gate;
  if (name == "qwen2" || name == "olmoe") return TopK(router, false);
  if (name == "topk") return Configured(router);
  if (name == "deepseek-v2") return Grouped(TopK(router, false), router, 1);
  if (name == "switch") {
    gate = TopK(router, false);
    gate.jitter = static_cast<double>(router.input_jitter);
  } else if (name == "gshard") {
    gate.sum_over_kept = true;
    gate.random_second = router.random_second_expert;
    gate.balance_choices = 1;
  } else if (name == "deepseek-v3") {
    gate.score = ScoreFunction::kSigmoid;
    gate.epsilon = kSigmoidEpsilon;
    gate.expert_bias = true;
    return Grouped(gate, router, 2);
  } else if (name == "longcat") {
    gate = TopK(router, false);
    gate.expert_bias = true;
    return Grouped(gate, router, 1);
  } else if (name == "gpt-oss") {
    gate.router_bias = true;
  } else if (name == "llama4") {
    gate = TopK(router, false);
    gate.score = ScoreFunction::kSigmoid;
    gate.weight_on_input = true;
  } else if (name == "expert-choice") {
    gate = {.selection = ReferenceSelection::kExpertChoice};
  } else if (name == "noisy-topk") {
    gate = {.selection = ReferenceSelection::kNoisyTopK};
  } else if (name == "sinkhorn") {
    gate = {.selection = ReferenceSelection::kSinkhorn,
            .score = router.top_k == 1 ? ScoreFunction::kSigmoid : ScoreFunction::kSoftmax};
  } else if (name == "sparsemixer") {
    gate = TopK(router, false);
    gate.near = 2 * static_cast<double>(router.router_jitter);
  } else {
    return absl::UnimplementedError(
        absl::StrCat("the reference has no gate '", name, "', expected a built-in one"));
  }
  return gate;
}

}  // namespace

absl::StatusOr<ReferenceConfig> ReferenceConfigOf(const ProblemSpec& spec) {
  const RouterConfig& router = spec.layer.router;
  absl::StatusOr<ReferenceGate> gate = GateOf(router);
  if (!gate.ok()) return gate.status();
  return ReferenceConfig{.experts = router.num_experts,
                         .zero_experts = router.num_zero_experts,
                         .top_k = router.top_k,
                         .hidden = router.hidden_size,
                         .ffn = spec.layer.ffn_hidden_size,
                         .shared_ffn = spec.layer.shared_expert_ffn_hidden_size,
                         .shared_gated = spec.layer.gated_shared_expert,
                         .projection_biases = spec.layer.projection_biases,
                         .activation = spec.layer.activation.kind,
                         .gate = *gate,
                         .capacity_factor = router.capacity_factor,
                         .drop_by_position = router.drop_policy == DropPolicy::kPosition,
                         .token_group = router.token_group.tokens,
                         .balance = router.load_balancing,
                         .aux_coeff = static_cast<double>(router.aux_loss_coeff),
                         .z_coeff = static_cast<double>(router.z_loss_coeff),
                         .bias_update_rate = static_cast<double>(router.bias_update_rate),
                         .seed = router.seed,
                         .storage = StorageOf(spec.dtype)};
}

}  // namespace moe::verify
