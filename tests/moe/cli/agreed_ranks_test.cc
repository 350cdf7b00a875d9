#include "moe/cli/base/agreed_ranks.h"

#include <map>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moe/cli/base/command.h"
#include "moe/cli/base/settings.h"
#include "tests/moe/cli/settings_harness.h"

namespace moe::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAreArray;

Settings SettingsOf(const std::vector<Setting>& rows) {
  Table table;
  for (const Setting& row : rows) table.Add(row);
  return Settings(table.Unbound());
}

// A value other than the row's default.
std::vector<std::string> AnotherValue(const Setting& row) {
  switch (row.kind) {
    case Kind::kInteger:
    case Kind::kSeed:
    case Kind::kReal:
      return {row.fallback == "7" ? "8" : "7"};
    case Kind::kSwitch:
      return {"true"};
    case Kind::kWord:
      for (const std::string& word : row.words) {
        if (word != row.fallback) return {word};
      }
      return {};
    case Kind::kText:
    case Kind::kPaths:
      return {"another"};
  }
  return {};
}

// The names of values that differ.
std::vector<std::string> Differing(const std::vector<AgreedValue>& a,
                                   const std::vector<AgreedValue>& b) {
  std::vector<std::string> names;
  EXPECT_EQ(a.size(), b.size());
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    EXPECT_EQ(a[i].name, b[i].name);
    if (a[i].text != b[i].text) names.push_back(a[i].name);
  }
  return names;
}

// Commands whose ranks may be processes: those with a deadline.
std::map<std::string, std::vector<Setting>> CommandsOfRanks() {
  std::map<std::string, std::vector<Setting>> commands;
  for (const Command& command : Commands()) {
    const std::vector<Setting> rows = command.help().settings;
    for (const Setting& row : rows) {
      if (row.name == "comm-timeout") commands[command.name] = rows;
    }
  }
  return commands;
}

TEST(AgreedRanksTest, RanksCompareEveryRowOfEveryCommandUnlessItIsPerRank) {
  std::vector<std::string> names;
  for (const auto& [command, rows] : CommandsOfRanks()) {
    names.push_back(command);
    const Settings plain = SettingsOf(rows);
    const auto values = AgreedValuesOf(command, plain);
    for (const Setting& row : rows) {
      Settings changed = plain;
      ASSERT_TRUE(changed.Set(row, AnotherValue(row), Origin::kFlag, "--" + row.name).ok())
          << command << " --" << row.name;
      const auto differing = Differing(values, AgreedValuesOf(command, changed));
      const std::vector<std::string> expected(row.is(kPerRank) ? 0 : 1, "--" + row.name);
      EXPECT_EQ(differing, expected) << command;
    }
  }
  EXPECT_THAT(names, ElementsAre("bench", "doctor", "eval", "generate", "layer", "sweep", "train",
                                 "verify"));
}

// A new row must state why ranks may differ in it: files, screen or threads of one rank, memory of
// its machine, or checked separately (the number of ranks, records and traces).
TEST(AgreedRanksTest, RowsThatMayDifferAreThese) {
  std::set<std::string> per_rank, by_content, folders;
  for (const auto& [command, rows] : CommandsOfRanks()) {
    for (const Setting& row : rows) {
      if (row.is(kPerRank)) per_rank.insert(row.name);
      if (row.is(kByContent)) by_content.insert(row.name);
      if (row.is(kOneFolder)) folders.insert(row.name);
    }
  }
  EXPECT_THAT(per_rank, UnorderedElementsAreArray({"color",
                                                   "config",
                                                   "dry-run",
                                                   "fault",
                                                   "fault-injector-delay-start-iteration",
                                                   "fault-injector-fault-types",
                                                   "fault-injector-ranks",
                                                   "fault-injector-seed",
                                                   "flight-dir",
                                                   "grads",
                                                   "help",
                                                   "json-file",
                                                   "log-interval",
                                                   "max-memory",
                                                   "metrics-file",
                                                   "offload",
                                                   "out",
                                                   "output",
                                                   "output-stderr",
                                                   "print-config",
                                                   "quiet",
                                                   "ranks",
                                                   "record-routing",
                                                   "resume",
                                                   "tensorboard-dir",
                                                   "threads",
                                                   "tokenizer",
                                                   "trace",
                                                   "verbose"}));
  EXPECT_THAT(by_content, UnorderedElementsAreArray({"checkpoint", "data", "grad-output",
                                                     "hf-config", "init-from", "input",
                                                     "prompt-file", "tokens", "weights"}));
  EXPECT_THAT(folders, ElementsAre("save"));
}

TEST(AgreedRanksTest, FilesThatNoRankComparesAreRefusedBeforeRanksMeet) {
  const Settings settings = testing::Load({"--data", "a"}).value();
  const Launch launch = {.plan = {.backend = Backend::kMpi, .meeting = Meeting::kMpi}};
  const absl::Status run =
      RunAgreedRanks({.launch = launch, .settings = settings, .command = "train"},
                     [](auto) { return absl::OkStatus(); });
  EXPECT_EQ(run.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(run.message(), HasSubstr("--data is given, expected an input that ranks compare"));
}

TEST(AgreedRanksTest, ProgramAndCommandComeFirst) {
  const auto values = AgreedValuesOf("bench layer", SettingsOf({}));
  ASSERT_EQ(values.size(), 4);
  EXPECT_EQ(values[0].name, "version of moe");
  EXPECT_EQ(values[1].name, "commit of moe");
  EXPECT_EQ(values[2].name, "version of the numerics");
  EXPECT_EQ(values[3].name, "command");
  EXPECT_EQ(values[3].text, "bench layer");
  for (const AgreedValue& value : values) EXPECT_FALSE(value.text.empty()) << value.name;
}

TEST(AgreedRanksTest, RealNumbersAreComparedByValueAndPresetsAreDerived) {
  const auto values = [](const std::vector<std::string>& flags) {
    return AgreedValuesOf("train", testing::Load(flags).value());
  };
  EXPECT_THAT(Differing(values({"--lr", "1e-3"}), values({"--lr", "0.001"})), ElementsAre());
  EXPECT_THAT(Differing(values({"--lr", "1e-3"}), values({"--lr", "0.00100000001"})),
              ElementsAre("--lr"));
  EXPECT_THAT(Differing(values({"--data", "a"}), values({"--data", "b"})), ElementsAre());
  for (const AgreedValue& value : values({"--router", "gpt-oss"})) {
    EXPECT_EQ(value.derived, value.name == "--activation" || value.name == "--moe-router-topk" ||
                                 value.name == "--moe-projection-biases")
        << value.name;
  }
}

}  // namespace
}  // namespace moe::cli
