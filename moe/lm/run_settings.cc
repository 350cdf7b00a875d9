#include "moe/lm/run_settings.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_replace.h>
#include <absl/strings/str_split.h>
#include <absl/strings/strip.h>

#include <nlohmann/json.hpp>

#include "comm/agreement.h"
#include "kernels/base/dtype.h"
#include "kernels/base/status_macros.h"
#include "moe/lm/train_config.h"

namespace moe::lm {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kVersion[] = "version of the numerics";
constexpr char kText[] = "text (--data)", kTokens[] = "tokens (--tokens)";

// The last value of each enumeration among the settings; all count up from 0.
constexpr std::tuple kLast(Activation::kGeGluTanh, ScoreFunction::kSigmoid, DropPolicy::kPosition,
                           LoadBalancing::kGlobalAuxLoss, QkNorm::kHeads, DeviceKind::kCuda,
                           Numerics::kLayoutInvariant, GroupedGemmKernel::kMma,
                           DispatchAlgorithm::kHierarchical, AllReduceAlgorithm::kLibrary,
                           ZeroStage::kGradients, LearningRateDecay::kConstant,
                           TrainCheckpoints::Resume::kPath);

template <typename V>
std::string TextOf(const V& value) {
  if constexpr (std::is_floating_point_v<V>) {
    return absl::StrFormat("%a", static_cast<double>(value));
  } else if constexpr (std::is_same_v<V, std::string>) {
    return value;
  } else if constexpr (std::is_same_v<V, std::vector<int32_t>>) {
    return absl::StrJoin(value, ",");
  } else if constexpr (std::is_same_v<V, DType>) {
    return std::string(NameOf(value));
  } else {
    return absl::StrCat(static_cast<int64_t>(value));
  }
}
// What is not said is -1.
template <typename V>
std::string TextOf(const std::optional<V>& value) {
  if (value.has_value()) return TextOf(*value);
  return std::is_floating_point_v<V> ? TextOf(-1.0) : "-1";
}

// The other way; false for a text that says no such value.
template <typename V>
bool Parse(const std::string& text, V& value) {
  if constexpr (std::is_floating_point_v<V>) {
    char* end = nullptr;
    value = static_cast<V>(std::strtod(text.c_str(), &end));
    return end == text.c_str() + text.size() && !text.empty() && std::isfinite(value);
  } else if constexpr (std::is_same_v<V, std::string>) {
    value = text;
    return true;
  } else if constexpr (std::is_same_v<V, std::vector<int32_t>>) {
    value.clear();
    if (text.empty()) return true;
    for (const absl::string_view number : absl::StrSplit(text, ',')) {
      if (!absl::SimpleAtoi(number, &value.emplace_back())) return false;
    }
    return true;
  } else if constexpr (std::is_same_v<V, DType>) {
    for (const DType type : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      value = type;
      if (text == NameOf(type)) return true;
    }
    return false;
  } else {
    int64_t number = 0;
    if (!absl::SimpleAtoi(text, &number)) return false;
    if constexpr (std::is_enum_v<V>) {
      if (number < 0 || number > static_cast<int64_t>(std::get<V>(kLast))) return false;
    }
    value = static_cast<V>(number);
    return static_cast<int64_t>(value) == number;
  }
}
template <typename V>
bool Parse(const std::string& text, std::optional<V>& value) {
  if (text == TextOf(std::optional<V>())) {
    value.reset();
    return true;
  }
  return Parse(text, value.emplace());
}

std::string KeyOf(const char* name) {
  return absl::StrReplaceAll(absl::StripPrefix(name, "--"), {{"-", "_"}, {" ", "_"}});
}

// What a section says of a setting, `before` where it says nothing.
std::string StoredText(const Json& section, const char* name, const std::string& before) {
  const auto member = section.find(KeyOf(name));
  return member != section.end() && member->is_string() ? member->get<std::string>() : before;
}

// Hashes are kept as signed numbers.
std::string Shown(SettingKind kind, const std::string& text) {
  int64_t hash = 0;
  if (kind != SettingKind::kData || !absl::SimpleAtoi(text, &hash)) return text;
  return absl::StrFormat("%016x", static_cast<uint64_t>(hash));
}

// Goes through fields by their names: says what they are, or sets them to what a checkpoint says.
class Settings {
 public:
  Settings() = default;
  explicit Settings(const CheckpointSections& stored)
      : stored_{{SettingKind::kNumerics, Json::parse(stored.numerics, nullptr, false)},
                {SettingKind::kModel, Json::parse(stored.model, nullptr, false)},
                {SettingKind::kTrainer, Json::parse(stored.trainer, nullptr, false)}} {}

