#include "moe/hf/model_rule.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_replace.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "moe/hf/family.h"
#include "moe/io/bounded_json.h"
#include "moe/io/file.h"

namespace moe::hf {
namespace {

constexpr ModelRule kRules[] = {
    {.model_type = "mixtral",
     .architecture = "MixtralForCausalLM",
     .experts_key = "num_local_experts",
     .own_head_dim = true,
     .window_key = "sliding_window",
     .rope_theta = 1e6,
     .rms_norm_eps = 1e-5,
     .max_position_embeddings = 131072,
     .bos_token_id = 1,
     .eos_token_id = 2,
     .router_jitter = true},
    {.model_type = "olmoe",
     .architecture = "OlmoeForCausalLM",
     .assumes_kv_heads = true,
     .chooses_norm = true,
     .qk_norm = lm::QkNorm::kHeads,
     .bias_key = "attention_bias",
     .rms_norm_eps = 1e-5,
     .max_position_embeddings = 4096,
     .eos_token_id = 50279,
     .router_aux_loss_coef = 0.01},
    {.model_type = "qwen2_moe",
     .architecture = "Qwen2MoeForCausalLM",
     .dense_layers = true,
     .shared_expert = true,
     .chooses_norm = true,
     .chooses_qkv_bias = true,
     .window_key = "use_sliding_window"},
    {.model_type = "qwen3_moe",
     .architecture = "Qwen3MoeForCausalLM",
     .own_head_dim = true,
     .dense_layers = true,
     .chooses_norm = true,
     .qk_norm = lm::QkNorm::kHead,
     .window_key = "use_sliding_window",
     .bias_key = "attention_bias"},
};

// Models without experts.
constexpr ModelRule kDenseRules[] = {
    {.model_type = "llama",
     .architecture = "LlamaForCausalLM",
     .assumes_kv_heads = true,
     .bias_key = "attention_bias",
     .max_position_embeddings = 2048,
     .bos_token_id = 1,
     .eos_token_id = 2},
    {.model_type = "mistral",
     .architecture = "MistralForCausalLM",
     .window_key = "sliding_window",
     .max_position_embeddings = 131072,
     .bos_token_id = 1,
     .eos_token_id = 2},
    {.model_type = "qwen2",
     .architecture = "Qwen2ForCausalLM",
     .chooses_qkv_bias = true,
     .window_key = "use_sliding_window"},
    {.model_type = "qwen3",
     .architecture = "Qwen3ForCausalLM",
     .qk_norm = lm::QkNorm::kHead,
     .window_key = "use_sliding_window",
     .bias_key = "attention_bias"},
};

constexpr IntegerRange kVocabularies = {1, int64_t{1} << 30};
constexpr IntegerRange kPositions = {1, int64_t{1} << 40};

// Collects the tensors of a model.
class TensorList {
 public:
  TensorList(const lm::TransformerConfig& config, const ModelLayout& layout)
      : config_(config), layout_(layout), moe_(config.moe) {
    moe_.router.hidden_size = config.hidden_size;
  }

  std::vector<ModelTensor> All() {
    const std::vector<int64_t> embedding = {config_.vocab_size, config_.hidden_size};
    Add("embed_tokens.weight", embedding);
    for (int64_t l = 0; l < config_.num_layers; ++l) {
      prefix_ = absl::StrCat("layers.", l, ".");
      AddAttention();
      Add("post_attention_layernorm.weight", {config_.hidden_size});
      if (!config_.has_experts(l)) {
        AddDense();
      } else if (layout_.upcycled) {
        AddCopies();
      } else {
        AddExperts(layout_.layers[l]);
      }
    }
    prefix_.clear();
    Add("norm.weight", {config_.hidden_size});
    if (!config_.tied_embeddings) {
      const std::string output = "lm_head.weight";
      tensors_.push_back({.name = output, .shape = embedding, .canonical = output});
    }
    return std::move(tensors_);
  }

 private:
  std::string InFile(absl::string_view name) const {
    return absl::StrCat(layout_.root, prefix_, name);
  }
  std::string Canonical(absl::string_view name) const {
    return absl::StrCat("model.", prefix_, name);
  }

