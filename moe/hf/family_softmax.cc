// Models that choose by softmax over all experts: Mixtral (arXiv:2401.04088), Qwen2-MoE, Qwen3-MoE
// (arXiv:2505.09388), OLMoE (arXiv:2409.02060), DeepSeek-V2 (arXiv:2405.04434), and those whose
// blocks are theirs under other names; Phi-3.5-MoE (arXiv:2409.12136), by softmaxes over parts of
// them. Jitter of inputs is for training only.
#include <absl/strings/str_cat.h>

#include "moe/hf/family.h"

namespace moe::hf {
namespace {

// Layer i has experts unless it is in mlp_only_layers; of the others every decoder_sparse_step-th.
std::vector<bool> EverySparseStep(const Family& /*family*/, ConfigKeys& keys, int64_t layers) {
  std::vector<bool> sparse(layers);
  const int64_t step = keys.Integer("decoder_sparse_step", 1, kLayers);
  for (int64_t i = step - 1; i < layers; i += step) sparse[i] = true;
  for (const int64_t dense :
       keys.Integers("mlp_only_layers", {0, kLayers.most}).value_or(std::vector<int64_t>{})) {
    if (dense < layers) sparse[dense] = false;
  }
  return sparse;
}

// Layer `offset` of every `period`; "sparse" layers of one expert are dense ones.
std::vector<bool> JambaLayers(const Family& family, ConfigKeys& keys, int64_t layers) {
  std::vector<bool> sparse(layers);
  const int64_t period = keys.Integer("expert_layer_period", 2, kLayers);
  const int64_t offset = keys.Integer("expert_layer_offset", 1, {0, kLayers.most});
  if (keys.Integer(family.keys.experts, family.defaults.experts, kExperts) == 1) return sparse;
  for (int64_t i = offset; i < layers && offset < period; i += period) sparse[i] = true;
  return sparse;
}

// Every moe_layer_interval-th layer of a range, whose end -1 is the last one.
std::vector<bool> ErnieLayers(const Family& /*family*/, ConfigKeys& keys, int64_t layers) {
  std::vector<bool> sparse(layers);
  const int64_t step = keys.Integer("moe_layer_interval", 1, kLayers);
  const int64_t start = keys.Integer("moe_layer_start_index", 1, {0, kLayers.most});
  const int64_t end = keys.Integer("moe_layer_end_index", -1, {-1, kLayers.most});
  for (int64_t i = step - 1; i < layers; i += step) {
    sparse[i] = i >= start && (end < 0 || i <= end);
  }
  return sparse;
}

// transformers ignores norm_topk_prob, and groups count with the limited method alone.
void ReadDeepSeekV2(ConfigKeys& keys, HfConfig& config) {
  const std::string method = keys.Text("topk_method", "greedy");
  if (method == "group_limited_greedy") {
    config.moe.router.num_groups = keys.Integer32("n_group", std::nullopt, kExperts);
    config.moe.router.group_top_k = keys.Integer32("topk_group", std::nullopt, kExperts);
  } else if (method != "greedy") {
    keys.Unsupported("topk_method", method, "greedy or group_limited_greedy");
  }
  keys.RefuseIfSet("mlp_bias", "false: experts without biases");
}

// Two choices, which the gate insists on: transformers ignores num_experts_per_tok.
void ReadPhiMoe(ConfigKeys& keys, HfConfig& config) {
  config.moe.router.router_jitter = static_cast<float>(keys.Real("router_jitter_noise", 0.01));
}

// Selected by p + b, weighed by p / max(sum p, moe_norm_min). The maximum is not computed here:
// with 1e-12 it is the sum, but where a bias selects experts of no probability.
void ReadErnie(ConfigKeys& keys, HfConfig& config) {
  config.moe.router.expert_bias = true;
  const double least = keys.Real("moe_norm_min", 1e-12);
  if (least > 1e-12) keys.Unsupported("moe_norm_min", absl::StrCat(least), "at most 1e-12");
  keys.RefuseIfSet("use_bias", "false: experts without biases");
}

constexpr FamilyKeys kMixtralKeys = {.width = "intermediate_size",
                                     .experts = {"num_local_experts", "num_experts"}};
constexpr FamilyKeys kQwen2Keys = {.width = "moe_intermediate_size",
                                   .experts = "num_experts",
                                   .shared_width = "shared_expert_intermediate_size",
                                   .norm = "norm_topk_prob"};
constexpr FamilyKeys kQwen3Keys = {.width = "moe_intermediate_size",
                                   .experts = {"num_local_experts", "num_experts"},
                                   .norm = "norm_topk_prob"};
constexpr FamilyKeys kOlmoeKeys = {.width = "intermediate_size",
                                   .experts = {"num_experts", "num_local_experts"},
                                   .norm = "norm_topk_prob"};

constexpr FamilyDefaults kMixtralDefaults = {
    .layers = 32, .hidden = 4096, .width = 14336, .experts = 8, .top_k = 2};

constexpr TensorRule kMixtralTensors[] = {Router("gate.weight"), kW1, kW3, kW2};
constexpr TensorRule kGraniteTensors[] = {
    Router("router.layer.weight"),
    {"input_linear.weight", ParameterKind::kExpertGateUp, ExpertAxis::kStacked},
    {"output_linear.weight", ParameterKind::kExpertDown, ExpertAxis::kStacked},
};
constexpr TensorRule kOlmoeTensors[] = {Router("gate.weight"), kGateProj, kUpProj, kDownProj};
constexpr TensorRule kJambaTensors[] = {Router("router.weight"), kGateProj, kUpProj, kDownProj};
constexpr TensorRule kQwen2Tensors[] = {
    Router("gate.weight"),
    kGateProj,
    kUpProj,
    kDownProj,
    SharedGate("shared_expert.gate_proj.weight"),
    SharedUp("shared_expert.up_proj.weight"),
    SharedDown("shared_expert.down_proj.weight"),
    {"shared_expert_gate.weight", ParameterKind::kSharedOutputGate},
};
constexpr TensorRule kHunYuanTensors[] = {
    Router("gate.wg.weight"),
    kGateProj,
    kUpProj,
    kDownProj,
    SharedGate("shared_mlp.gate_proj.weight"),
    SharedUp("shared_mlp.up_proj.weight"),
    SharedDown("shared_mlp.down_proj.weight"),
};
constexpr TensorRule kDeepSeekV2Tensors[] = {
    Router("gate.weight"),
    kGateProj,
    kUpProj,
    kDownProj,
    SharedGate("shared_experts.gate_proj.weight"),
    SharedUp("shared_experts.up_proj.weight"),
    SharedDown("shared_experts.down_proj.weight"),
};
constexpr TensorRule kErnieTensors[] = {
    Router("gate.weight"),
    {.name = "moe_statics.e_score_correction_bias",
     .parameter = ParameterKind::kExpertBias,
     .row_vector = true},
    kGateProj,
    kUpProj,
    kDownProj,
    SharedGate("shared_experts.gate_proj.weight"),
    SharedUp("shared_experts.up_proj.weight"),
    SharedDown("shared_experts.down_proj.weight"),
};

constexpr Family kFamilies[] = {
    {.model_type = "mixtral",
     .block = "block_sparse_moe",
     .gate = "mixtral",
     .keys = kMixtralKeys,
     .defaults = kMixtralDefaults,
     .tensors = kMixtralTensors},
    {.model_type = "minimax",
     .block = "block_sparse_moe",
     .gate = "mixtral",
     .keys = kMixtralKeys,
     .defaults = kMixtralDefaults,
     .tensors = kMixtralTensors},
    {.model_type = "granitemoe",
     .block = "block_sparse_moe",
     .gate = "mixtral",
     .keys = {.width = "intermediate_size", .experts = "num_local_experts"},
     .defaults = {.layers = 32, .hidden = 4096, .width = 11008, .experts = 8, .top_k = 2},
     .tensors = kGraniteTensors},
    {.model_type = "phimoe",
     .block = "block_sparse_moe",
     .gate = "sparsemixer",
     .keys = {.width = "intermediate_size", .experts = "num_local_experts"},
     .defaults = {.layers = 32, .hidden = 4096, .width = 6400, .experts = 16, .top_k = 2},
     .more = ReadPhiMoe,
     .tensors = kMixtralTensors},
    {.model_type = "hunyuan_v1_moe",
     .gate = "mixtral",
     .keys = {.width = "intermediate_size",
              .experts = {"num_experts", "num_local_experts"},
              .top_k = {"moe_topk", "num_experts_per_tok"},
              .shared_width = "intermediate_size"},
     .defaults = {.layers = 32,
                  .hidden = 4096,
                  .width = 11008,
                  .experts = 1,
                  .top_k = 1,
                  .shared_width = 11008},
     .tensors = kHunYuanTensors},
    {.model_type = "qwen2_moe",
     .gate = "qwen2",
     .keys = kQwen2Keys,
     .defaults = {.layers = 24,
                  .hidden = 2048,
                  .width = 1408,
                  .experts = 60,
                  .top_k = 4,
                  .shared_width = 5632,
                  .norm = false},
     .sparse = EverySparseStep,
     .gated_shared_expert = true,
     .tensors = kQwen2Tensors},
    {.model_type = "qwen3_moe",
     .gate = "qwen3",
     .keys = kQwen3Keys,
     .defaults =
         {.layers = 24, .hidden = 2048, .width = 768, .experts = 128, .top_k = 8, .norm = false},
     .sparse = EverySparseStep,
     .tensors = kOlmoeTensors},
    {.model_type = "qwen3_next",
     .gate = "qwen3",
     .keys = kQwen2Keys,
     .defaults = {.layers = 48,
                  .hidden = 2048,
                  .width = 512,
                  .experts = 512,
                  .top_k = 10,
                  .shared_width = 512},
     .sparse = EverySparseStep,
     .gated_shared_expert = true,
     .tensors = kQwen2Tensors},
    {.model_type = "qwen3_5_moe_text",
     .nested_in = "qwen3_5_moe",
     .gate = "qwen3",
     .keys = {.width = "moe_intermediate_size",
              .experts = "num_experts",
              .shared_width = "shared_expert_intermediate_size"},
     .defaults = {.layers = 40,
                  .hidden = 2048,
                  .width = 512,
                  .experts = 256,
                  .top_k = 8,
                  .shared_width = 512},
     .gated_shared_expert = true,
     .tensors = kQwen2Tensors},
    {.model_type = "olmoe",
     .gate = "olmoe",
     .keys = kOlmoeKeys,
     .defaults =
         {.layers = 16, .hidden = 2048, .width = 2048, .experts = 64, .top_k = 8, .norm = false},
     .tensors = kOlmoeTensors},
    {.model_type = "flex_olmo",
     .gate = "olmoe",
     .keys = kOlmoeKeys,
     .defaults =
         {.layers = 32, .hidden = 4096, .width = 11008, .experts = 7, .top_k = 5, .norm = false},
     .tensors = kOlmoeTensors},
    {.model_type = "jamba",
     .block = "feed_forward",
     .gate = "olmoe",
     .keys = {.width = "intermediate_size", .experts = {"num_experts", "num_local_experts"}},
     .defaults = {.layers = 32, .hidden = 4096, .width = 14336, .experts = 16, .top_k = 2},
     .sparse = JambaLayers,
     .tensors = kJambaTensors},
    {.model_type = "deepseek_v2",
     .gate = "deepseek-v2",
     .keys = {.width = "moe_intermediate_size",
              .experts = {"n_routed_experts", "num_experts"},
              .shared_experts = "n_shared_experts",
              .dense = "first_k_dense_replace",
              .scaling = "routed_scaling_factor"},
     .defaults = {.layers = 32, .hidden = 4096, .width = 1407, .experts = 64, .shared_experts = 2},
     .sparse = LayersAfterDense,
     .more = ReadDeepSeekV2,
     .tensors = kDeepSeekV2Tensors},
    {.model_type = "ernie4_5_moe",
     .gate = "topk",
     .keys = {.width = "moe_intermediate_size",
              .experts = {"moe_num_experts", "num_experts"},
              .top_k = {"moe_k", "num_experts_per_tok"},
              .shared_experts = "moe_num_shared_experts"},
     .defaults = {.layers = 28,
                  .hidden = 2560,
                  .width = 1536,
                  .experts = 64,
                  .top_k = 6,
                  .shared_experts = 2},
     .sparse = ErnieLayers,
     .more = ReadErnie,
     .tensors = kErnieTensors},
};

}  // namespace

constinit const absl::Span<const Family> kSoftmaxFamilies = kFamilies;

}  // namespace moe::hf