  // A setting that younger programs have says what it was `before` them.
  template <typename V>
  void Add(const char* name, V& value, std::optional<std::type_identity_t<V>> before = {});

  std::vector<RunSetting> all;
  SettingKind kind = SettingKind::kLayout;  // of those that are added
  absl::Status status;                      // the first that a checkpoint does not say

 private:
  std::map<SettingKind, Json> stored_;  // empty: none
};

template <typename V>
void Settings::Add(const char* name, V& value, std::optional<std::type_identity_t<V>> before) {
  std::string otherwise = before.has_value() ? TextOf(*before) : "";
  if (stored_.empty()) {
    all.push_back(
        {.kind = kind, .name = name, .text = TextOf(value), .before = std::move(otherwise)});
    return;
  }
  const auto section = stored_.find(kind);
  if (section == stored_.end()) return;
  if (Parse(StoredText(section->second, name, otherwise), value)) return;
  status.Update(absl::DataLossError(absl::StrCat("the checkpoint does not say ", KeyOf(name))));
}

// What presets others, as --router does, comes before them: it is the one to be named.
void AddModel(TransformerConfig& model, Settings& settings) {
  settings.kind = SettingKind::kModel;
  MoeLayerConfig& moe = model.moe;
  settings.Add("--router", moe.router.gate);
  settings.Add("--vocab-size", model.vocab_size);
  settings.Add("--hidden-size", model.hidden_size);
  settings.Add("--num-layers", model.num_layers);
  settings.Add("--num-attention-heads", model.num_attention_heads);
  const int heads = std::max(1, model.num_attention_heads);
  model.num_query_groups = model.key_value_heads();
  settings.Add("--num-query-groups", model.num_query_groups, heads);
  model.kv_channels = model.kv_channels > 0 ? model.kv_channels : model.hidden_size / heads;
  settings.Add("--kv-channels", model.kv_channels, model.hidden_size / heads);
  settings.Add("--add-qkv-bias", model.qkv_bias, false);
  settings.Add("--qk-layernorm", model.qk_norm, QkNorm::kNone);
  settings.Add("--tie-word-embeddings", model.tied_embeddings, false);
  settings.Add("--rotary-base", model.rotary_base);
  settings.Add("--norm-epsilon", model.norm_epsilon);
  settings.Add("init_std", model.init_std);
  settings.Add("--moe-layer-freq", model.moe_layer_freq);
  settings.Add("dense_ffn_hidden_size", model.dense_ffn_hidden_size);
  settings.Add("--num-experts", moe.router.num_experts);
  settings.Add("--moe-ffn-hidden-size", moe.ffn_hidden_size);
  settings.Add("--moe-shared-expert-intermediate-size", moe.shared_expert_ffn_hidden_size);
  settings.Add("--moe-shared-expert-gate", moe.gated_shared_expert);
  settings.Add("--activation", moe.activation.kind);
  settings.Add("activation alpha", moe.activation.alpha);
  settings.Add("activation limit", moe.activation.limit);
  settings.Add("--moe-projection-biases", moe.projection_biases);
  // No pass reads them: a run may resume with others.
  settings.kind = SettingKind::kTrainer;
  settings.Add("--max-position-embeddings", model.max_position_embeddings, 0);
  settings.Add("--bos-token-id", model.bos_token_id, std::optional<int64_t>());
  settings.Add("--eos-token-id", model.eos_token_ids, std::vector<int32_t>());
  settings.kind = SettingKind::kLayout;
  settings.Add("--dispatch", moe.dispatcher.algorithm);
  settings.Add("--node-size", moe.dispatcher.node_size);
  settings.Add("--moe-overlap-degree", moe.overlap_degree);
}

void AddRouter(RouterConfig& router, Settings& settings) {
  settings.kind = SettingKind::kTrainer;
  settings.Add("--num-zero-experts", router.num_zero_experts);
  settings.Add("--moe-router-topk", router.top_k);
  settings.Add("--moe-router-score-function", router.score_function);
  settings.Add("--moe-router-pre-softmax", router.pre_softmax);
  settings.Add("--moe-router-num-groups", router.num_groups);
  settings.Add("--moe-router-group-topk", router.group_top_k);
  settings.Add("--moe-router-topk-scaling-factor", router.scaling_factor);
  settings.Add("norm_topk_prob", router.norm_topk_prob);
  settings.Add("norm_epsilon", router.norm_epsilon);
  settings.Add("--moe-router-enable-expert-bias", router.expert_bias);
  settings.Add("--moe-router-bias-update-rate", router.bias_update_rate);
  settings.Add("--moe-input-jitter-eps", router.input_jitter);
  settings.Add("--moe-router-random-second", router.random_second_expert);
  settings.Add("--moe-router-jitter-eps", router.router_jitter);
  settings.Add("--moe-expert-capacity-factor", router.capacity_factor);
  settings.Add("--moe-token-drop-policy", router.drop_policy);
  settings.Add("--moe-pad-expert-input-to-capacity", router.pad_to_capacity);
  settings.Add("--moe-token-group", router.token_group.tokens);
  settings.Add("--moe-router-load-balancing-type", router.load_balancing);
  settings.Add("--moe-aux-loss-coeff", router.aux_loss_coeff);
  settings.Add("--moe-z-loss-coeff", router.z_loss_coeff);
}

void AddOptimizer(TrainConfig& config, Settings& settings) {
  settings.kind = SettingKind::kOptimizer;
  settings.Add("--lr", config.schedule.peak);
  settings.Add("--min-lr", config.schedule.minimum);
  settings.Add("--lr-warmup-steps", config.schedule.warmup_steps);
  settings.Add("--lr-decay-steps", config.schedule.total_steps);
  settings.Add("--lr-decay-style", config.schedule.decay);
  settings.Add("--adam-beta1", config.trainer.optimizer.beta1);
  settings.Add("--adam-beta2", config.trainer.optimizer.beta2);
  settings.Add("--adam-eps", config.trainer.optimizer.epsilon);
  settings.Add("--weight-decay", config.trainer.optimizer.weight_decay);
  settings.Add("--clip-grad", config.trainer.optimizer.clip_grad);
  settings.Add("--loss-scale", config.loss_scale.constant);
  settings.Add("--initial-loss-scale", config.loss_scale.initial);
  settings.Add("--min-loss-scale", config.loss_scale.minimum);
  settings.Add("--loss-scale-window", config.loss_scale.window);
  settings.Add("--hysteresis", config.loss_scale.hysteresis);
}

// How the folder is spelled is each rank's own: CheckpointFolder finds out whether it is one.
void AddCheckpoints(TrainCheckpoints& checkpoints, Settings& settings) {
  settings.kind = SettingKind::kLayout;
  bool saves = !checkpoints.folder.empty();
  settings.Add("--save", saves);
  settings.Add("--save-interval", checkpoints.interval);
  settings.Add("--checkpoint-keep", checkpoints.keep);
  settings.Add("--checkpoint-keep-every", checkpoints.keep_every);
  settings.Add("--checkpoint-async", checkpoints.asynchronous);
  settings.Add("--checkpoint-failures", checkpoints.max_failures);
  settings.Add("--resume", checkpoints.resume);
  settings.Add("--allow-numerics-change", checkpoints.allow_numerics_change);
}

// All but what a text is.
void AddAll(TrainConfig& config, Settings& settings) {
  settings.kind = SettingKind::kLayout;
  settings.Add("--expert-model-parallel-size", config.trainer.session.mesh.expert);
  settings.kind = SettingKind::kNumerics;
  int version = kNumericsVersion;
  settings.Add(kVersion, version);
  settings.Add("--device", config.trainer.session.device);
  settings.Add("--dtype", config.trainer.dtype);
  settings.Add("--numerics", config.trainer.session.numerics);
  settings.Add("--tensor-leaves", config.trainer.session.tensor_leaves);
  settings.Add("--grid-unit-log2", config.trainer.unit_log2, std::optional<int>());
  settings.Add("--grouped-gemm", config.trainer.session.grouped_gemm);
  settings.Add("--seq-length", config.sequence_length);
  settings.Add("--micro-batch-size", config.micro_batch_size);
  settings.Add("--micro-batches", config.trainer.micro_batches);
  settings.kind = SettingKind::kTrainer;
  settings.Add("--seed", config.trainer.seed);
  settings.kind = SettingKind::kLayout;
  settings.Add("--steps", config.steps);
  settings.Add("--eval-interval", config.evaluation.interval);
  settings.Add("--eval-sequences", config.evaluation.sequences);
  settings.Add("--verify-replicas", config.verify_replicas);
  settings.Add("--all-reduce", config.trainer.all_reduce);
  settings.Add("--zero", config.trainer.zero);
  settings.Add("--bucket-size-mb", config.trainer.bucket_bytes);
  AddCheckpoints(config.checkpoints, settings);
  AddModel(config.model, settings);
  AddRouter(config.model.moe.router, settings);
  AddOptimizer(config, settings);
}

}  // namespace

