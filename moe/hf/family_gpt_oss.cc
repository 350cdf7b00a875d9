// gpt-oss (arXiv:2508.10925), with unpacked weights. transformers ignores hidden_act and
// swiglu_limit: the clamped SwiGLU has its constants in its code.
#include "moe/hf/family.h"

namespace moe::hf {
namespace {

void Read(ConfigKeys& keys, HfConfig& config) {
  MoeLayerConfig& moe = config.moe;
  moe.router.gate = "gpt-oss";
  moe.router.num_experts = keys.Integer32("num_local_experts", 128, kExperts);
  moe.router.top_k = keys.Integer32("num_experts_per_tok", 4, kExperts);
  moe.router.hidden_size = keys.Integer("hidden_size", 2880, kWidths);
  moe.ffn_hidden_size = keys.Integer("intermediate_size", 2880, kWidths);
  moe.activation = Activation::kClampedSwiGlu;
  moe.projection_biases = true;
  config.has_experts.assign(keys.Integer("num_hidden_layers", 36, kLayers), true);
}

constexpr TensorRule kTensors[] = {
    {"router.weight", ParameterKind::kRouterWeight},
    {"router.bias", ParameterKind::kRouterBias},
    {"experts.gate_up_proj", ParameterKind::kExpertGateUp, ExpertAxis::kStacked,
     TensorRows::kInterleaved, /*transposed=*/true},
    {"experts.gate_up_proj_bias", ParameterKind::kExpertGateUpBias, ExpertAxis::kStacked,
     TensorRows::kInterleaved},
    {"experts.down_proj", ParameterKind::kExpertDown, ExpertAxis::kStacked, TensorRows::kAll,
     /*transposed=*/true},
    {"experts.down_proj_bias", ParameterKind::kExpertDownBias, ExpertAxis::kStacked},
};

}  // namespace

constinit const Family kGptOss = {
    .model_type = "gpt_oss", .block = "mlp", .read = Read, .tensors = kTensors};

}  // namespace moe::hf