  void Add(absl::string_view name, std::vector<int64_t> shape) {
    tensors_.push_back(
        {.name = InFile(name), .shape = std::move(shape), .canonical = Canonical(name)});
  }

  void AddAttention() {
    const int64_t hidden = config_.hidden_size, width = config_.head_dim();
    const int64_t q = config_.q_cols(), kv = config_.kv_cols();
    Add("input_layernorm.weight", {hidden});
    for (const auto& [name, rows] : {std::pair("q", q), std::pair("k", kv), std::pair("v", kv)}) {
      Add(absl::StrCat("self_attn.", name, "_proj.weight"), {rows, hidden});
      if (config_.qkv_bias) Add(absl::StrCat("self_attn.", name, "_proj.bias"), {rows});
    }
    if (config_.qk_norm != lm::QkNorm::kNone) {
      const bool per_head = config_.qk_norm == lm::QkNorm::kHead;
      Add("self_attn.q_norm.weight", {per_head ? width : q});
      Add("self_attn.k_norm.weight", {per_head ? width : kv});
    }
    Add("self_attn.o_proj.weight", {hidden, q});
  }

  void AddDense() {
    const int64_t hidden = config_.hidden_size, width = config_.dense_width();
    Add("mlp.gate_proj.weight", {width, hidden});
    Add("mlp.up_proj.weight", {width, hidden});
    Add("mlp.down_proj.weight", {hidden, width});
  }

  void AddCopies() {
    const int64_t hidden = config_.hidden_size, width = moe_.ffn_hidden_size;
    for (int32_t e = 0; e < moe_.router.num_experts; ++e) {
      for (const char* const name : {"gate_proj", "up_proj", "down_proj"}) {
        const bool down = name == absl::string_view("down_proj");
        tensors_.push_back(
            {.name = InFile(absl::StrCat("mlp.", name, ".weight")),
             .shape = down ? std::vector{hidden, width} : std::vector{width, hidden},
             .canonical = Canonical(absl::StrCat("mlp.experts.", e, ".", name, ".weight"))});
      }
    }
  }

  void AddExperts(const TensorLayout& layout) {
    for (const TensorRule& rule : layout.tensors) {
      if (!IsPresent(rule, moe_)) continue;
      if (rule.experts == ExpertAxis::kStacked) {
        AddStacked(layout.block, rule);
        continue;
      }
      for (int32_t e = 0; e < TensorCount(rule, moe_); ++e) {
        tensors_.push_back({.name = InFile(absl::StrCat(layout.block, ".", TensorName(rule, e))),
                            .shape = TensorShape(rule, moe_),
                            .canonical = Canonical(absl::StrCat("mlp.", CanonicalName(rule, e)))});
      }
    }
  }

  // One part for each canonical tensor: of gate and up, one after the other, two for each expert.
  void AddStacked(absl::string_view block, const TensorRule& rule) {
    MOE_CHECK(!rule.transposed && rule.rows == TensorRows::kAll);
    TensorRule one = rule;
    one.experts = ExpertAxis::kNumbered;
    std::vector<TensorRule> parts = {one};
    if (rule.parameter == ParameterKind::kExpertGateUp) {
      parts = {one, one};
      parts[0].rows = TensorRows::kGate;
      parts[1].rows = TensorRows::kUp;
    }
    int64_t first = 0;
    for (int32_t e = 0; e < moe_.router.num_experts; ++e) {
      for (const TensorRule& part : parts) {
        const std::vector<int64_t> shape = TensorShape(part, moe_);
        tensors_.push_back({.name = InFile(absl::StrCat(block, ".", rule.name)),
                            .shape = TensorShape(rule, moe_),
                            .canonical = Canonical(absl::StrCat("mlp.", CanonicalName(part, e))),
                            .first = first,
                            .part_shape = shape});
        first += shape[0] * shape[1];
      }
    }
  }

