#include "moe/lm/run_settings.h"

#include <bit>
#include <type_traits>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_replace.h>
#include <absl/strings/strip.h>

#include <nlohmann/json.hpp>

#include "kernels/base/dtype.h"
#include "kernels/base/xxh3.h"

namespace moe::lm {
namespace {

using Json = nlohmann::ordered_json;

// Grows when steps get other bits (docs/architecture.md, numerics contract).
constexpr int kNumericsVersion = 2;

struct Settings {
  std::vector<RunSetting> all;
  SettingKind kind = SettingKind::kLayout;  // of those that are added

  template <typename V>
  void Add(const char* name, const V& value) {
    RunSetting setting = {.kind = kind, .name = name, .value = 0, .text = {}, .before = {}};
    if constexpr (std::is_floating_point_v<V>) {
      setting.value = std::bit_cast<int64_t>(static_cast<double>(value));
      setting.text = absl::StrFormat("%a", static_cast<double>(value));
    } else if constexpr (std::is_same_v<V, std::string>) {
      setting.value = std::bit_cast<int64_t>(Xxh3(value.data(), value.size()));
      setting.text = value;
    } else {
      setting.value = static_cast<int64_t>(value);
      setting.text = absl::StrCat(setting.value);
    }
    all.push_back(std::move(setting));
  }
  // A setting that younger programs have: what `before` was in older ones.
  template <typename V>
  void Add(const char* name, const V& value, const V& before) {
    Add(name, before);
    const std::string text = std::move(all.back().text);
    all.pop_back();
    Add(name, value);
    all.back().before = text;
  }
};

// What presets others, as --router does, comes before them: it is the one to be named.
void AddModel(const TransformerConfig& model, Settings& settings) {
  settings.kind = SettingKind::kModel;
  const MoeLayerConfig& moe = model.moe;
  settings.Add("--router", moe.router.gate);
  settings.Add("--vocab-size", model.vocab_size);
  settings.Add("--hidden-size", model.hidden_size);
  settings.Add("--num-layers", model.num_layers);
  settings.Add("--num-attention-heads", model.num_attention_heads);
  const int heads = model.num_attention_heads;
  settings.Add("--num-query-groups", model.key_value_heads(), heads);
  settings.Add("--kv-channels", model.head_dim(), model.hidden_size / heads);
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
  settings.kind = SettingKind::kLayout;
  settings.Add("--dispatch", moe.dispatcher.algorithm);
  settings.Add("--node-size", moe.dispatcher.node_size);
  settings.Add("--moe-overlap-degree", moe.overlap_degree);
}

void AddRouter(const RouterConfig& router, Settings& settings) {
  settings.kind = SettingKind::kTrainer;
  settings.Add("--num-zero-experts", router.num_zero_experts);
  settings.Add("--moe-router-topk", router.top_k);
  settings.Add("--moe-router-score-function", router.score_function);
  settings.Add("--moe-router-pre-softmax", router.pre_softmax);
  settings.Add("--moe-router-num-groups", router.num_groups);
  settings.Add("--moe-router-group-topk", router.group_top_k);
  settings.Add("--moe-router-topk-scaling-factor", router.scaling_factor);
  settings.Add("norm_topk_prob",
               router.norm_topk_prob.has_value() ? static_cast<int>(*router.norm_topk_prob) : -1);
  settings.Add("norm_epsilon", router.norm_epsilon.value_or(-1.0f));
  settings.Add("--moe-router-enable-expert-bias", router.expert_bias);
  settings.Add("--moe-router-bias-update-rate", router.bias_update_rate);
  settings.Add("--moe-input-jitter-eps", router.input_jitter);
  settings.Add("--moe-router-random-second", router.random_second_expert);
  settings.Add("--moe-router-jitter-eps", router.router_jitter);
  settings.Add("--moe-expert-capacity-factor", router.capacity_factor.value_or(-1.0));
  settings.Add("--moe-token-drop-policy", router.drop_policy);
  settings.Add("--moe-pad-expert-input-to-capacity", router.pad_to_capacity);
  settings.Add("--moe-token-group", router.token_group.tokens);
  settings.Add("--moe-router-load-balancing-type", router.load_balancing);
  settings.Add("--moe-aux-loss-coeff", router.aux_loss_coeff);
  settings.Add("--moe-z-loss-coeff", router.z_loss_coeff);
}

void AddOptimizer(const TrainConfig& config, Settings& settings) {
  settings.kind = SettingKind::kOptimizer;
  settings.Add("--lr", config.schedule.peak);
  settings.Add("--min-lr", config.schedule.minimum);
  settings.Add("--lr-warmup-steps", config.schedule.warmup_steps);
  settings.Add("--lr-decay-steps", config.schedule.total_steps);
  settings.Add("--lr-decay-style", config.schedule.decay);
  settings.Add("--adam-beta1", config.optimizer.beta1);
  settings.Add("--adam-beta2", config.optimizer.beta2);
  settings.Add("--adam-eps", config.optimizer.epsilon);
  settings.Add("--weight-decay", config.optimizer.weight_decay);
  settings.Add("--clip-grad", config.optimizer.clip_grad);
  settings.Add("--loss-scale", config.loss_scale.constant);
  settings.Add("--initial-loss-scale", config.loss_scale.initial);
  settings.Add("--min-loss-scale", config.loss_scale.minimum);
  settings.Add("--loss-scale-window", config.loss_scale.window);
  settings.Add("--hysteresis", config.loss_scale.hysteresis);
}

std::string KeyOf(const char* name) {
  return absl::StrReplaceAll(absl::StripPrefix(name, "--"), {{"-", "_"}, {" ", "_"}});
}

}  // namespace

std::vector<RunSetting> SettingsOf(const TrainConfig& config, const Corpus& corpus) {
  Settings settings;
  settings.Add("--expert-model-parallel-size", config.expert_parallel_size);
  settings.kind = SettingKind::kNumerics;
  settings.Add("version of the numerics", kNumericsVersion);
  settings.Add("--device", config.device);
  settings.Add("--dtype", std::string(NameOf(config.dtype)));
  settings.Add("--numerics", config.numerics);
  settings.Add("--tensor-leaves", config.tensor_leaves);
  settings.Add("--grouped-gemm", config.grouped_gemm);
  settings.Add("--seq-length", config.sequence_length);
  settings.Add("--micro-batch-size", config.micro_batch_size);
  settings.Add("--micro-batches", config.micro_batches);
  settings.kind = SettingKind::kTrainer;
  settings.Add("--seed", config.seed);
  settings.kind = SettingKind::kLayout;
  settings.Add("--steps", config.steps);
  settings.Add("--eval-interval", config.eval_interval);
  settings.Add("--eval-sequences", config.eval_sequences);
  settings.Add("--verify-replicas", config.verify_replicas);
  settings.Add("--all-reduce", config.all_reduce);
  settings.Add("--bucket-size-mb", config.bucket_bytes);
  AddModel(config.model, settings);
  AddRouter(config.model.moe.router, settings);
  AddOptimizer(config, settings);
  settings.kind = SettingKind::kData;
  settings.Add(corpus.mapped.empty() ? "text (--data)" : "tokens (--tokens)", corpus.xxh3);
  return settings.all;
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
    const auto stored = object.find(KeyOf(setting.name));
    const std::string text =
        stored != object.end() && stored->is_string() ? stored->get<std::string>() : setting.before;
    if (text == setting.text) continue;
    differences.push_back(absl::StrCat(setting.name, " is ", setting.text, ", ",
                                       text.empty() ? "not" : text, " in the checkpoint"));
  }
  return differences;
}

}  // namespace moe::lm
