#include <set>
#include <string>

#include <absl/strings/strip.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "moe/cli/base/command.h"
#include "moe/cli/base/settings.h"
#include "moe/cli/base/train_options.h"
#include "moe/lm/train_settings.h"
#include "tests/moe/cli/settings_harness.h"

namespace moe::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Load;
using testing::LoadError;
using testing::Strings;

TEST(ChoiceTest, AWordHasItsValueAndOthersHaveNone) {
  constexpr Choice<int> kWords[] = {{"one", 1}, {"uno", 1}, {"two", 2}};
  EXPECT_EQ(ValueOf(std::string("uno"), kWords), 1);
  EXPECT_EQ(ValueOf(absl::string_view("two"), kWords), 2);
  EXPECT_EQ(ValueOf(std::string("three"), kWords), std::nullopt);
}

TEST(SuggestTest, DistanceCountsEdits) {
  EXPECT_EQ(EditDistance("", "abc"), 3);
  EXPECT_EQ(EditDistance("abc", "abc"), 0);
  EXPECT_EQ(EditDistance("abc", "acb"), 1);   // neighbours swapped
  EXPECT_EQ(EditDistance("abc", "abxc"), 1);  // inserted
  EXPECT_EQ(EditDistance("kitten", "sitting"), 3);
}

TEST(SuggestTest, NearestIsNearOrNothing) {
  const Strings known = {"num-experts", "topk", "lr", "steps"};
  EXPECT_EQ(Nearest("num-expert", known), "num-experts");
  EXPECT_EQ(Nearest("top-k", known), "topk");
  EXPECT_EQ(Nearest("experts", known), "num-experts");  // a part of it
  // Where two names are at the same distance, the one that contains it.
  EXPECT_EQ(Nearest("ffn-hidden-size", {"hidden-size", "moe-ffn-hidden-size"}),
            "moe-ffn-hidden-size");
  EXPECT_EQ(Nearest("zzzzzz", known), "");
  EXPECT_EQ(Nearest("xy", known), "");  // two letters are near everything
}

TEST(PrecedenceTest, FlagsThenEnvironmentThenFileThenDefault) {
  const std::string file = R"({"steps": 3, "seed": 4, "num_layers": 5})";
  const auto s = Load({"--steps", "1"}, {"MOE_STEPS=2", "MOE_SEED=6"}, file).value();
  EXPECT_EQ(s.integer("steps"), 1);
  EXPECT_EQ(s.value("steps").origin, Origin::kFlag);
  EXPECT_EQ(s.seed("seed"), 6u);
  EXPECT_EQ(s.value("seed").origin, Origin::kEnvironment);
  EXPECT_EQ(s.integer("num-layers"), 5);
  EXPECT_EQ(s.value("num-layers").origin, Origin::kFile);
  EXPECT_EQ(s.value("hidden-size").origin, Origin::kDefault);
  EXPECT_EQ(s.integer("hidden-size"), lm::TransformerConfig{}.hidden_size);
}

TEST(PrecedenceTest, APresetIsBelowEverythingButDefaults) {
  EXPECT_EQ(Load({"--router", "switch"})->integer("moe-router-topk"), 1);
  EXPECT_EQ(Load({"--router", "qwen3"})->integer("moe-router-topk"), 2);
  EXPECT_EQ(Load({"--router", "qwen3", "--topk", "4"})->integer("moe-router-topk"), 4);
  EXPECT_EQ(Load({"--router", "qwen3"}, {"MOE_ROUTER_TOPK=3"})->integer("moe-router-topk"), 3);
  EXPECT_EQ(Load({}, {}, R"({"router": "switch"})")->integer("moe-router-topk"), 1);
  EXPECT_EQ(Load({"--router", "gpt-oss"})->text("activation"), "clamped_swiglu");
  EXPECT_TRUE(Load({"--router", "gpt-oss"})->on("moe-projection-biases"));
  EXPECT_EQ(Load({"--router", "gpt-oss", "--activation", "relu"})->text("activation"), "relu");
  EXPECT_FALSE(Load({"--router", "qwen2"})->on("moe-shared-expert-gate"));
  EXPECT_TRUE(Load({"--router", "qwen2", "--moe-shared-expert-intermediate-size", "8"})
                  ->on("moe-shared-expert-gate"));
}

TEST(PrecedenceTest, TheLastFlagWinsAndPathsAddUp) {
  const auto s =
      Load({"--topk", "1", "--moe-router-topk=3", "--data", "a", "--data=b"}, {"MOE_DATA=c:d"})
          .value();
  EXPECT_EQ(s.integer("moe-router-topk"), 3);
  EXPECT_THAT(s.value("data").texts, ElementsAre("a", "b"));
  EXPECT_THAT(Load({}, {"MOE_DATA=c:d"})->value("data").texts, ElementsAre("c", "d"));
}

