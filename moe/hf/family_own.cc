// Models with experts or layouts of their own: gpt-oss (arXiv:2508.10925), with unpacked weights;
// Llama-4's text model, whose weight multiplies the expert's input; LongCat-Flash
// (arXiv:2509.01322), with identity experts.
#include <absl/strings/str_cat.h>

#include "moe/hf/family.h"

namespace moe::hf {
namespace {

// transformers ignores hidden_act.
void ReadGptOss(ConfigKeys& keys, HfConfig& config) {
  const double limit = keys.Real("swiglu_limit", 7.0);
  if (!(limit > 0)) keys.Unsupported("swiglu_limit", absl::StrCat(limit), "a number above 0");
  config.moe.activation = {Activation::kClampedSwiGlu,
                           static_cast<float>(keys.Real("swiglu_alpha", 1.702)),
                           static_cast<float>(limit)};
  config.moe.projection_biases = true;
}

// moe_layers; without it every interleave_moe_layer_step-th layer.
std::vector<bool> Llama4Layers(const Family& /*family*/, ConfigKeys& keys, int64_t layers) {
  std::vector<bool> sparse(layers);
  const int64_t step = keys.Integer("interleave_moe_layer_step", 1, kLayers);
  if (const auto listed = keys.Integers("moe_layers", {0, kLayers.most}); listed.has_value()) {
    for (const int64_t i : *listed) {
      if (i < layers) sparse[i] = true;
    }
    return sparse;
  }
  for (int64_t i = step - 1; i < layers; i += step) sparse[i] = true;
  return sparse;
}

void ReadLongCat(ConfigKeys& keys, HfConfig& config) {
  config.moe.router.num_zero_experts = keys.Integer32("zero_expert_num", 256, {0, kExperts.most});
}

constexpr TensorRule kGptOssTensors[] = {
    Router("router.weight"),
    {"router.bias", ParameterKind::kRouterBias},
    {"experts.gate_up_proj", ParameterKind::kExpertGateUp, ExpertAxis::kStacked,
     TensorRows::kInterleaved, /*transposed=*/true},
    {"experts.gate_up_proj_bias", ParameterKind::kExpertGateUpBias, ExpertAxis::kStacked,
     TensorRows::kInterleaved},
    {"experts.down_proj", ParameterKind::kExpertDown, ExpertAxis::kStacked, TensorRows::kAll,
     /*transposed=*/true},
    {"experts.down_proj_bias", ParameterKind::kExpertDownBias, ExpertAxis::kStacked},
};
constexpr TensorRule kLlama4Tensors[] = {
    Router("router.weight"),
    {"experts.gate_up_proj", ParameterKind::kExpertGateUp, ExpertAxis::kStacked, TensorRows::kAll,
     /*transposed=*/true},
    {"experts.down_proj", ParameterKind::kExpertDown, ExpertAxis::kStacked, TensorRows::kAll,
     /*transposed=*/true},
    SharedGate("shared_expert.gate_proj.weight"),
    SharedUp("shared_expert.up_proj.weight"),
    SharedDown("shared_expert.down_proj.weight"),
};
constexpr TensorRule kLongCatTensors[] = {Router("router.classifier.weight"),
                                          ExpertBias("router.e_score_correction_bias"), kGateProj,
                                          kUpProj, kDownProj};

constexpr Family kFamilies[] = {
    {.model_type = "gpt_oss",
     .gate = "gpt-oss",
     .keys = {.width = "intermediate_size", .experts = {"num_local_experts", "num_experts"}},
     .defaults = {.layers = 36, .hidden = 2880, .width = 2880, .experts = 128, .top_k = 4},
     .reads_activation = false,
     .more = ReadGptOss,
     .tensors = kGptOssTensors},
    // intermediate_size is the experts' width; dense layers have intermediate_size_mlp.
    {.model_type = "llama4_text",
     .nested_in = "llama4",
     .block = "feed_forward",
     .gate = "llama4",
     .keys = {.width = "intermediate_size",
              .experts = "num_local_experts",
              .shared_width = "intermediate_size"},
     .defaults = {.layers = 48,
                  .hidden = 5120,
                  .width = 8192,
                  .experts = 16,
                  .top_k = 1,
                  .shared_width = 8192},
     .sparse = Llama4Layers,
     .tensors = kLlama4Tensors},
    {.model_type = "longcat_flash",
     .gate = "longcat",
     .keys = {.layers = "num_layers",
              .width = {"expert_ffn_hidden_size", "moe_intermediate_size"},
              .experts = {"n_routed_experts", "num_local_experts"},
              .top_k = {"moe_topk", "num_experts_per_tok"},
              .scaling = "routed_scaling_factor"},
     .defaults =
         {.layers = 28, .hidden = 6144, .width = 2048, .experts = 512, .top_k = 12, .scaling = 6.0},
     .more = ReadLongCat,
     .tensors = kLongCatTensors},
};

}  // namespace

constinit const absl::Span<const Family> kOwnFamilies = kFamilies;

}  // namespace moe::hf