  const lm::TransformerConfig& config_;
  const ModelLayout& layout_;
  MoeLayerConfig moe_;
  std::string prefix_;
  std::vector<ModelTensor> tensors_;
};

// Angles must follow from one base alone. transformers 5 has an object for it, where 4 has two
// keys; it reads 4's object if both are set.
void ReadPositions(const ModelRule& rule, ConfigKeys& keys, lm::TransformerConfig& model) {
  constexpr char kExpected[] = "null: unscaled rotary positions of all of a head";
  double base = keys.Real("rope_theta", rule.rope_theta);
  for (const char* const key : {"rope_scaling", "rope_parameters"}) {
    if (keys.IsNull(key)) continue;
    ConfigKeys rope = keys.Object(key);
    if (rope.empty()) continue;
    const std::string type = rope.Text(rope.IsNull("rope_type") ? "type" : "rope_type", "default");
    if (type != "default") keys.Unsupported(key, absl::StrCat("of the type ", type), kExpected);
    if (rope.Real("partial_rotary_factor", 1) != 1) {
      keys.Unsupported(key, "of a part of each head", kExpected);
    }
    base = rope.Real("rope_theta", base);
    keys.Take(rope);
    break;
  }
  model.rotary_base = static_cast<float>(base);
}

void ReadAttention(const ModelRule& rule, ConfigKeys& keys, lm::TransformerConfig& model) {
  constexpr IntegerRange kHeads = {1, int64_t{1} << 16};
  model.num_attention_heads = keys.Integer32("num_attention_heads", std::nullopt, kHeads);
  model.num_query_groups = model.num_attention_heads;
  if (!rule.assumes_kv_heads || !keys.IsNull("num_key_value_heads")) {
    model.num_query_groups = keys.Integer32("num_key_value_heads", std::nullopt, kHeads);
  }
  if (!keys.IsNull("head_dim")) model.kv_channels = keys.Integer("head_dim", 0, kWidths);
  if (rule.chooses_qkv_bias) model.qkv_bias = keys.Bool("qkv_bias", true);
  model.qk_norm = rule.qk_norm;
  if (rule.window_key != nullptr) keys.RefuseIfSet(rule.window_key, "attention to all before it");
  if (rule.bias_key != nullptr) keys.RefuseIfSet(rule.bias_key, "false");
  keys.RefuseIfSet("clip_qkv", "null: q, k and v as they are");
  ReadPositions(rule, keys, model);
}

// Reads values that no forward or backward pass uses.
void ReadUse(const ModelRule& rule, ConfigKeys& keys, lm::TransformerConfig& model) {
  const auto id = [](const auto& of_rule) {
    return of_rule ? std::vector<int32_t>{static_cast<int32_t>(*of_rule)} : std::vector<int32_t>();
  };
  model.max_position_embeddings =
      keys.Integer("max_position_embeddings", rule.max_position_embeddings, kPositions);
  const std::vector<int32_t> bos = keys.OneOrMore("bos_token_id", id(rule.bos_token_id));
  if (bos.size() > 1) keys.Unsupported("bos_token_id", "a list", "null or one number");
  if (!bos.empty()) model.bos_token_id = bos[0];
  model.eos_token_ids = keys.OneOrMore("eos_token_id", id(rule.eos_token_id));
}

// What models with experts and dense ones have in common.
void ReadModel(const ModelRule& rule, ConfigKeys& keys, lm::TransformerConfig& model) {
  model.vocab_size = keys.Integer("vocab_size", std::nullopt, kVocabularies);
  model.norm_epsilon = static_cast<float>(keys.Real("rms_norm_eps", rule.rms_norm_eps));
  model.init_std = keys.Real("initializer_range", 0.02);
  model.tied_embeddings = keys.Bool("tie_word_embeddings", false);
  ReadAttention(rule, keys, model);
  ReadUse(rule, keys, model);
}

ModelTraining ReadTraining(const ModelRule& rule, ConfigKeys& keys, int32_t top_k) {
  ModelTraining training;
  const double coefficient = keys.Real("router_aux_loss_coef", rule.router_aux_loss_coef);
  // At the same coefficient transformers' loss is k times as large.
  if (keys.Bool("output_router_logits", false)) training.aux_loss_coeff = coefficient * top_k;
  training.attention_dropout = keys.Real("attention_dropout", 0);
  if (rule.router_jitter) training.router_jitter_noise = keys.Real("router_jitter_noise", 0);
  return training;
}

// Every N-th layer has experts: the last of each N.
void ReadLayers(const ModelRule& rule, const std::vector<bool>& has_experts, ConfigKeys& keys,
                lm::TransformerConfig& model) {
  const auto layers = static_cast<int64_t>(has_experts.size());
  model.num_layers = static_cast<int>(layers);
  const auto first = std::find(has_experts.begin(), has_experts.end(), true);
  const int64_t every = first - has_experts.begin() + 1;
  bool regular = every <= layers;
  for (int64_t l = 0; l < layers; ++l) {
    regular = regular && has_experts[l] == (l % every == every - 1);
  }
  if (!regular) {
    const auto dense = keys.Integers("mlp_only_layers", {0, kLayers.most});
    const bool listed = !dense.value_or(std::vector<int64_t>()).empty();
    keys.Unsupported(listed ? "mlp_only_layers" : "decoder_sparse_step",
                     "a choice of layers without experts", "every N-th layer with experts");
    return;
  }
  model.moe_layer_freq = static_cast<int>(every);
  if (rule.dense_layers) {
    const auto fallback = every > 1 ? std::nullopt : std::optional<int64_t>(0);
    model.dense_ffn_hidden_size = keys.Integer("intermediate_size", fallback, kWidths);
  }
}

std::vector<std::string> Unread(const ConfigKeys& keys) {
  static constexpr absl::string_view kOfFiles[] = {
      "_name_or_path", "architectures", "auto_map",  "dtype",
      "model_type",    "torch_dtype",   "use_cache", "transformers_version"};
  std::vector<std::string> names = keys.Unread();
  std::erase_if(names, [](const std::string& name) {
    return std::find(std::begin(kOfFiles), std::end(kOfFiles), name) != std::end(kOfFiles);
  });
  return names;
}

// Errors of the model name its own fields; readers of the file see keys.
absl::Status CheckModel(absl::string_view file, const lm::TransformerConfig& model) {
  constexpr int64_t kMostTensors = 1'000'000;
  if (LeastTensors(model) > kMostTensors) {
    return absl::DataLossError(absl::StrCat(file, ": num_hidden_layers is ", model.num_layers,
                                            " of ", model.moe.router.num_experts,
                                            " experts, expected at most 10^6 tensors in all"));
  }
  const absl::Status status = lm::ValidateTransformerConfig(model);
  if (status.ok()) return status;
  const std::string message =
      absl::StrReplaceAll(status.message(), {{"Transformer: ", ""},
                                             {"num_query_groups", "num_key_value_heads"},
                                             {"kv_channels", "head_dim"},
                                             {"rotary_base", "rope_theta"},
                                             {"norm_epsilon", "rms_norm_eps"},
                                             {"init_std", "initializer_range"}});
  return absl::DataLossError(absl::StrCat(file, ": ", message));
}

}  // namespace

const Family& ModelRule::family() const {
  const auto families = Families();
  return *std::find_if(families.begin(), families.end(),
                       [&](const Family& one) { return one.model_type == model_type; });
}

std::vector<std::string> ModelTypes() {
  std::vector<std::string> types;
  for (const ModelRule& rule : kRules) types.emplace_back(rule.model_type);
  return types;
}

std::vector<std::string> DenseModelTypes() {
  std::vector<std::string> types;
  for (const ModelRule& rule : kDenseRules) types.emplace_back(rule.model_type);
  return types;
}

const ModelRule* FindModelRule(absl::string_view model_type) {
  for (const ModelRule& rule : kRules) {
    if (rule.model_type == model_type) return &rule;
  }
  return nullptr;
}

int64_t LeastTensors(const lm::TransformerConfig& config) {
  const int64_t sparse = config.num_layers / std::max(config.moe_layer_freq, 1);
  return config.num_layers + sparse * config.moe.router.num_experts * 3;
}

std::vector<ModelTensor> TensorsOf(const ModelRule& rule, const lm::TransformerConfig& config) {
  const std::vector<TensorLayout> published(config.num_layers, LayoutsOf(rule.family()).front());
  return TensorsOf(config, {.layers = published});
}

std::vector<ModelTensor> TensorsOf(const lm::TransformerConfig& config, const ModelLayout& layout) {
  return TensorList(config, layout).All();
}

absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view file, absl::string_view document) {
  ModelConfig config;
  const auto read = [&](const HfConfig& layer, ConfigKeys& keys) {
    config.rule = FindModelRule(layer.model_type());
    if (config.rule == nullptr) {
      keys.Unsupported("model_type", layer.model_type(), absl::StrJoin(ModelTypes(), ", "));
      return;
    }
    config.layer = layer;
    lm::TransformerConfig& model = config.model;
    model.moe = layer.moe;
    model.hidden_size = layer.moe.router.hidden_size;
    ReadModel(*config.rule, keys, model);
    ReadLayers(*config.rule, layer.has_experts, keys, model);
    config.training = ReadTraining(*config.rule, keys, model.moe.router.top_k);
    config.unread = Unread(keys);
  };
  MOE_RETURN_IF_ERROR(ParseHfConfig(file, document, read).status());
  MOE_RETURN_IF_ERROR(CheckModel(file, config.model));
  return config;
}