std::vector<RunSetting> SettingsOf(const TrainConfig& config, const Corpus& corpus) {
  Settings settings;
  TrainConfig said = config;
  AddAll(said, settings);
  settings.kind = SettingKind::kData;
  uint64_t hash = corpus.xxh3;
  settings.Add(corpus.mapped.empty() ? kText : kTokens, hash);
  return settings.all;
}

absl::Status CheckAgreement(const std::vector<RunSetting>& settings, Communicator& world) {
  std::vector<AgreedValue> values;
  for (const RunSetting& setting : settings) {  // words are numbers here, and reals hexadecimal
    values.push_back({.name = setting.name, .text = setting.text, .shown = false});
  }
  return moe::CheckAgreement(values, {}, world);
}

absl::StatusOr<TrainConfig> StoredConfig(const CheckpointSections& sections) {
  Settings settings(sections);
  TrainConfig config;
  AddAll(config, settings);
  MOE_RETURN_IF_ERROR(settings.status);
  const absl::Status batch = CheckBatch(config);
  if (!batch.ok())
    return absl::DataLossError(absl::StrCat("the checkpoint says ", batch.message()));
  return config;
}

bool TrainedOnText(const CheckpointSections& sections) {
  return !StoredText(Json::parse(sections.data, nullptr, false), kText, "").empty();
}

