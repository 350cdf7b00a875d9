// config.json and generation_config.json of a model that is exported.
#include <charconv>
#include <cstdlib>

#include <absl/strings/str_cat.h>

#include <nlohmann/json.hpp>

#include "kernels/activation/activation_kind.h"
#include "moe/hf/family.h"
#include "moe/hf/model_rule.h"

namespace moe::hf {
namespace {

// Whether the weights of the selected experts are divided by their sum.
bool Normalises(const RouterConfig& router) {
  if (router.gate == "topk") return !router.pre_softmax;
  return router.norm_topk_prob.value_or(router.gate == "mixtral" || router.gate == "qwen3");
}

// As transformers writes them: null, a number or a list.
nlohmann::ordered_json TokensOf(const lm::TransformerConfig& config) {
  nlohmann::ordered_json tokens = {{"bos_token_id", nullptr}, {"eos_token_id", nullptr}};
  if (config.bos_token_id.has_value()) tokens["bos_token_id"] = *config.bos_token_id;
  if (config.eos_token_ids.size() == 1) tokens["eos_token_id"] = config.eos_token_ids[0];
  if (config.eos_token_ids.size() > 1) tokens["eos_token_id"] = config.eos_token_ids;
  return tokens;
}

// The shortest decimal number that is this float: 1e-05, not 9.999999747378752e-06.
double Shortest(float value) {
  char text[64];
  *std::to_chars(text, text + sizeof(text) - 1, value).ptr = '\0';
  return std::strtod(text, nullptr);
}

// The word of transformers' `hidden_act`; nullptr where it has none for this gated unit.
const char* HiddenAct(Activation activation) {
  switch (activation) {
    case Activation::kSwiGlu:
      return "silu";
    case Activation::kGeGlu:
      return "gelu";
    case Activation::kGeGluTanh:
      return "gelu_pytorch_tanh";
    default:
      return nullptr;
  }
}

}  // namespace

absl::Status CheckExpressible(const ModelRule& rule, const lm::TransformerConfig& config) {
  const MoeLayerConfig& moe = config.moe;
  const RouterConfig& router = moe.router;
  const std::string& gate = router.gate;
  const bool softmax = gate == "topk" || gate == "mixtral" || gate == "qwen3" ||
                       (rule.chooses_norm && (gate == "qwen2" || gate == "olmoe"));
  const bool bias = rule.chooses_qkv_bias && config.qkv_bias;
  const int64_t shared = moe.shared_expert_ffn_hidden_size;
  const struct {
    bool expressible;
    const char* name;
    std::string value;
    const char* expected;
  } settings[] = {
      {softmax, "--router", gate,
       rule.chooses_norm ? "mixtral, qwen2, qwen3, olmoe or topk" : "mixtral, qwen3 or topk"},
      {rule.dense_layers || config.moe_layer_freq == 1, "--moe-layer-freq",
       absl::StrCat(config.moe_layer_freq), "1"},
      {HiddenAct(moe.activation.kind) != nullptr, "--activation",
       NameOf(moe.activation.kind, kActivationWords), "swiglu, geglu or geglu_tanh"},
      {!moe.projection_biases, "--moe-projection-biases", "1", "0"},
      {rule.shared_expert || shared == 0, "--moe-shared-expert-intermediate-size",
       absl::StrCat(shared), "0"},
      {!rule.shared_expert || shared > 0, "--moe-shared-expert-intermediate-size", "0",
       "the width of a shared expert"},
      {!rule.shared_expert || moe.gated_shared_expert, "--moe-shared-expert-gate", "0", "1"},
      {router.num_zero_experts == 0, "--num-zero-experts", absl::StrCat(router.num_zero_experts),
       "0"},
      {router.score_function == ScoreFunction::kSoftmax, "--moe-router-score-function", "sigmoid",
       "softmax"},
      {rule.chooses_norm || !router.pre_softmax, "--moe-router-pre-softmax", "1", "0"},
      {router.num_groups == 0 || router.num_groups == 1, "--moe-router-num-groups",
       absl::StrCat(router.num_groups), "0"},
      {router.scaling_factor == 1, "--moe-router-topk-scaling-factor",
       absl::StrCat(router.scaling_factor), "1"},
      {!router.expert_bias, "--moe-router-enable-expert-bias", "1", "0"},
      {rule.chooses_norm || Normalises(router), "norm_topk_prob", "0", "1"},
      {router.norm_epsilon.value_or(0) == 0, "the router's norm_epsilon",
       absl::StrCat(router.norm_epsilon.value_or(0)), "0"},
      {config.qk_norm == rule.qk_norm, "--qk-layernorm", NameOf(config.qk_norm, lm::kQkNormWords),
       NameOf(rule.qk_norm, lm::kQkNormWords)},
      {bias || !config.qkv_bias, "--add-qkv-bias", "1", "0"},
      {rule.own_head_dim || config.head_dim() * config.num_attention_heads == config.hidden_size,
       "--kv-channels", absl::StrCat(config.head_dim()), "--hidden-size / --num-attention-heads"},
  };
  for (const auto& [expressible, name, value, expected] : settings) {
    if (expressible) continue;
    return absl::InvalidArgumentError(absl::StrCat(name, " is ", value, ", expected ", expected));
  }
  return absl::OkStatus();
}

std::string ModelConfigJson(const ModelRule& rule, const lm::TransformerConfig& config,
                            int64_t sequence_length, absl::string_view dtype) {
  const MoeLayerConfig& moe = config.moe;
  const FamilyKeys& keys = rule.family().keys;
  nlohmann::ordered_json json = {
      {"architectures", {rule.architecture}},
      {"model_type", rule.model_type},
      {"vocab_size", config.vocab_size},
      {"hidden_size", config.hidden_size},
      {keys.width.name, moe.ffn_hidden_size},
      {keys.layers.name, config.num_layers},
      {"num_attention_heads", config.num_attention_heads},
      {"num_key_value_heads", config.key_value_heads()},
      {rule.experts_key, moe.router.num_experts},
      {keys.top_k.name, moe.router.top_k},
      {"max_position_embeddings", std::max(config.max_position_embeddings, sequence_length)},
      {"rope_theta", Shortest(config.rotary_base)},
      {"rms_norm_eps", Shortest(config.norm_epsilon)},
      {"initializer_range", config.init_std},
      {"hidden_act", HiddenAct(moe.activation.kind)},
      {"attention_dropout", 0.0},
      {"tie_word_embeddings", config.tied_embeddings},
      {"dtype", dtype}};
  json.update(TokensOf(config));
  if (rule.own_head_dim) json["head_dim"] = config.head_dim();
  if (rule.chooses_norm) json["norm_topk_prob"] = Normalises(moe.router);
  if (rule.chooses_qkv_bias) json["qkv_bias"] = config.qkv_bias;
  if (rule.shared_expert) json[keys.shared_width.name] = moe.shared_expert_ffn_hidden_size;
  if (rule.bias_key != nullptr) json[rule.bias_key] = false;
  if (rule.dense_layers) {
    json["intermediate_size"] = config.dense_width();
    json["decoder_sparse_step"] = config.moe_layer_freq;
    json["mlp_only_layers"] = nlohmann::ordered_json::array();
  }
  json["sliding_window"] = nullptr;
  if (rule.qk_norm == lm::QkNorm::kHeads) json["clip_qkv"] = nullptr;
  return json.dump(2) + "\n";
}

std::string GenerationConfigJson(const lm::TransformerConfig& config) {
  nlohmann::ordered_json json = {{"_from_model_config", true}};
  json.update(TokensOf(config));
  return json.dump(2) + "\n";
}

}  // namespace moe::hf
