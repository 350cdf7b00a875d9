#include "moe/lm/run_settings.h"

#include <algorithm>
#include <map>
#include <utility>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_replace.h>
#include <absl/strings/strip.h>

#include <nlohmann/json.hpp>

#include "comm/agreement.h"
#include "kernels/base/status_macros.h"
#include "moe/lm/train_config.h"
#include "moe/lm/train_settings.h"

namespace moe::lm {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kText[] = "text (--data)", kTokens[] = "tokens (--tokens)";
constexpr char kQkNormName[] = "--qk-layernorm";

std::string KeyOf(const char* name) {
  return absl::StrReplaceAll(absl::StripPrefix(name, "--"), {{"-", "_"}, {" ", "_"}});
}

// Text of a setting in a section; `before` where the section lacks it.
std::string StoredText(const Json& section, const char* name, const std::string& before) {
  const auto member = section.find(KeyOf(name));
  return member != section.end() && member->is_string() ? member->get<std::string>() : before;
}

// The version of the numerics that a checkpoint holds. Version 4 has a partial gradient for each
// row segment, of which there is one for each tensor leaf, and version 5 sums of rows by leaves in
// norms of all heads: with one leaf the bits are those of 3.
std::string StoredVersion(const Json& numerics, bool norm_of_all_heads) {
  const std::string version = StoredText(numerics, kNumericsVersionName, "");
  static_assert(kNumericsVersion == 5);
  const bool one_leaf = StoredText(numerics, "--tensor-leaves", "") == "1";
  const bool same =
      one_leaf ? version == "3" || version == "4" : version == "4" && !norm_of_all_heads;
  return same ? "5" : version;
}

// Hashes are kept as signed numbers.
std::string Shown(SettingKind kind, const std::string& text) {
  int64_t hash = 0;
  if (kind != SettingKind::kData || !absl::SimpleAtoi(text, &hash)) return text;
  return absl::StrFormat("%016x", static_cast<uint64_t>(hash));
}

// What a checkpoint of this program holds of attention's heads where the configuration has 0.
void FillHeads(TransformerConfig& model) {
  model.num_query_groups = model.key_value_heads();
  model.kv_channels = model.head_dim();
}

}  // namespace

std::vector<RunSetting> SettingsOf(const TrainConfig& config, const Corpus& corpus) {
  TrainConfig filled = config;
  FillHeads(filled.model);
  std::vector<RunSetting> settings;
  for (const SettingRow& row : RowsOf(filled)) {
    settings.push_back(
        {.kind = row.kind, .name = row.name, .text = FieldText(row.field), .before = row.before});
  }
  uint64_t hash = corpus.xxh3;
  settings.push_back({.kind = SettingKind::kData,
                      .name = corpus.mapped.empty() ? kText : kTokens,
                      .text = FieldText(&hash)});
  return settings;
}

absl::Status CheckAgreement(const std::vector<RunSetting>& settings, Communicator& world) {
  std::vector<AgreedValue> values;
  for (const RunSetting& setting : settings) {  // words are numbers here, and reals hexadecimal
    values.push_back({.name = setting.name, .text = setting.text, .shown = false});
  }
  return moe::CheckAgreement(values, {}, world);
}

absl::StatusOr<TrainConfig> StoredConfig(const CheckpointSections& sections) {
  const std::map<SettingKind, Json> stored = {
      {SettingKind::kNumerics, Json::parse(sections.numerics, nullptr, false)},
      {SettingKind::kModel, Json::parse(sections.model, nullptr, false)},
      {SettingKind::kTrainer, Json::parse(sections.trainer, nullptr, false)}};
  TrainConfig config;
  // Twice: what older programs did not store may follow from a row before it.
  for (int pass = 0; pass < 2; ++pass) {
    for (const SettingRow& row : RowsOf(config)) {
      const auto section = stored.find(row.kind);
      if (section == stored.end()) continue;
      if (SetField(row.field, StoredText(section->second, row.name, row.before))) continue;
      return absl::DataLossError(absl::StrCat("the checkpoint does not say ", KeyOf(row.name)));
    }
  }
  const absl::Status batch = CheckBatch(config);
  if (!batch.ok()) {
    return absl::DataLossError(absl::StrCat("the checkpoint says ", batch.message()));
  }
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
  const RunSetting version = {.kind = SettingKind::kNumerics,
                              .name = kNumericsVersionName,
                              .text = FieldText(&kNumericsVersion)};
  const Json model = Json::parse(sections.model, nullptr, false);
  const RunSetting norm = {
      .kind = SettingKind::kModel, .name = kQkNormName, .text = StoredText(model, kQkNormName, "")};
  const auto differences = Differences({version, norm}, SettingKind::kNumerics, sections.numerics);
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
  const bool norm_of_all_heads =
      std::any_of(settings.begin(), settings.end(), [](const RunSetting& setting) {
        return absl::string_view(setting.name) == kQkNormName &&
               setting.text == absl::StrCat(static_cast<int>(QkNorm::kHeads));
      });
  std::vector<std::string> differences;
  for (const RunSetting& setting : settings) {
    if (setting.kind != kind) continue;
    const std::string text = absl::string_view(setting.name) == kNumericsVersionName
                                 ? StoredVersion(object, norm_of_all_heads)
                                 : StoredText(object, setting.name, setting.before);
    if (text == setting.text) continue;
    differences.push_back(absl::StrCat(setting.name, " is ", Shown(kind, setting.text), ", ",
                                       text.empty() ? "not" : Shown(kind, text),
                                       " in the checkpoint"));
  }
  return differences;
}

}  // namespace moe::lm
