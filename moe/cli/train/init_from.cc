#include "moe/cli/train/init_from.h"

#include <charconv>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/base/choices.h"
#include "moe/cli/base/program.h"
#include "moe/cli/train/train_options.h"
#include "moe/hf/model_rule.h"

namespace moe::cli {
namespace {

std::vector<std::pair<const char*, std::string>> TextsOf(const lm::TransformerConfig& model) {
  const MoeLayerConfig& moe = model.moe;
  const auto on = [](bool value) {
    return std::string(value ? "true" : "false");
  };
  const auto real = [](float value) {
    char text[64];
    return std::string(text, std::to_chars(text, text + sizeof(text), value).ptr);
  };
  // Gates that differ in whether they divide by the sum of the weights, which is no setting.
  const std::string& of_family = moe.router.gate;
  const char* const gate = of_family == "mixtral"                     ? "mixtral"
                           : moe.router.norm_topk_prob.value_or(true) ? "qwen3"
                           : of_family == "olmoe"                     ? "olmoe"
                                                                      : "qwen2";
  return {{"vocab-size", absl::StrCat(model.vocab_size)},
          {"hidden-size", absl::StrCat(model.hidden_size)},
          {"num-layers", absl::StrCat(model.num_layers)},
          {"num-attention-heads", absl::StrCat(model.num_attention_heads)},
          {"num-query-groups", absl::StrCat(model.key_value_heads())},
          {"kv-channels", absl::StrCat(model.head_dim())},
          {"add-qkv-bias", on(model.qkv_bias)},
          {"qk-layernorm", NameOf(model.qk_norm, kQkNorms)},
          {"tie-word-embeddings", on(model.tied_embeddings)},
          {"rotary-base", real(model.rotary_base)},
          {"norm-epsilon", real(model.norm_epsilon)},
          {"moe-layer-freq", absl::StrCat(model.moe_layer_freq)},
          {"dense-ffn-hidden-size", absl::StrCat(model.dense_ffn_hidden_size)},
          {"router", gate},
          {"num-experts", absl::StrCat(moe.router.num_experts)},
          {"moe-router-topk", absl::StrCat(moe.router.top_k)},
          {"moe-ffn-hidden-size", absl::StrCat(moe.ffn_hidden_size)},
          {"moe-shared-expert-intermediate-size", absl::StrCat(moe.shared_expert_ffn_hidden_size)},
          {"moe-shared-expert-gate", on(moe.gated_shared_expert)},
          {"activation", NameOf(moe.activation.kind, kActivations)}};
}

bool Same(const Setting& setting, const std::string& given, const std::string& text) {
  float a = 0, b = 0;
  if (setting.kind != Kind::kReal) return given == text;
  return absl::SimpleAtof(given, &a) && absl::SimpleAtof(text, &b) && a == b;
}

}  // namespace

absl::Status ApplyInitFrom(Settings& settings) {
  if (settings.empty("init-from")) return absl::OkStatus();
  const std::string& folder = settings.text("init-from");
  const auto config = hf::ReadModelConfig(folder);
  if (!config.ok()) return InputError("--init-from", config.status());
  for (auto& [name, text] : TextsOf(config->model)) {
    const Setting& setting = *settings.Find(name);
    if (settings.given(name) && !Same(setting, settings.text(name), text)) {
      return WrongValue(settings, name, absl::StrCat(text, ", as --init-from ", folder, " has it"));
    }
    MOE_RETURN_IF_ERROR(settings.Set(setting, {std::move(text)}, Origin::kPreset,
                                     absl::StrCat("--init-from ", folder)));
  }
  return absl::OkStatus();
}

}  // namespace moe::cli
