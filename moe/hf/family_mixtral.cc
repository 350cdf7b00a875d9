// Mixtral (arXiv:2401.04088): weights always divided by their sum. router_jitter_noise is for
// training only.
#include "moe/hf/family.h"

namespace moe::hf {
namespace {

void Read(ConfigKeys& keys, HfConfig& config) {
  MoeLayerConfig& moe = config.moe;
  moe.router.gate = "mixtral";
  moe.router.num_experts = keys.Integer32("num_local_experts", 8, kExperts);
  moe.router.top_k = keys.Integer32("num_experts_per_tok", 2, kExperts);
  moe.router.hidden_size = keys.Integer("hidden_size", 4096, kWidths);
  moe.ffn_hidden_size = keys.Integer("intermediate_size", 14336, kWidths);
  moe.activation = ReadActivation(keys);
  config.has_experts.assign(keys.Integer("num_hidden_layers", 32, kLayers), true);
}

constexpr TensorRule kTensors[] = {
    {"gate.weight", ParameterKind::kRouterWeight},
    {"experts.{e}.w1.weight", ParameterKind::kExpertGateUp, ExpertAxis::kNumbered,
     TensorRows::kGate},
    {"experts.{e}.w3.weight", ParameterKind::kExpertGateUp, ExpertAxis::kNumbered, TensorRows::kUp},
    {"experts.{e}.w2.weight", ParameterKind::kExpertDown, ExpertAxis::kNumbered},
};

}  // namespace

constinit const Family kMixtral = {
    .model_type = "mixtral", .block = "block_sparse_moe", .read = Read, .tensors = kTensors};

}  // namespace moe::hf
