// Qwen2-MoE (a shared expert behind a sigmoid), Qwen3-MoE (arXiv:2505.09388) and OLMoE
// (arXiv:2409.02060): softmax over all experts, weights divided by their sum if norm_topk_prob says
// so, which all three leave false by default.
#include <algorithm>

#include "moe/hf/family.h"

namespace moe::hf {
namespace {

// Layer i has experts unless it is in mlp_only_layers; of the others every decoder_sparse_step-th.
std::vector<bool> SparseLayers(ConfigKeys& keys, int64_t fallback_layers) {
  std::vector<bool> layers(keys.Integer("num_hidden_layers", fallback_layers, kLayers));
  const int64_t step = keys.Integer("decoder_sparse_step", 1, kLayers);
  for (size_t i = 0; i < layers.size(); ++i) {
    layers[i] = (static_cast<int64_t>(i) + 1) % step == 0;
  }
  for (const int64_t dense :
       keys.Integers("mlp_only_layers", {0, kLayers.most}).value_or(std::vector<int64_t>{})) {
    if (dense < static_cast<int64_t>(layers.size())) layers[dense] = false;
  }
  return layers;
}

void ReadQwen2(ConfigKeys& keys, HfConfig& config) {
  MoeLayerConfig& moe = config.moe;
  moe.router.gate = "qwen2";
  moe.router.num_experts = keys.Integer32("num_experts", 60, kExperts);
  moe.router.top_k = keys.Integer32("num_experts_per_tok", 4, kExperts);
  moe.router.norm_topk_prob = keys.Bool("norm_topk_prob", false);
  moe.router.hidden_size = keys.Integer("hidden_size", 2048, kWidths);
  moe.ffn_hidden_size = keys.Integer("moe_intermediate_size", 1408, kWidths);
  moe.shared_expert_ffn_hidden_size =
      keys.Integer("shared_expert_intermediate_size", 5632, kWidths);
  moe.gated_shared_expert = true;
  moe.activation = ReadActivation(keys);
  config.has_experts = SparseLayers(keys, 24);
}

void ReadQwen3(ConfigKeys& keys, HfConfig& config) {
  MoeLayerConfig& moe = config.moe;
  moe.router.gate = "qwen3";
  moe.router.num_experts = keys.Integer32("num_experts", 128, kExperts);
  moe.router.top_k = keys.Integer32("num_experts_per_tok", 8, kExperts);
  moe.router.norm_topk_prob = keys.Bool("norm_topk_prob", false);
  moe.router.hidden_size = keys.Integer("hidden_size", 2048, kWidths);
  moe.ffn_hidden_size = keys.Integer("moe_intermediate_size", 768, kWidths);
  moe.activation = ReadActivation(keys);
  config.has_experts = SparseLayers(keys, 24);
}

void ReadOlmoe(ConfigKeys& keys, HfConfig& config) {
  MoeLayerConfig& moe = config.moe;
  moe.router.gate = "olmoe";
  moe.router.num_experts = keys.Integer32("num_experts", 64, kExperts);
  moe.router.top_k = keys.Integer32("num_experts_per_tok", 8, kExperts);
  moe.router.norm_topk_prob = keys.Bool("norm_topk_prob", false);
  moe.router.hidden_size = keys.Integer("hidden_size", 2048, kWidths);
  moe.ffn_hidden_size = keys.Integer("intermediate_size", 2048, kWidths);
  moe.activation = ReadActivation(keys);
  config.has_experts.assign(keys.Integer("num_hidden_layers", 16, kLayers), true);
}

constexpr TensorRule kTensors[] = {
    {"gate.weight", ParameterKind::kRouterWeight},
    kNumberedExperts[0],
    kNumberedExperts[1],
    kNumberedExperts[2],
};

constexpr TensorRule kQwen2Tensors[] = {
    {"gate.weight", ParameterKind::kRouterWeight},
    kNumberedExperts[0],
    kNumberedExperts[1],
    kNumberedExperts[2],
    {"shared_expert.gate_proj.weight", ParameterKind::kSharedGateUp, ExpertAxis::kNone,
     TensorRows::kGate},
    {"shared_expert.up_proj.weight", ParameterKind::kSharedGateUp, ExpertAxis::kNone,
     TensorRows::kUp},
    {"shared_expert.down_proj.weight", ParameterKind::kSharedDown},
    {"shared_expert_gate.weight", ParameterKind::kSharedOutputGate},
};

}  // namespace

constinit const Family kQwen2Moe = {
    .model_type = "qwen2_moe", .block = "mlp", .read = ReadQwen2, .tensors = kQwen2Tensors};
constinit const Family kQwen3Moe = {
    .model_type = "qwen3_moe", .block = "mlp", .read = ReadQwen3, .tensors = kTensors};
constinit const Family kOlmoe = {
    .model_type = "olmoe", .block = "mlp", .read = ReadOlmoe, .tensors = kTensors};

}  // namespace moe::hf
