// Llama-4's text model: the weight multiplies the expert's input, and a shared expert as wide as a
// routed one runs beside them. intermediate_size is the experts' width; dense layers have
// intermediate_size_mlp.
#include "moe/hf/family.h"

namespace moe::hf {
namespace {

// moe_layers; without it every interleave_moe_layer_step-th layer.
std::vector<bool> SparseLayers(ConfigKeys& keys) {
  std::vector<bool> layers(keys.Integer("num_hidden_layers", 48, kLayers));
  const auto size = static_cast<int64_t>(layers.size());
  const int64_t step = keys.Integer("interleave_moe_layer_step", 1, kLayers);
  if (const auto listed = keys.Integers("moe_layers", {0, kLayers.most}); listed.has_value()) {
    for (const int64_t i : *listed) {
      if (i < size) layers[i] = true;
    }
    return layers;
  }
  for (int64_t i = step - 1; i < size; i += step) layers[i] = true;
  return layers;
}

void Read(ConfigKeys& keys, HfConfig& config) {
  MoeLayerConfig& moe = config.moe;
  moe.router.gate = "llama4";
  moe.router.num_experts = keys.Integer32("num_local_experts", 16, kExperts);
  moe.router.top_k = keys.Integer32("num_experts_per_tok", 1, kExperts);
  moe.router.hidden_size = keys.Integer("hidden_size", 5120, kWidths);
  moe.ffn_hidden_size = keys.Integer("intermediate_size", 8192, kWidths);
  moe.shared_expert_ffn_hidden_size = moe.ffn_hidden_size;
  moe.activation = ReadActivation(keys);
  config.has_experts = SparseLayers(keys);
}

constexpr TensorRule kTensors[] = {
    {"router.weight", ParameterKind::kRouterWeight},
    {"experts.gate_up_proj", ParameterKind::kExpertGateUp, ExpertAxis::kStacked, TensorRows::kAll,
     /*transposed=*/true},
    {"experts.down_proj", ParameterKind::kExpertDown, ExpertAxis::kStacked, TensorRows::kAll,
     /*transposed=*/true},
    {"shared_expert.gate_proj.weight", ParameterKind::kSharedGateUp, ExpertAxis::kNone,
     TensorRows::kGate},
    {"shared_expert.up_proj.weight", ParameterKind::kSharedGateUp, ExpertAxis::kNone,
     TensorRows::kUp},
    {"shared_expert.down_proj.weight", ParameterKind::kSharedDown},
};

}  // namespace

constinit const Family kLlama4 = {.model_type = "llama4_text",
                                  .nested_in = "llama4",
                                  .block = "feed_forward",
                                  .read = Read,
                                  .tensors = kTensors};

}  // namespace moe::hf
