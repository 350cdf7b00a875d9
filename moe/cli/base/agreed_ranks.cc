#include "moe/cli/base/agreed_ranks.h"

#include <algorithm>
#include <memory>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <fmt/format.h>

#include "kernels/base/caught.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/xxh3.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/program.h"
#include "moe/cli/base/provenance.h"
#include "moe/io/file.h"
#include "moe/lm/train_settings.h"

namespace moe::cli {
namespace {

// "text (--data)".
std::string NameOf(absl::string_view what, absl::string_view flag) {
  return absl::StrCat(what, " (--", flag, ")");
}

std::string Canonical(const Setting& setting, const std::string& text) {
  double number = 0;
  const bool real = setting.kind == Kind::kReal && absl::SimpleAtod(text, &number);
  return real ? fmt::format("{}", number) : text;
}

AgreedValue ValueOf(const Setting& setting, const Value& value) {
  AgreedValue agreed = {.name = absl::StrCat("--", setting.name),
                        .derived = value.origin == Origin::kPreset};
  if (setting.is(kByContent | kOneFolder)) {
    agreed.text = value.texts.empty() ? "" : "given";
    return agreed;
  }
  std::vector<std::string> texts;
  for (const std::string& text : value.texts) texts.push_back(Canonical(setting, text));
  agreed.text = absl::StrJoin(texts, " ");
  return agreed;
}

// Checks that ranks compare every row of files: otherwise results of two models or texts could be
// mixed.
absl::Status CheckAllAreThere(const Settings& settings, const ReadInputs& inputs) {
  for (const Setting& row : settings.table()) {
    if (!row.is(kByContent) || settings.empty(row.name)) continue;
    const std::string suffix = NameOf("", row.name);
    const auto is_of_row = [&](const auto& input) {
      return absl::EndsWith(input.name, suffix);
    };
    if (std::any_of(inputs.values.begin(), inputs.values.end(), is_of_row)) continue;
    if (std::any_of(inputs.bytes.begin(), inputs.bytes.end(), is_of_row)) continue;
    return absl::InternalError(absl::StrCat("RunAgreedRanks: --", row.name,
                                            " is given, expected an input that ranks compare"));
  }
  return absl::OkStatus();
}

}  // namespace

void ReadInputs::AddHash(absl::string_view what, absl::string_view flag, uint64_t xxh3) {
  values.push_back({.name = NameOf(what, flag), .text = absl::StrCat(xxh3), .shown = false});
}

absl::Status ReadInputs::AddFile(absl::string_view what, absl::string_view flag,
                                 const std::string& path) {
  const auto file = MappedFile::Open(path);
  MOE_RETURN_IF_ERROR(InputError(absl::StrCat("--", flag), file.status()));
  AddHash(what, flag, Xxh3(file->bytes().data(), file->bytes().size()));
  return absl::OkStatus();
}

absl::Status ReadInputs::AddTensors(absl::string_view what, absl::string_view flag,
                                    absl::Span<const CheckpointTensor> tensors) {
  AgreedBytes added = {.name = NameOf(what, flag)};
  std::vector<const SafetensorsFile*> files;
  for (const auto& [file, tensor] : tensors) {
    added.parts.push_back(file->Data(*tensor));
    absl::StrAppend(&added.forms, ",", moe::NameOf(tensor->type));
    if (std::find(files.begin(), files.end(), file) == files.end()) files.push_back(file);
  }
  for (const SafetensorsFile* file : files) {
    const auto identity = FileIdentity(file->path());
    MOE_RETURN_IF_ERROR(InputError(absl::StrCat("--", flag), identity.status()));
    added.identity = Xxh3(&*identity, sizeof(*identity), added.identity);
  }
  bytes.push_back(std::move(added));
  return absl::OkStatus();
}

absl::Status ReadInputs::AddModel(const hf::HfModel& model, absl::string_view flag) {
  MOE_RETURN_IF_ERROR(AddFile("config.json", flag, absl::StrCat(model.folder(), "/config.json")));
  return AddTensors("model", flag, model.tensors());
}

std::vector<AgreedValue> AgreedValuesOf(absl::string_view command, const Settings& settings) {
  std::vector<AgreedValue> values;
  for (const auto& [key, value] : BuildFacts()) {
    if (key != "version" && key != "commit") continue;
    values.push_back({.name = absl::StrCat(key, " of moe"), .text = value});
  }
  values.push_back({.name = lm::kNumericsVersionName, .text = absl::StrCat(lm::kNumericsVersion)});
  values.push_back({.name = "command", .text = std::string(command)});
  for (const Setting& row : settings.table()) {
    if (!row.is(kPerRank)) values.push_back(ValueOf(row, settings.value(row.name)));
  }
  return values;
}

absl::Status RunAgreedRanks(const AgreedRun& run, RankBody body) {
  ReadInputs inputs;
  std::vector<AgreedValue> values;
  const bool compares = run.launch.plan.processes();
  if (compares) {
    if (run.inputs) {
      MOE_ASSIGN_OR_RETURN(inputs, run.inputs());
    }
    MOE_RETURN_IF_ERROR(CheckAllAreThere(run.settings, inputs));
    const char* const blank = run.operation.empty() ? "" : " ";
    values = AgreedValuesOf(absl::StrCat(run.command, blank, run.operation), run.settings);
    values.insert(values.end(), inputs.values.begin(), inputs.values.end());
  }
  RunOptions options = RankOptions(run.launch, CommTimeout(run.settings), run.command);
  if (run.on_failure) {
    options.report = [&run, report = std::move(options.report)](const absl::Status& status) {
      Caught([&] {
        run.on_failure(status);
        return absl::OkStatus();
      }).IgnoreError();
      report(status);
    };
  }
  options.watch = run.watch;
  return RunRanks(options, [&](std::unique_ptr<Communicator> world) -> absl::Status {
    MOE_RETURN_IF_ERROR(CheckWorldSize(run.launch, *world));
    if (compares) {
      MOE_RETURN_IF_ERROR(CheckAgreement(values, inputs.bytes, *world));
    }
    return body(std::move(world));
  });
}

}  // namespace moe::cli