absl::StatusOr<ModelConfig> ParseDenseConfig(absl::string_view file, absl::string_view document,
                                             const Upcycling& upcycling) {
  MOE_ASSIGN_OR_RETURN(const auto json,
                       ParseBoundedJson(file, document, {.non_finite_as_text = true}));
  if (!json.is_object()) {
    return absl::DataLossError(absl::StrCat(file, ": the document is no object, expected {...}"));
  }
  ConfigKeys keys(std::string(file), "", json);
  const std::string type = keys.Text("model_type", "");
  const auto* const rule =
      std::find_if(std::begin(kDenseRules), std::end(kDenseRules),
                   [&](const ModelRule& one) { return one.model_type == type; });
  if (rule == std::end(kDenseRules)) {
    keys.Unsupported(
        "model_type", absl::StrCat("'", Shown(type), "'"),
        absl::StrCat("a dense model to be upcycled: ", absl::StrJoin(DenseModelTypes(), ", ")));
    return keys.status();
  }
  keys.RefuseIfSet("quantization_config", "none: weights as F32, F16, BF16 or F64");
  keys.RefuseIfSet("mlp_bias", "false");
  ModelConfig config = {.rule = rule, .layer = {}, .model = {}, .training = {}};
  lm::TransformerConfig& model = config.model;
  RouterConfig& router = model.moe.router;
  router.num_experts = upcycling.experts;
  router.top_k = std::min(router.top_k, upcycling.experts);
  router.load_balancing = LoadBalancing::kNone;
  model.hidden_size = router.hidden_size = keys.Integer("hidden_size", std::nullopt, kWidths);
  model.num_layers = keys.Integer32("num_hidden_layers", std::nullopt, kLayers);
  model.moe_layer_freq = upcycling.moe_layer_freq;
  model.dense_ffn_hidden_size = model.moe.ffn_hidden_size =
      keys.Integer("intermediate_size", std::nullopt, kWidths);
  model.moe.activation = ReadActivation(keys);
  ReadModel(*rule, keys, model);
  config.training.attention_dropout = keys.Real("attention_dropout", 0);
  MOE_RETURN_IF_ERROR(keys.status());
  MOE_RETURN_IF_ERROR(CheckModel(file, model));
  return config;
}

absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& folder, const Upcycling& upcycling) {
  const std::string path = absl::StrCat(folder, "/config.json");
  MOE_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
  return upcycling.experts > 0 ? ParseDenseConfig(path, file.text(), upcycling)
                               : ParseModelConfig(path, file.text());
}

absl::StatusOr<std::vector<int32_t>> ReadEndTokens(const std::string& folder) {
  std::string path = absl::StrCat(folder, "/generation_config.json");
  auto file = MappedFile::Open(path);
  if (absl::IsNotFound(file.status())) {
    path = absl::StrCat(folder, "/config.json");
    file = MappedFile::Open(path);
  }
  MOE_RETURN_IF_ERROR(file.status());
  MOE_ASSIGN_OR_RETURN(const auto json,
                       ParseBoundedJson(path, file->text(), {.non_finite_as_text = true}));
  if (!json.is_object()) {
    return absl::DataLossError(absl::StrCat(path, ": the document is no object, expected {...}"));
  }
  ConfigKeys keys(path, "", json);
  std::vector<int32_t> ends = keys.OneOrMore("eos_token_id", {});
  MOE_RETURN_IF_ERROR(keys.status());
  return ends;
}

}  // namespace moe::hf