TEST(PrecedenceTest, PrintedWithOrigins) {
  const auto s = Load({"--ep", "2"}, {"MOE_STEPS=7"}, R"({"seed": 9})").value();
  const std::string text = PrintSettings(s);
  EXPECT_THAT(text, ::testing::ContainsRegex("expert-model-parallel-size +2 +flag --ep\n"));
  EXPECT_THAT(text, ::testing::ContainsRegex("steps +7 +env MOE_STEPS\n"));
  EXPECT_THAT(text, ::testing::ContainsRegex("seed +9 +file .*json: seed\n"));
  EXPECT_THAT(text, ::testing::ContainsRegex("moe-router-topk +2 +preset --router mixtral\n"));
  EXPECT_THAT(text, ::testing::ContainsRegex("hidden-size +128 +default\n"));
  for (const Setting& setting : TrainSettings().rows()) {
    EXPECT_EQ(setting.flag_only, text.find(setting.name + " ") == text.npos) << setting.name;
  }
}

TEST(FlagTest, NamesOfMegatronMeanTheSame) {
  const auto s = Load({"--train-iters", "7", "--global-batch-size", "24", "--lr-warmup-iters", "2",
                       "--lr-decay-iters", "6", "--data-path", "a", "--fp16", "--bf16"})
                     .value();
  EXPECT_EQ(s.integer("steps"), 7);
  EXPECT_EQ(s.integer("train-batch-size"), 24);
  EXPECT_EQ(s.integer("lr-warmup-steps"), 2);
  EXPECT_EQ(s.integer("lr-decay-steps"), 6);
  EXPECT_EQ(s.text("data"), "a");
  EXPECT_EQ(s.text("dtype"), "bf16") << "the last flag wins";
  EXPECT_EQ(s.value("dtype").where, "--bf16");
  EXPECT_EQ(Load({"--fp16", "--steps", "1"})->text("dtype"), "f16");
  EXPECT_EQ(Load({}, {"MOE_TRAIN_ITERS=3"})->integer("steps"), 3);
  EXPECT_EQ(Load({}, {}, R"({"global_batch_size": 5})")->integer("train-batch-size"), 5);
}

TEST(FlagTest, ASwitchNeedsNoValue) {
  EXPECT_TRUE(Load({"--quiet", "--steps", "1"})->on("quiet"));
  EXPECT_FALSE(Load({"--quiet=false"})->on("quiet"));
  EXPECT_FALSE(Load({})->on("quiet"));
  EXPECT_TRUE(Load({"-v"})->on("verbose"));
  EXPECT_TRUE(Load({}, {"MOE_QUIET=true"})->on("quiet"));
}

TEST(FlagTest, NegativeNumbersAreValues) {
  EXPECT_EQ(Load({"--capacity-factor", "-0.5"})->real("moe-expert-capacity-factor"), -0.5);
}

TEST(EnvironmentTest, NamesLeaveOutTheLeadingMoe) {
  const auto s =
      Load({}, {"MOE_FFN_HIDDEN_SIZE=3", "MOE_MOE_LAYER_FREQ=2", "MOE_EP=4", "HOME=/x"}).value();
  EXPECT_EQ(s.integer("moe-ffn-hidden-size"), 3);
  EXPECT_EQ(s.integer("moe-layer-freq"), 2);
  EXPECT_EQ(s.integer("expert-model-parallel-size"), 4);
}

TEST(EnvironmentTest, VariablesThatSetNothingAreWarnedOf) {
  Settings settings(TrainSettings());
  Strings warnings;
  ASSERT_TRUE(LoadEnvironment({"MOE_STEP=3", "MOE_ZZZZZZZZ=1", "MOE_ROUTER_TOPKK=2", "MOE_CONFIG=x",
                               "MOE_NCCL_SECRET=s", "MOE_BENCH_PYTHON=python3",
                               "MOE_TEST_DEVICE=cuda", "MOESTEPS=1"},
                              settings, warnings)
                  .ok());
  EXPECT_THAT(warnings,
              ElementsAre(HasSubstr("MOE_CONFIG sets nothing"),
                          "environment variable MOE_ROUTER_TOPKK sets nothing; did you mean "
                          "'MOE_ROUTER_TOPK'?",
                          "environment variable MOE_STEP sets nothing; did you mean 'MOE_STEPS'?",
                          "environment variable MOE_ZZZZZZZZ sets nothing"));
}

TEST(EnvironmentTest, TwoNamesOfOneSettingMustAgree) {
  EXPECT_TRUE(Load({}, {"MOE_TOPK=2", "MOE_ROUTER_TOPK=2"}).ok());
}

TEST(ConfigTest, TakesNamesWithEitherDash) {
  const auto s = Load({}, {}, R"({"num_experts": 4, "topk": 1, "moe-ffn-hidden-size": 32,
      "capacity_factor": null, "data": ["a", "b"], "quiet": true, "lr": 2.5e-3, "out": "run"})")
                     .value();
  EXPECT_EQ(s.integer("num-experts"), 4);
  EXPECT_EQ(s.integer("moe-router-topk"), 1);
  EXPECT_EQ(s.integer("moe-ffn-hidden-size"), 32);
  EXPECT_EQ(s.text("moe-expert-capacity-factor"), "none");
  EXPECT_THAT(s.value("data").texts, ElementsAre("a", "b"));
  EXPECT_TRUE(s.on("quiet"));
  EXPECT_EQ(s.text("lr"), "2.5e-3");  // as written in the file
}

