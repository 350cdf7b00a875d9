// DeepSeek-V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437), as transformers computes them: V2
// ignores norm_topk_prob; V3 ignores topk_method and scoring_func; both ignore moe_layer_freq.
#include "moe/hf/family.h"

namespace moe::hf {
namespace {

// Layers from first_k_dense_replace on.
std::vector<bool> LastLayers(ConfigKeys& keys, int64_t fallback_layers, int64_t fallback_dense) {
  const int64_t layers = keys.Integer("num_hidden_layers", fallback_layers, kLayers);
  const int64_t dense = keys.Integer("first_k_dense_replace", fallback_dense, {0, kLayers.most});
  std::vector<bool> has_experts(layers);
  for (int64_t i = dense; i < layers; ++i) has_experts[i] = true;
  return has_experts;
}

// The shared experts are one, as wide as all of them.
void ReadWidths(ConfigKeys& keys, int64_t fallback_width, int64_t fallback_shared,
                MoeLayerConfig& moe) {
  moe.ffn_hidden_size = keys.Integer("moe_intermediate_size", fallback_width, kWidths);
  moe.shared_expert_ffn_hidden_size =
      moe.ffn_hidden_size * keys.Integer("n_shared_experts", fallback_shared, kExperts);
}

void ReadGroups(ConfigKeys& keys, std::optional<int64_t> groups, std::optional<int64_t> kept,
                RouterConfig& router) {
  router.num_groups = keys.Integer32("n_group", groups, kExperts);
  router.group_top_k = keys.Integer32("topk_group", kept, kExperts);
}

void ReadV2(ConfigKeys& keys, HfConfig& config) {
  MoeLayerConfig& moe = config.moe;
  moe.router.gate = "deepseek-v2";
  moe.router.num_experts = keys.Integer32("n_routed_experts", 64, kExperts);
  moe.router.top_k = keys.Integer32("num_experts_per_tok", std::nullopt, kExperts);
  moe.router.scaling_factor = static_cast<float>(keys.Real("routed_scaling_factor", 1.0));
  moe.router.hidden_size = keys.Integer("hidden_size", 4096, kWidths);
  const std::string method = keys.Text("topk_method", "greedy");
  if (method == "group_limited_greedy") {
    ReadGroups(keys, std::nullopt, std::nullopt, moe.router);
  } else if (method != "greedy") {
    keys.Unsupported("topk_method", method, "greedy or group_limited_greedy");
  }
  ReadWidths(keys, 1407, 2, moe);
  moe.activation = ReadActivation(keys);
  keys.RefuseIfSet("mlp_bias", "false: experts without biases");
  config.has_experts = LastLayers(keys, 32, 0);
}

void ReadV3(ConfigKeys& keys, HfConfig& config) {
  MoeLayerConfig& moe = config.moe;
  moe.router.gate = "deepseek-v3";
  moe.router.num_experts = keys.Integer32("n_routed_experts", 256, kExperts);
  moe.router.top_k = keys.Integer32("num_experts_per_tok", 8, kExperts);
  moe.router.norm_topk_prob = keys.Bool("norm_topk_prob", true);
  moe.router.scaling_factor = static_cast<float>(keys.Real("routed_scaling_factor", 2.5));
  moe.router.hidden_size = keys.Integer("hidden_size", 7168, kWidths);
  ReadGroups(keys, 8, 4, moe.router);
  ReadWidths(keys, 2048, 1, moe);
  moe.activation = ReadActivation(keys);
  config.has_experts = LastLayers(keys, 61, 3);
}

constexpr TensorRule kSharedGate = {"shared_experts.gate_proj.weight", ParameterKind::kSharedGateUp,
                                    ExpertAxis::kNone, TensorRows::kGate};
constexpr TensorRule kSharedUp = {"shared_experts.up_proj.weight", ParameterKind::kSharedGateUp,
                                  ExpertAxis::kNone, TensorRows::kUp};
constexpr TensorRule kSharedDown = {"shared_experts.down_proj.weight", ParameterKind::kSharedDown};

constexpr TensorRule kV2Tensors[] = {
    {"gate.weight", ParameterKind::kRouterWeight},
    kNumberedExperts[0],
    kNumberedExperts[1],
    kNumberedExperts[2],
    kSharedGate,
    kSharedUp,
    kSharedDown,
};

constexpr TensorRule kV3Tensors[] = {
    {"gate.weight", ParameterKind::kRouterWeight},
    {"gate.e_score_correction_bias", ParameterKind::kExpertBias},
    kNumberedExperts[0],
    kNumberedExperts[1],
    kNumberedExperts[2],
    kSharedGate,
    kSharedUp,
    kSharedDown,
};

}  // namespace

constinit const Family kDeepSeekV2 = {
    .model_type = "deepseek_v2", .block = "mlp", .read = ReadV2, .tensors = kV2Tensors};
constinit const Family kDeepSeekV3 = {
    .model_type = "deepseek_v3", .block = "mlp", .read = ReadV3, .tensors = kV3Tensors};

}  // namespace moe::hf
