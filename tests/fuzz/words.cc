// What people write: flags, variables and configurations, and the small languages in them.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <absl/status/status.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <sys/mman.h>
#include <unistd.h>

#include "comm/bootstrap.h"
#include "moe/cli/base/config_file.h"
#include "moe/cli/base/fault_settings.h"
#include "moe/cli/base/settings.h"
#include "moe/cli/base/train_options.h"
#include "moe/cli/generate/utf8_stream.h"
#include "moe/cli/measure/fail_if.h"
#include "moe/cli/measure/routing_spec.h"
#include "moe/cli/sweep/axis.h"
#include "moe/io/bounded_json.h"
#include "tests/fuzz/targets.h"

namespace moe::fuzz {
namespace {

using Strings = std::vector<std::string>;

constexpr auto kUsage = absl::StatusCode::kInvalidArgument;

// A list of a sweep: "1-3", "4-64*2". The first byte is the form.
void Axis(Bytes bytes) {
  if (bytes.empty()) return;
  const sweep::AxisForm forms[] = {
      {},
      {.least = 0},
      {.kind = sweep::AxisKind::kReal, .words = {"none"}, .above = true},
      {.kind = sweep::AxisKind::kReal, .least = -1e300},
      {.kind = sweep::AxisKind::kText}};
  const sweep::AxisForm& form = forms[bytes[0] % std::size(forms)];
  const auto values = sweep::ParseAxis(TextOf(bytes.subspan(1)), form);
  if (!Accepted(values, "", kUsage)) return;
  MOE_CHECK(!values->empty() && values->size() <= static_cast<size_t>(sweep::kMostAxisValues));
  std::string list;
  for (const std::string& value : *values) absl::StrAppend(&list, list.empty() ? "" : ",", value);
  MOE_CHECK(sweep::ParseAxis(list, form).value() == *values);
}

// Settings of moe train. Lines are flags with their values, "MOE_NAME=value" a variable.
void Flags(Bytes bytes) {
  Strings args, environment, warnings;
  for (const absl::string_view line : absl::StrSplit(TextOf(bytes), '\n')) {
    (absl::StartsWith(line, "MOE_") ? environment : args).emplace_back(line);
  }
  const auto settings = cli::LoadTrainSettings(args, environment, warnings);
  if (!settings.ok()) {
    MOE_CHECK(!settings.status().message().empty());
    return;
  }
  MOE_CHECK(!cli::PrintSettings(*settings).empty());
  // The flags that a settings' line gives set the same values.
  Strings again;
  for (const cli::Setting& setting : settings->table()) {
    if (!settings->given(setting.name)) continue;
    for (const std::string& text : settings->value(setting.name).texts) {
      again.push_back(absl::StrCat("--", setting.name, "=", text));
    }
  }
  const auto loaded = cli::LoadTrainSettings(again, {}, warnings);
  MOE_CHECK(loaded.ok());
  for (const cli::Setting& setting : settings->table()) {
    MOE_CHECK(loaded->value(setting.name).texts == settings->value(setting.name).texts);
  }
}

// A file of --config: names of settings, and DeepSpeed's keys.
void ConfigFile(Bytes bytes) {
  static const int file = ::memfd_create("config", 0);
  static const std::string path = absl::StrCat("/proc/self/fd/", file);
  MOE_CHECK(::ftruncate(file, 0) == 0);
  MOE_CHECK(::pwrite(file, bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  Strings warnings;
  const auto settings = cli::LoadTrainSettings({"--config", path}, {}, warnings);
  if (settings.ok()) {
    MOE_CHECK(!cli::PrintSettings(*settings).empty());
  } else {
    MOE_CHECK(!settings.status().message().empty());
  }
}

// --fault and its relatives.
void Fault(Bytes bytes) {
  static const cli::Table table = [] {
    cli::Table t;
    cli::AddFaultSettings(t);
    return t;
  }();
  cli::Settings settings(table);
  constexpr int kRanks = 4;
  const Strings lines = absl::StrSplit(TextOf(bytes), '\n');
  for (size_t i = 0; i < lines.size() && i < table.rows().size(); ++i) {
    if (lines[i].empty()) continue;
    if (!settings.Set(table.rows()[i], {lines[i]}, cli::Origin::kFlag, "f").ok()) return;
  }
  if (!cli::Fill(settings, table).ok()) return;
  const auto fault = cli::FaultOf(settings, kRanks);
  if (!Accepted(fault, "", kUsage)) return;
  for (const int rank : fault->ranks) MOE_CHECK(0 <= rank && rank < kRanks);
  MOE_CHECK(fault->step >= -1);
}

// --fail-if, with and without a row to compare with.
void FailIf(Bytes bytes) {
  const Strings columns = {"busbw", "wrong", "p99"};
  for (const auto base : {measure::FailIf::Base::kAbsent, measure::FailIf::Base::kPresent}) {
    const auto rule = measure::FailIf::Parse(TextOf(bytes), columns, base);
    if (!Accepted(rule, "", kUsage)) continue;
    const auto lookup = [](absl::string_view column) -> std::optional<double> {
      return column == "wrong" ? std::nan("") : 1.5;  // what was not measured
    };
    (void)rule->Holds(lookup, lookup);
  }
}

// --routing.
void RoutingWord(Bytes bytes) {
  const auto routing = measure::ParseRouting(TextOf(bytes));
  if (!Accepted(routing, "", kUsage)) return;
  MOE_CHECK(routing->parameter >= 0);
  using Spec = measure::RoutingSpec;
  if (routing->kind == Spec::kMatrix || routing->kind == Spec::kTrace) {
    MOE_CHECK(!routing->path.empty());
    return;
  }
  double sum = 0;
  for (const double share : measure::ExpertShares(*routing, 2, 6)) {
    MOE_CHECK(share >= 0);
    sum += share;
  }
  MOE_CHECK(sum > 1 - 1e-9 && sum < 1 + 1e-9);
}

// Variables of launchers, one a line, "NAME=value".
void Launcher(Bytes bytes) {
  std::map<std::string, std::string, std::less<>> variables;
  for (const absl::string_view line : absl::StrSplit(TextOf(bytes), '\n')) {
    const std::pair<std::string, std::string> both = absl::StrSplit(line, absl::MaxSplits('=', 1));
    variables.insert(both);
  }
  const auto lookup = [&](const char* name) -> const char* {
    const auto found = variables.find(absl::string_view(name));
    return found == variables.end() ? nullptr : found->second.c_str();
  };
  const auto launch = DetectLaunch({}, lookup);
  if (!Accepted(launch, "", kUsage)) return;
  MOE_CHECK(launch->size >= 0 && launch->rank >= 0 && launch->local_rank >= 0);
  MOE_CHECK(launch->size == 0 || launch->rank < launch->size);
  MOE_CHECK(0 <= launch->port && launch->port <= 65535);
}

// Bytes that a model generates become UTF-8.
void Text(Bytes bytes) {
  cli::Utf8Stream stream;
  std::string text;
  for (const uint8_t byte : bytes) text += stream.Take(byte);
  text += stream.End();
  MOE_CHECK(JsonString(text).ok());
  if (JsonString(std::string(TextOf(bytes))).ok()) MOE_CHECK(text == TextOf(bytes));
}

}  // namespace

absl::Span<const Target> Words() {
  static constexpr Target kTargets[] = {{"axis", Axis},
                                        {"config_file", ConfigFile},
                                        {"fail_if", FailIf},
                                        {"fault", Fault},
                                        {"flags", Flags},
                                        {"launcher", Launcher},
                                        {"routing_word", RoutingWord},
                                        {"text", Text}};
  return kTargets;
}

}  // namespace moe::fuzz