TEST(ConfigTest, RefusesMalformedDocuments) {
  EXPECT_THAT(LoadError({}, {}, "{\n  \"steps\": 1,\n}"), HasSubstr("malformed JSON, line 3"));
  EXPECT_THAT(LoadError({}, {}, std::string(100, '[')), HasSubstr("expected { ... }"));
  EXPECT_THAT(LoadError({}, {}, R"({"a":)" + std::string(100, '[')), HasSubstr("too deeply"));
}

TEST(ReproduceTest, FlagsGiveTheSameSettings) {
  const auto s = Load({"--data", "my text/it's", "--data", "b", "--ep", "2", "--steps", "7",
                       "--moe-pad-expert-input-to-capacity", "--capacity-factor", "1.5", "-q"},
                      {"MOE_SEED=5"}, R"({"num_layers": 3, "micro_batches": 8})")
                     .value();
  EXPECT_EQ(
      FlagsOf(s, [](const Setting& setting) { return setting.name == "quiet"; }),
      " --data 'my text/it'\\''s' --data b --steps 7 --micro-batches 8 --seed 5 --num-layers 3"
      " --moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity"
      " --expert-model-parallel-size 2");
}

TEST(ReproduceTest, KeepsDefaultsThatAPresetWouldChange) {
  const auto none = [](const Setting&) {
    return false;
  };
  const auto top_k = Load({"--router", "llama4", "--topk", "2"}).value();
  EXPECT_EQ(FlagsOf(top_k, none), " --router llama4 --moe-router-topk 2");
  const auto biases = Load({"--router", "gpt-oss", "--moe-projection-biases=false"}).value();
  EXPECT_EQ(FlagsOf(biases, none), " --moe-projection-biases=false --router gpt-oss");
}

TEST(ReproduceTest, QuotesForAShell) {
  EXPECT_EQ(ShellQuote("a/b-c_d.e:f=1,2+3@4%"), "a/b-c_d.e:f=1,2+3@4%");
  EXPECT_EQ(ShellQuote(""), "''");
  EXPECT_EQ(ShellQuote("a b"), "'a b'");
  EXPECT_EQ(ShellQuote("$x`y`\n"), "'$x`y`\n'");
}

TEST(HelpTest, NamesEveryFlagOnceWithItsDefault) {
  const std::string help = HelpText(TrainHelp());
  for (const Setting& s : TrainSettings().rows()) {
    EXPECT_THAT(help, HasSubstr("--" + s.name)) << s.name;
    const std::string fallback = s.fallback.empty() ? "" : "[" + s.fallback + "]";
    EXPECT_THAT(help, HasSubstr(fallback)) << s.name;
  }
  for (size_t begin = 0; begin < help.size();) {
    const size_t end = help.find('\n', begin);
    EXPECT_LE(end - begin, 100u) << help.substr(begin, end - begin);
    begin = end + 1;
  }
}

// Ranks and checkpoints compare rows: a flag whose value must be the same on all ranks has a row,
// or is listed here.
TEST(SettingsTest, RowsWithTheNameOfAFlagHaveAFlagAndFlagsHaveRows) {
  const Settings settings(TrainSettings());
  lm::TrainConfig config;
  std::set<std::string> rows;
  for (const SettingRow& row : lm::RowsOf(config)) {
    absl::string_view name = row.name;
    if (!absl::ConsumePrefix(&name, "--")) continue;
    EXPECT_NE(settings.Find(name), nullptr) << name;
    EXPECT_TRUE(rows.emplace(name).second) << name;
  }
  Strings without;
  for (const Setting& setting : settings.table()) {
    const bool compared = !setting.flag_only && !setting.is(kPerRank | kByContent | kPlacement);
    if (compared && rows.count(setting.name) == 0) without.push_back(setting.name);
  }
  EXPECT_THAT(without, ElementsAre("tokens-dtype",              // the hash of the text has it
                                   "upcycle", "upcycle-noise",  // of initial weights
                                   "train-batch-size", "gradient-accumulation-steps",
                                   // Their rows have the names of fields, which checkpoints hold.
                                   "init-method-std", "dense-ffn-hidden-size",
                                   "mesh",                // stands for flags of a layout
                                   "checkpoint-timeout",  // no result depends on it
                                   "profile-step-start", "profile-step-end"));  // CheckRecords
}

TEST(SettingsTest, NamesAndAliasesAreUnique) {
  const Settings settings(TrainSettings());
  Strings names = settings.Names();
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end());
}

}  // namespace
}  // namespace moe::cli
