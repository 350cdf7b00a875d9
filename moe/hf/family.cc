#include "moe/hf/family.h"

#include <algorithm>
#include <string>
#include <tuple>

#include <absl/strings/str_cat.h>

namespace moe::hf {
namespace {

// 0 if the model has no such key.
int64_t ReadNumber(ConfigKeys& keys, Key key, int64_t fallback, IntegerRange range) {
  if (key.name == nullptr) return 0;
  return keys.Integer(key, fallback == 0 ? std::nullopt : std::optional(fallback), range);
}

void ReadRouter(const Family& family, ConfigKeys& keys, RouterConfig& router) {
  const auto& [key, absent] = std::tie(family.keys, family.defaults);
  const auto read = [&](Key k, int64_t fallback) {
    return static_cast<int32_t>(ReadNumber(keys, k, fallback, kExperts));
  };
  router.gate = family.gate;
  router.num_experts = read(key.experts, absent.sizes.experts);
  router.top_k = read(key.top_k, absent.sizes.top_k);
  router.num_groups = read(key.groups, absent.groups);
  router.group_top_k = read(key.kept_groups, absent.kept_groups);
  router.hidden_size = ReadNumber(keys, key.hidden, absent.sizes.hidden, kWidths);
  if (key.norm.name != nullptr) router.norm_topk_prob = keys.Bool(key.norm, absent.norm);
  if (key.scaling.name != nullptr) {
    router.scaling_factor = static_cast<float>(keys.Real(key.scaling, absent.scaling));
  }
}

}  // namespace

Activation ReadActivation(ConfigKeys& keys) {
  const std::string name = keys.Text("hidden_act", "silu");
  if (name == "gelu") return Activation::kGeGlu;
  if (name == "gelu_pytorch_tanh" || name == "gelu_new") return Activation::kGeGluTanh;
  if (name != "silu" && name != "swish") {
    keys.Unsupported("hidden_act", absl::StrCat("'", name, "'"), "silu, gelu or gelu_pytorch_tanh");
  }
  return Activation::kSwiGlu;
}

std::vector<bool> EveryLayer(const Family& /*family*/, ConfigKeys& /*keys*/, int64_t layers) {
  return std::vector<bool>(layers, true);
}

std::vector<bool> LayersAfterDense(const Family& family, ConfigKeys& keys, int64_t layers) {
  const int64_t fallback = family.defaults.dense;
  const int64_t dense = family.keys.dense.name == nullptr
                            ? fallback
                            : keys.Integer(family.keys.dense, fallback, {0, kLayers.most});
  std::vector<bool> sparse(layers);
  for (int64_t i = dense; i < layers; ++i) sparse[i] = true;
  return sparse;
}

std::vector<bool> ListedLayers(const Family& family, ConfigKeys& keys, int64_t layers) {
  const auto types = keys.Texts("mlp_layer_types", {"dense", "sparse"});
  if (!types.has_value()) return LayersAfterDense(family, keys, layers);
  std::vector<bool> sparse(layers);
  for (int64_t i = 0; i < std::min(layers, static_cast<int64_t>(types->size())); ++i) {
    sparse[i] = (*types)[i] == "sparse";
  }
  return sparse;
}

// Every decoder_sparse_step-th layer has experts, except those in mlp_only_layers.
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

// Layer `offset` of every `period`; with one expert all layers are dense.
std::vector<bool> JambaLayers(const Family& family, ConfigKeys& keys, int64_t layers) {
  std::vector<bool> sparse(layers);
  const int64_t period = keys.Integer("expert_layer_period", 2, kLayers);
  const int64_t offset = keys.Integer("expert_layer_offset", 1, {0, kLayers.most});
  if (keys.Integer(family.keys.experts, family.defaults.sizes.experts, kExperts) == 1)
    return sparse;
  for (int64_t i = offset; i < layers && offset < period; i += period) sparse[i] = true;
  return sparse;
}

// Every moe_layer_interval-th layer of a range, whose end may be -1 for the last one.
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

void ReadFamily(const Family& family, ConfigKeys& keys, HfConfig& config) {
  const auto& [key, absent] = std::tie(family.keys, family.defaults);
  MoeLayerConfig& moe = config.moe;
  ReadRouter(family, keys, moe.router);
  moe.ffn_hidden_size = ReadNumber(keys, key.width, absent.sizes.width, kWidths);
  moe.shared_expert_ffn_hidden_size =
      ReadNumber(keys, key.shared_width, absent.shared_width, kWidths);
  if (key.shared_experts.name != nullptr) {
    moe.shared_expert_ffn_hidden_size =
        moe.ffn_hidden_size *
        ReadNumber(keys, key.shared_experts, absent.shared_experts, {0, kExperts.most});
  }
  moe.gated_shared_expert = family.gated_shared_expert;
  if (family.reads_activation) moe.activation = ReadActivation(keys);
  const int64_t layers = ReadNumber(keys, key.layers, absent.sizes.layers, kLayers);
  config.has_experts = family.sparse(family, keys, layers);
  if (family.more != nullptr) family.more(keys, config);
}

}  // namespace moe::hf
