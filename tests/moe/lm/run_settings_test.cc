// The settings of a run against those of a checkpoint.
#include "moe/lm/run_settings.h"

#include <string>
#include <vector>

#include <absl/strings/str_replace.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moe/io/file.h"

namespace moe::lm {
namespace {

using ::testing::HasSubstr;

// A checkpoint that does not say it was written by a program that knew only the one choice.
TEST(RunSettings, WhatAnOlderCheckpointLeavesOutIsWhatItWas) {
  TrainConfig config;
  const std::string json = SettingsJson(SettingsOf(config, {}), SettingKind::kModel);
  const std::string older = absl::StrReplaceAll(
      json, {{R"("num_query_groups":"4",)", ""}, {R"("tie_word_embeddings":"0",)", ""}});
  ASSERT_LT(older.size(), json.size());
  EXPECT_THAT(Differences(SettingsOf(config, {}), SettingKind::kModel, older),
              ::testing::IsEmpty());
  EXPECT_EQ(
      VersionDifference({.numerics = SettingsJson(SettingsOf(config, {}), SettingKind::kNumerics)}),
      "");
  EXPECT_THAT(VersionDifference({.numerics = R"({"version_of_the_numerics":"1"})"}),
              ::testing::MatchesRegex("version of the numerics is [0-9]+, 1 in the checkpoint"));
  config.model.num_query_groups = 2;
  EXPECT_THAT(Differences(SettingsOf(config, {}), SettingKind::kModel, older),
              ::testing::ElementsAre("--num-query-groups is 2, 4 in the checkpoint"));
}

// A checkpoint of a program that had a setting more.
TEST(RunSettings, AKeyThatNoSettingHasIsIgnored) {
  TrainConfig config;
  config.model.hidden_size = 96;
  const std::vector<RunSetting> settings = SettingsOf(config, {});
  CheckpointSections sections = {.numerics = SettingsJson(settings, SettingKind::kNumerics),
                                 .model = SettingsJson(settings, SettingKind::kModel),
                                 .trainer = SettingsJson(settings, SettingKind::kTrainer)};
  for (std::string* const section : {&sections.numerics, &sections.model, &sections.trainer}) {
    section->insert(1, R"("cuda_graph":"1",)");
  }
  const auto stored = StoredConfig(sections);
  ASSERT_TRUE(stored.ok()) << stored.status();
  EXPECT_EQ(stored->model.hidden_size, 96);
  EXPECT_THAT(Differences(settings, SettingKind::kModel, sections.model), ::testing::IsEmpty());
}

TEST(RunSettings, ATextIsNotGoneOnWithAsTokenIdsNorIdsAsAText) {
  TrainConfig config;
  Corpus text = {.xxh3 = 0xfedcba9876543210}, other = {.xxh3 = 15}, ids = {.xxh3 = 1};
  ids.mapped.push_back(MappedFile::Open("/proc/self/exe").value());  // any file: text is copied
  const auto section = [&](const Corpus& corpus) -> CheckpointSections {
    return {.data = SettingsJson(SettingsOf(config, corpus), SettingKind::kData)};
  };
  EXPECT_TRUE(TrainedOnText(section(text)));
  EXPECT_FALSE(TrainedOnText(section(ids)));
  EXPECT_THAT(Differences(SettingsOf(config, text), SettingKind::kData, section(other).data),
              ::testing::ElementsAre(
                  "text (--data) is fedcba9876543210, 000000000000000f in the checkpoint"));
  const auto check = [&](const Corpus& before, const Corpus& now) {
    return CheckSameTokens(section(before), config, SettingsOf(config, now));
  };
  config.model.vocab_size = 2048;
  EXPECT_TRUE(check(text, other).ok());
  EXPECT_TRUE(check(ids, ids).ok());
  EXPECT_EQ(check(ids, text).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(check(ids, text).message(),
              HasSubstr("--data, expected --tokens: the run was trained on token ids"));
  EXPECT_THAT(check(text, ids).message(), HasSubstr("--tokens, expected --data"));
  config.model.vocab_size = 256;
  EXPECT_TRUE(check(ids, text).ok());
}

}  // namespace
}  // namespace moe::lm
