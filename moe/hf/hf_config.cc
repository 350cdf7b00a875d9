#include "moe/hf/hf_config.h"

#include <algorithm>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_replace.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "moe/hf/config_keys.h"
#include "moe/hf/family.h"
#include "moe/hf/model_rule.h"
#include "moe/io/bounded_json.h"
#include "moe/io/file.h"

namespace moe::hf {
namespace {

using Json = nlohmann::json;

// Published files have some kilobytes.
constexpr JsonLimits kLimits = {.max_bytes = int64_t{4} << 20,
                                .max_values = int64_t{1} << 16,
                                .max_depth = 16,
                                .max_token_bytes = int64_t{256} << 10,
                                .non_finite_as_text = true};

absl::Status Expected(absl::string_view file, absl::string_view what, absl::string_view expected) {
  return absl::DataLossError(absl::StrCat(file, ": ", what, ", expected ", expected));
}

absl::Status UnknownModel(absl::string_view file, absl::string_view model_type) {
  std::vector<absl::string_view> known;
  for (const Family& family : Families()) {
    known.push_back(family.model_type);
    if (!family.nested_in.empty()) known.push_back(family.nested_in);
  }
  const std::vector<std::string> dense = DenseModelTypes();
  if (std::find(dense.begin(), dense.end(), model_type) != dense.end()) {
    return absl::UnimplementedError(
        absl::StrCat(file, ": model_type is ", model_type,
                     ", which has no experts: moe train --upcycle E makes them of its networks"));
  }
  return absl::UnimplementedError(absl::StrCat(file, ": model_type is '", Shown(model_type),
                                               "', which is not supported, expected one of ",
                                               absl::StrJoin(known, ", ")));
}

// The model's keys, and their position in the document.
struct Model {
  const Family* family = nullptr;
  std::string path;
  const Json* keys = nullptr;
};

absl::StatusOr<Model> FindModel(absl::string_view file, const Json& document) {
  if (!document.is_object()) return Expected(file, "the document is no object", "{...}");
  const auto type = document.find("model_type");
  if (type == document.end() || !type->is_string()) {
    return Expected(file, "there is no text model_type", "it, as transformers writes it");
  }
  const std::string model_type = *type;
  for (const Family& family : Families()) {
    if (model_type == family.model_type) return Model{&family, "", &document};
    if (family.nested_in.empty() || model_type != family.nested_in) continue;
    const auto nested = document.find("text_config");
    if (nested == document.end() || !nested->is_object()) {
      return Expected(file,
                      absl::StrCat("model_type is ", model_type, " and text_config no object"),
                      absl::StrCat("the keys of ", family.model_type, " in it"));
    }
    return Model{&family, "text_config.", &*nested};
  }
  return UnknownModel(file, model_type);
}

// Limits one expert matrix over all experts, which the largest sizes together would exceed.
absl::Status CheckTotal(absl::string_view file, const MoeLayerConfig& moe) {
  constexpr int64_t kMost = int64_t{1} << 40;  // elements
  const int64_t widest = std::max(moe.ffn_hidden_size, moe.shared_expert_ffn_hidden_size);
  if (widest <= kMost / moe.router.hidden_size / moe.router.num_experts) return absl::OkStatus();
  return Expected(file,
                  absl::StrCat("the layer has ", moe.router.num_experts, " experts of [", widest,
                               ", ", moe.router.hidden_size, "]"),
                  "at most 2^40 elements of them together");
}

// Errors of the router name its own fields; readers of the file see keys.
absl::Status CheckRouter(absl::string_view file, const Family& family, const ConfigKeys& keys,
                         const MoeLayerConfig& moe) {
  const absl::Status status = ValidateRouterConfig(moe.router);
  if (status.ok()) return status;
  const FamilyKeys& all = family.keys;
  const auto name = [&](Key key, const char* field) {
    return key.name ? keys.Spelling(key) : field;
  };
  const std::string message = absl::StrReplaceAll(
      status.message(), {{"RouterConfig.", ""},
                         {"group_top_k", name(all.kept_groups, "topk_group")},
                         {"top_k", name(all.top_k, "top_k")},
                         {"num_groups", name(all.groups, "n_group")},
                         {"num_experts", name(all.experts, "num_experts")},
                         {"router_jitter", "router_jitter_noise"},
                         {"scaling_factor", name(all.scaling, "scaling_factor")}});
  return absl::DataLossError(absl::StrCat(file, ": ", message));
}

}  // namespace

absl::string_view HfConfig::model_type() const {
  return family->model_type;
}

absl::StatusOr<HfConfig> ParseHfConfig(absl::string_view file, absl::string_view document,
                                       absl::FunctionRef<void(const HfConfig&, ConfigKeys&)> more) {
  MOE_ASSIGN_OR_RETURN(const Json json, ParseBoundedJson(file, document, kLimits));
  MOE_ASSIGN_OR_RETURN(const Model model, FindModel(file, json));
  ConfigKeys outer(std::string(file), "", json);
  outer.RefuseIfSet("quantization_config", "none: weights as F32, F16, BF16 or F64");
  MOE_RETURN_IF_ERROR(outer.status());

  HfConfig config = {.family = model.family};
  config.moe.router.load_balancing = LoadBalancing::kNone;
  config.moe.init_std = config.moe.down_init_std = 0;  // weights come from files
  ConfigKeys keys(std::string(file), model.path, *model.keys);
  keys.RefuseIfSet("quantization_config", "none: weights as F32, F16, BF16 or F64");
  ReadFamily(*model.family, keys, config);
  MOE_RETURN_IF_ERROR(keys.status());
  MOE_RETURN_IF_ERROR(CheckTotal(file, config.moe));
  MOE_RETURN_IF_ERROR(CheckRouter(file, *model.family, keys, config.moe));
  more(config, keys);
  MOE_RETURN_IF_ERROR(keys.status());
  return config;
}

absl::StatusOr<HfConfig> ParseHfConfig(absl::string_view file, absl::string_view document) {
  return ParseHfConfig(file, document, [](const HfConfig&, const ConfigKeys&) {});
}

absl::StatusOr<HfConfig> ReadHfConfig(const std::string& path) {
  MOE_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
  return ParseHfConfig(path, file.text());
}

}  // namespace moe::hf