absl::Status CheckSameTokens(const CheckpointSections& sections, const TrainConfig& config,
                             const std::vector<RunSetting>& settings) {
  const bool text = std::any_of(settings.begin(), settings.end(), [](const RunSetting& setting) {
    return absl::string_view(setting.name) == kText;
  });
  const bool was_text = TrainedOnText(sections);
  if (text == was_text || config.model.vocab_size == 256) return absl::OkStatus();
  return absl::InvalidArgumentError(
      was_text ? "--tokens, expected --data: the run was trained on the bytes of a text"
               : "--data, expected --tokens: the run was trained on token ids, which are no bytes");
}

std::string VersionDifference(const CheckpointSections& sections) {
  Settings settings;
  settings.kind = SettingKind::kNumerics;
  int version = kNumericsVersion;
  settings.Add(kVersion, version);
  const auto differences = Differences(settings.all, SettingKind::kNumerics, sections.numerics);
  return differences.empty() ? "" : differences.front();
}

std::string SettingsJson(const std::vector<RunSetting>& settings, SettingKind kind) {
  Json object = Json::object();
  for (const RunSetting& setting : settings) {
    if (setting.kind == kind) object[KeyOf(setting.name)] = setting.text;
  }
  return object.dump();
}

std::vector<std::string> Differences(const std::vector<RunSetting>& settings, SettingKind kind,
                                     const std::string& json) {
  const Json object = Json::parse(json, nullptr, false);
  std::vector<std::string> differences;
  for (const RunSetting& setting : settings) {
    if (setting.kind != kind) continue;
    const std::string text = StoredText(object, setting.name, setting.before);
    if (text == setting.text) continue;
    differences.push_back(absl::StrCat(setting.name, " is ", Shown(kind, setting.text), ", ",
                                       text.empty() ? "not" : Shown(kind, text),
                                       " in the checkpoint"));
  }
  return differences;
}

}  // namespace moe::lm
