#include "moe/hf/family.h"

#include <algorithm>
#include <string>
#include <tuple>

#include <absl/strings/str_cat.h>

namespace moe::hf {
namespace {

Activation ReadActivation(ConfigKeys& keys) {
  const std::string name = keys.Text("hidden_act", "silu");
  if (name == "gelu") return Activation::kGeGlu;
  if (name != "silu" && name != "swish") {
    keys.Unsupported("hidden_act", absl::StrCat("'", name, "'"), "silu or gelu");
  }
  return Activation::kSwiGlu;
}

// 0 where the model has no such key.
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
  router.num_experts = read(key.experts, absent.experts);
  router.top_k = read(key.top_k, absent.top_k);
  router.num_groups = read(key.groups, absent.groups);
  router.group_top_k = read(key.kept_groups, absent.kept_groups);
  router.hidden_size = ReadNumber(keys, key.hidden, absent.hidden, kWidths);
  if (key.norm.name != nullptr) router.norm_topk_prob = keys.Bool(key.norm, absent.norm);
  if (key.scaling.name != nullptr) {
    router.scaling_factor = static_cast<float>(keys.Real(key.scaling, absent.scaling));
  }
}

}  // namespace

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

void ReadFamily(const Family& family, ConfigKeys& keys, HfConfig& config) {
  const auto& [key, absent] = std::tie(family.keys, family.defaults);
  MoeLayerConfig& moe = config.moe;
  ReadRouter(family, keys, moe.router);
  moe.ffn_hidden_size = ReadNumber(keys, key.width, absent.width, kWidths);
  moe.shared_expert_ffn_hidden_size =
      ReadNumber(keys, key.shared_width, absent.shared_width, kWidths);
  if (key.shared_experts.name != nullptr) {
    moe.shared_expert_ffn_hidden_size =
        moe.ffn_hidden_size *
        ReadNumber(keys, key.shared_experts, absent.shared_experts, {0, kExperts.most});
  }
  moe.gated_shared_expert = family.gated_shared_expert;
  if (family.reads_activation) moe.activation = ReadActivation(keys);
  const int64_t layers = ReadNumber(keys, key.layers, absent.layers, kLayers);
  config.has_experts = family.sparse(family, keys, layers);
  if (family.more != nullptr) family.more(keys, config);
}

std::vector<const Family*> Families() {
  std::vector<const Family*> all;
  for (const auto& table : {kSoftmaxFamilies, kSigmoidFamilies, kOwnFamilies}) {
    for (const Family& family : table) all.push_back(&family);
  }
  return all;
}

}  // namespace moe::hf
