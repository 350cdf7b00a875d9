#include <filesystem>
#include <fstream>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "moe/cli/base/command.h"
#include "moe/cli/base/settings.h"
#include "moe/cli/train/train_options.h"
#include "tests/moe/cli/settings_harness.h"

namespace moe::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Load;
using testing::LoadError;
using testing::Make;
using testing::MakeError;
using testing::Strings;

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

TEST(PrecedenceTest, ALosingValueIsCheckedToo) {
  EXPECT_THAT(LoadError({"--steps", "1"}, {"MOE_STEPS=many"}), HasSubstr("MOE_STEPS is 'many'"));
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

TEST(FlagTest, UnknownOnesSuggestTheNearest) {
  EXPECT_EQ(LoadError({"--num-expert", "8"}),
            "unknown flag '--num-expert'; did you mean '--num-experts'?");
  EXPECT_EQ(LoadError({"--top-k=2"}), "unknown flag '--top-k'; did you mean '--topk'?");
  EXPECT_EQ(LoadError({"-ep", "2"}), "unknown flag '-ep'; did you mean '--ep'?");
  // Of two that are as near, one that has all of it.
  EXPECT_EQ(LoadError({"--ffn-hidden-size", "8"}),
            "unknown flag '--ffn-hidden-size'; did you mean '--moe-ffn-hidden-size'?");
  EXPECT_EQ(LoadError({"--zzzzzzzz"}), "unknown flag '--zzzzzzzz'; --help lists all flags");
  // No abbreviations: a flag added later must not change what a script means.
  EXPECT_THAT(LoadError({"--num-exp", "8"}), HasSubstr("unknown flag"));
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
  EXPECT_EQ(LoadError({"--bf16=false"}), "--bf16 is false, expected no value: it is --dtype bf16");
  EXPECT_EQ(Load({}, {"MOE_TRAIN_ITERS=3"})->integer("steps"), 3);
  EXPECT_EQ(Load({}, {}, R"({"global_batch_size": 5})")->integer("train-batch-size"), 5);
  EXPECT_EQ(LoadError({"--train-iter", "8"}),
            "unknown flag '--train-iter'; did you mean '--train-iters'?");
}

TEST(FlagTest, ThoseOfMegatronWithoutACounterpartSayWhy) {
  EXPECT_EQ(LoadError({"--load=x"}),
            "unknown flag '--load'; moe train goes on from a checkpoint by --resume");
  EXPECT_EQ(LoadError({"--tensor-model-parallel-size", "2"}),
            "unknown flag '--tensor-model-parallel-size'; only experts are split over ranks, by "
            "--ep");
  EXPECT_EQ(LoadError({"--dp", "2"}), "unknown flag '--dp'; it is the number of ranks over --ep");
}

TEST(FlagTest, MalformedOnesSayWhatWasExpected) {
  EXPECT_EQ(LoadError({"--steps"}), "--steps has no value, expected --steps N");
  EXPECT_EQ(LoadError({"--steps", "--seed", "1"}), "--steps has no value, expected --steps N");
  EXPECT_EQ(LoadError({"--steps=ten"}), "--steps is 'ten', expected a whole number below 2^31");
  EXPECT_EQ(LoadError({"--steps", "3000000000"}),
            "--steps is '3000000000', expected a whole number below 2^31");
  EXPECT_EQ(LoadError({"--lr", "nan"}), "--lr is 'nan', expected a finite number");
  EXPECT_EQ(LoadError({"--dtype", "fp16"}),
            "--dtype is 'fp16', expected one of f32, bf16, f16; did you mean 'f16'?");
  EXPECT_EQ(LoadError({"--router", "mixtrall"}),
            "--router is 'mixtrall', expected one of switch, gshard, topk, mixtral, qwen2, qwen3, "
            "olmoe, deepseek-v2, deepseek-v3, gpt-oss, llama4, longcat, expert-choice, noisy-topk, "
            "sinkhorn, sparsemixer; did you mean 'mixtral'?");
  EXPECT_EQ(LoadError({"--capacity-factor", "nil"}),
            "--capacity-factor is 'nil', expected a finite number or none");
  EXPECT_EQ(LoadError({"book.txt"}),
            "unexpected argument 'book.txt', expected flags: --name value");
}

TEST(FlagTest, ASwitchNeedsNoValue) {
  EXPECT_TRUE(Load({"--quiet", "--steps", "1"})->on("quiet"));
  EXPECT_FALSE(Load({"--quiet=false"})->on("quiet"));
  EXPECT_FALSE(Load({})->on("quiet"));
  EXPECT_TRUE(Load({"-v"})->on("verbose"));
  EXPECT_TRUE(Load({}, {"MOE_QUIET=true"})->on("quiet"));
  EXPECT_THAT(LoadError({}, {"MOE_QUIET=yes"}), HasSubstr("expected true or false"));
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
  EXPECT_THAT(LoadError({}, {"MOE_TOPK=2", "MOE_ROUTER_TOPK=1"}),
              HasSubstr("MOE_ROUTER_TOPK already says 1"));
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
  EXPECT_EQ(s.text("lr"), "2.5e-3");  // as it stands in the file
}

TEST(ConfigTest, RefusesWhatItDoesNotKnow) {
  EXPECT_THAT(LoadError({}, {}, R"({"num_expert": 4})"),
              HasSubstr("unknown key 'num_expert'; did you mean 'num_experts'?"));
  EXPECT_THAT(LoadError({}, {}, R"({"optimizer": {"params": {"lrr": 1}}})"),
              HasSubstr("unknown key 'optimizer.params.lrr'; did you mean 'optimizer.params.lr'?"));
  EXPECT_THAT(LoadError({}, {}, R"({"seed": {"value": 1}})"),
              HasSubstr("unknown key 'seed.value'"));
  EXPECT_THAT(LoadError({}, {}, R"({"zzzzzzz": {}})"), HasSubstr("unknown key 'zzzzzzz'"));
  EXPECT_THAT(LoadError({}, {}, R"({"config": "x"})"), HasSubstr("unknown key 'config'"));
  EXPECT_THAT(LoadError({}, {}, R"({"zero_optimization": {"stage": 3}})"),
              HasSubstr("zero_optimization.stage is '3', expected one of 0, 1, 2"));
  EXPECT_THAT(LoadError({}, {}, R"({"num_expert": 4, "steps": true, "zzzzzzz": 1})"),
              ::testing::AllOf(HasSubstr("'num_expert'; did you mean"), HasSubstr("steps is true"),
                               HasSubstr("unknown key 'zzzzzzz'")));
}

TEST(ConfigTest, RefusesMalformedDocuments) {
  EXPECT_THAT(LoadError({}, {}, "{\n  \"steps\": 1,\n}"), HasSubstr("malformed JSON, line 3"));
  EXPECT_THAT(LoadError({}, {}, R"({"steps": 1, "steps": 2})"),
              HasSubstr("key 'steps' stands there twice"));
  EXPECT_THAT(LoadError({}, {}, R"({"optimizer": {"params": {"lr": 1, "lr": 1}}})"),
              HasSubstr("key 'optimizer.params.lr' stands there twice"));
  EXPECT_THAT(LoadError({}, {}, "[1]"), HasSubstr("expected { ... }"));
  EXPECT_THAT(LoadError({}, {}, R"({"steps": [1]})"), HasSubstr("steps is a list"));
  EXPECT_THAT(LoadError({}, {}, R"({"out": 3})"), HasSubstr("out is 3, expected a string"));
  EXPECT_THAT(LoadError({}, {}, R"({"steps": true})"), HasSubstr("expected a number"));
  EXPECT_THAT(LoadError({}, {}, std::string(100, '[')), HasSubstr("expected { ... }"));
  EXPECT_THAT(LoadError({}, {}, R"({"a":)" + std::string(100, '[')), HasSubstr("too deeply"));
  EXPECT_THAT(LoadError({}, {}, R"({"topk": 1, "moe_router_topk": 2})"),
              HasSubstr("for the same setting"));
}

TEST(ConfigTest, AMissingFileIsNamed) {
  const absl::Status status = Load({"--config", "/no/such.json"}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("'/no/such.json'"));
}

TEST(BatchTest, OneOfThreeFollowsFromTheOthers) {
  const auto sizes = [](const Strings& args) {
    const auto options = Make(args).value();
    return std::make_pair(options.train.micro_batch_size, options.train.micro_batches);
  };
  using Pair = std::pair<int64_t, int64_t>;
  const lm::TrainConfig d;
  EXPECT_EQ(sizes({}), Pair(d.micro_batch_size, d.micro_batches));
  EXPECT_EQ(sizes({"--train-batch-size", "24", "--micro-batch-size", "3"}), Pair(3, 8));
  EXPECT_EQ(sizes({"--train-batch-size", "24", "--micro-batches", "6"}), Pair(4, 6));
  EXPECT_EQ(sizes({"--gradient-accumulation-steps", "3", "--micro-batch-size", "2"}), Pair(2, 12));
  EXPECT_EQ(sizes({"--gradient-accumulation-steps", "3", "--train-batch-size", "36"}), Pair(3, 12));
  EXPECT_EQ(sizes({"--train-batch-size", "24", "--micro-batch-size", "3", "--micro-batches", "8"}),
            Pair(3, 8));
}

TEST(BatchTest, ContradictionsNameBothSides) {
  EXPECT_EQ(MakeError({"--train-batch-size", "25", "--micro-batch-size", "3"}),
            "--train-batch-size is 25, expected a multiple of --micro-batch-size 3, nearest 24");
  EXPECT_EQ(
      MakeError({"--train-batch-size", "24", "--micro-batch-size", "3", "--micro-batches", "7"}),
      "--train-batch-size is 24, expected 21: --micro-batch-size 3 x 7 micro-batches");
  EXPECT_EQ(MakeError({"--gradient-accumulation-steps", "2", "--micro-batches", "7"}),
            "--micro-batches is 7, expected 8: --gradient-accumulation-steps 2 x 4 ranks");
  EXPECT_EQ(MakeError({"--train-batch-size", "1", "--micro-batch-size", "3"}),
            "--train-batch-size is 1, expected a multiple of --micro-batch-size 3, nearest 3");
  EXPECT_EQ(MakeError({"--micro-batches", "0"}), "--micro-batches is 0, expected at least 1");
}

TEST(TrainOptionsTest, GeneralRoutingFlagsChooseTheGeneralGate) {
  const RouterConfig router =
      Make({"--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"})
          ->train.model.moe.router;
  EXPECT_EQ(router.gate, "topk");
  EXPECT_EQ(router.score_function, ScoreFunction::kSigmoid);
  EXPECT_TRUE(router.expert_bias);
  EXPECT_EQ(MakeError({"--router", "mixtral", "--moe-router-pre-softmax"}),
            "--moe-router-pre-softmax is set, expected its default: gate 'mixtral' does not read "
            "it");
  // A gate that always has the bias may be asked for it.
  EXPECT_TRUE(Make({"--router", "deepseek-v3", "--moe-router-enable-expert-bias"}).ok());
  EXPECT_EQ(Make({"--moe-router-load-balancing-type", "sinkhorn"})->train.model.moe.router.gate,
            "sinkhorn");
  EXPECT_THAT(LoadError({"--moe-router-load-balancing-type", "sinkhorn", "--router", "mixtral"}),
              HasSubstr("expected sinkhorn"));
  EXPECT_THAT(MakeError({"--moe-router-num-groups", "3", "--moe-router-group-topk", "1"}),
              HasSubstr("--moe-router-num-groups is 3, expected a divisor of 8"));
  EXPECT_THAT(MakeError({"--moe-shared-expert-gate"}), HasSubstr("intermediate-size"));
}

TEST(TrainOptionsTest, BadValuesNameTheFlagAndAChoice) {
  EXPECT_THAT(MakeError({"--ep", "3"}), HasSubstr("1, 2, 4"));
  EXPECT_THAT(MakeError({"--topk", "9"}),
              ::testing::StartsWith("--moe-router-topk is 9, expected at most 8"));
  EXPECT_THAT(MakeError({"--capacity-factor", "0"}),
              ::testing::StartsWith("--moe-expert-capacity-factor is 0, expected"));
  EXPECT_THAT(MakeError({"--capacity-factor", "-1"}), HasSubstr("is -1, expected"));
  EXPECT_THAT(MakeError({"--hidden-size", "100", "--num-attention-heads", "3"}),
              ::testing::StartsWith("--hidden-size is 100, expected"));
  EXPECT_EQ(
      MakeError({"--num-attention-heads", "6", "--kv-channels", "8", "--num-query-groups", "4"}),
      "--num-query-groups is 4, expected a divisor of the 6 attention heads, nearest 3");
  EXPECT_EQ(MakeError({"--head-dim", "7"}),
            "--kv-channels is 7, expected an even number, nearest 8");
  EXPECT_EQ(MakeError({"--vocab-size", "255"}),
            "--vocab-size is 255, expected at least 256, one for every byte of --data");
  EXPECT_THAT(MakeError({"--vocab-size", "2000000000", "--hidden-size", "1024"}),
              HasSubstr("parameters, expected at most"));
  EXPECT_THAT(MakeError({"--all-reduce", "library"}), HasSubstr("expected ring or direct"));
  EXPECT_TRUE(Make({"--all-reduce", "library"}, {.ranks = 4, .backend = Backend::kMpi}).ok());
  EXPECT_THAT(MakeError({"--dispatch", "hierarchical", "--ep", "4", "--node-size", "3"}),
              HasSubstr("--node-size is 3, expected 0 (one node) or a divisor of --ep 4"));
  EXPECT_THAT(MakeError({"--moe-token-group", "7"}), HasSubstr("--moe-token-group is 7, expected"));
  EXPECT_THAT(MakeError({"--moe-token-group", "0"}), HasSubstr("--moe-token-group is 0, expected"));
  for (const char* flag :
       {"--steps", "--seq-length", "--micro-batch-size", "--num-layers", "--hidden-size",
        "--num-attention-heads", "--num-experts", "--topk", "--moe-ffn-hidden-size",
        "--moe-layer-freq", "--ep", "--threads", "--moe-overlap-degree", "--eval-sequences",
        "--log-interval", "--comm-timeout", "--bucket-size-mb", "--lr", "--lr-decay-steps"}) {
    EXPECT_THAT(MakeError({flag, "0"}), HasSubstr(" is 0")) << flag;
  }
  EXPECT_THAT(MakeError({"--adam-beta1", "1"}), HasSubstr("--adam-beta1 is 1, expected"));
  EXPECT_THAT(MakeError({"--hidden-size", "1000000000", "--moe-ffn-hidden-size", "1000000000"}),
              HasSubstr("parameters, expected at most"));
}

// A copy of a golden model with changes to its config.json.
class ChangedModel {
 public:
  explicit ChangedModel(const std::string& family, const char* changes)
      : path_(absl::StrCat(::testing::TempDir(), "/changed_", getpid())) {
    std::filesystem::copy(absl::StrCat(MOE_GOLDEN_MODELS, "/", family), path_);
    auto config = nlohmann::json::parse(std::ifstream(path_ + "/config.json"));
    config.merge_patch(nlohmann::json::parse(changes));
    std::ofstream(path_ + "/config.json") << config;
  }
  ~ChangedModel() { std::filesystem::remove_all(path_); }
  ChangedModel(const ChangedModel&) = delete;
  ChangedModel& operator=(const ChangedModel&) = delete;

  const std::string& path() const { return path_; }
  // Sets warnings.
  absl::StatusOr<Settings> LoadWith(Strings flags) {
    flags.insert(flags.begin(), {"--init-from", path_});
    warnings.clear();
    return LoadTrainSettings(flags, {}, warnings);
  }
  Strings warnings;

 private:
  std::string path_;
};

// As transformers 5: the golden Mixtral has an output layer of its own, whatever config.json says.
TEST(TrainOptionsTest, InitFromTiesEmbeddingsWhereTheFilesDo) {
  ChangedModel model("mixtral", R"({"tie_word_embeddings": true})");
  EXPECT_EQ(model.LoadWith({}).value().text("tie-word-embeddings"), "false");
  EXPECT_THAT(model.warnings, ::testing::Contains(HasSubstr("they are not tied")));
  EXPECT_THAT(LoadError({"--init-from", model.path(), "--tie-word-embeddings"}),
              HasSubstr("--tie-word-embeddings is true, expected false, as --init-from"));
}

TEST(TrainOptionsTest, InitFromTakesWhatTheModelIsTrainedWithUnlessAFlagDoes) {
  ChangedModel model("mixtral", R"({"output_router_logits": true, "router_aux_loss_coef": 0.25,
      "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": [2, 7]})");
  const auto settings = model.LoadWith({}).value();
  EXPECT_THAT(model.warnings, ElementsAre());
  EXPECT_EQ(settings.text("moe-aux-loss-coeff"), "0.5");  // k = 2 times, as docs/routing.md has it
  EXPECT_EQ(settings.text("max-position-embeddings"), "4096");
  EXPECT_EQ(settings.text("bos-token-id"), "1");
  EXPECT_EQ(settings.text("eos-token-id"), "2,7");
  const auto given =
      model.LoadWith({"--moe-aux-loss-coeff", "0.125", "--eos-token-id", "3"}).value();
  EXPECT_EQ(given.text("moe-aux-loss-coeff"), "0.125");
  EXPECT_EQ(given.text("eos-token-id"), "3");
  EXPECT_EQ(MakeError({"--eos-token-id", "1;2"}),
            "--eos-token-id is 1;2, expected ids between commas: 1,2,3");
}

TEST(TrainOptionsTest, InitFromNamesWhatTransformersTrainsWithOtherwise) {
  ChangedModel model("mixtral", R"({"attention_dropout": 0.5, "router_jitter_noise": 0.125})");
  ASSERT_TRUE(model.LoadWith({}).ok());
  EXPECT_THAT(model.warnings,
              ElementsAre(absl::StrCat(
                  "--init-from ", model.path(),
                  ": transformers would train with attention_dropout 0.5, with router_jitter_noise "
                  "0.125, without a balance loss, as output_router_logits is false (here "
                  "--moe-aux-loss-coeff is 0.01)")));
  for (const Strings& flags :
       {Strings{"--moe-aux-loss-coeff", "0"}, {"--moe-router-load-balancing-type", "none"}}) {
    ASSERT_TRUE(model.LoadWith(flags).ok());
    EXPECT_THAT(model.warnings, ElementsAre(::testing::EndsWith("router_jitter_noise 0.125")));
  }
}

// The golden models have fewer tokens than bytes: no run of text can start from them.
TEST(TrainOptionsTest, InitFromSetsTheModelAndRefusesAnother) {
  const std::string folder = absl::StrCat(MOE_GOLDEN_MODELS, "/qwen2_moe");
  const auto settings = Load({"--init-from", folder, "--rope-theta", "10000"}).value();
  for (const auto& [name, text] : {std::pair("num-layers", "2"),
                                   {"num-query-groups", "2"},
                                   {"kv-channels", "4"},
                                   {"add-qkv-bias", "true"},
                                   {"norm-epsilon", "1e-06"},
                                   {"router", "qwen2"},
                                   {"moe-layer-freq", "2"},
                                   {"dense-ffn-hidden-size", "20"},
                                   {"moe-shared-expert-gate", "true"}}) {
    EXPECT_EQ(settings.text(name), text) << name;
  }
  EXPECT_EQ(LoadError({"--init-from", folder, "--num-layers", "4"}),
            absl::StrCat("--num-layers is 4, expected 2, as --init-from ", folder, " has it"));
  EXPECT_THAT(LoadError({"--init-from", folder, "--norm-epsilon", "1e-5"}),
              HasSubstr("--norm-epsilon is 1e-5, expected 1e-06, as"));
  EXPECT_EQ(Load({"--init-from", "/none"}).status().code(), absl::StatusCode::kNotFound);
}

TEST(TrainOptionsTest, DataIsNeeded) {
  const auto settings = Load({}).value();
  EXPECT_THAT(testing::ErrorOf(MakeTrainOptions(settings, {.ranks = 4}).status()),
              ::testing::StartsWith("--data is missing"));
}

TEST(TrainOptionsTest, ThreadsShareTheCores) {
  EXPECT_EQ(Make({}, {.ranks = 4, .local_ranks = 4, .cores = 16})->train.threads, 4);
  EXPECT_EQ(Make({}, {.ranks = 4, .local_ranks = 4, .cores = 2})->train.threads, 1);
  EXPECT_EQ(Make({"--threads", "3"}, {.ranks = 4, .local_ranks = 4, .cores = 2})->train.threads, 3);
}

// 256 * 8 twice (embedding, output), 8 (last norm); per layer 4 * 64 + 16 for attention and norms;
// MoE layer: router 4 * 8, experts of 3 * 8 * 5, shared expert 3 * 8 * 7; dense 3 * 8 * (2 * 5).
TEST(TrainOptionsTest, SizeCountsEveryParameterOnce) {
  lm::TransformerConfig model;
  model.hidden_size = 8;
  model.num_layers = 3;
  model.moe_layer_freq = 2;
  model.moe.router.num_experts = 4;
  model.moe.router.top_k = 2;
  model.moe.ffn_hidden_size = 5;
  model.moe.shared_expert_ffn_hidden_size = 7;
  const int64_t rest = 2 * 256 * 8 + 8 + 3 * (4 * 64 + 16) + (32 + 168) + 2 * 240;
  EXPECT_EQ(SizeOf(model).total, rest + 4 * 120);
  EXPECT_EQ(SizeOf(model).active, rest + 2 * 120);

  // 4 heads of queries, 2 of keys and of values, 6 wide; a norm of 6 for queries and keys each.
  lm::TransformerConfig grouped = model;
  grouped.num_query_groups = 2;
  grouped.kv_channels = 6;
  grouped.qkv_bias = true;
  grouped.qk_norm = lm::QkNorm::kHead;
  grouped.tied_embeddings = true;
  const int64_t attention = 8 * (4 + 2 * 2 + 4) * 6 + 8 * 6 + 2 * 6 - 4 * 64;
  EXPECT_EQ(SizeOf(grouped).total, SizeOf(model).total - 256 * 8 + 3 * attention);
  grouped.qk_norm = lm::QkNorm::kHeads;
  EXPECT_EQ(SizeOf(grouped).total, SizeOf(model).total - 256 * 8 + 3 * (attention + 24));

  // A bias of 4 on the logits; biases of 2 * 5 + 8 on an expert; a gate of 8 on the shared expert.
  model.moe.router.gate = "gpt-oss";
  model.moe.projection_biases = true;
  model.moe.gated_shared_expert = true;
  EXPECT_EQ(SizeOf(model).active, rest + 4 + 2 * (120 + 18) + 8);
  // Two rows of logits per output, identity experts among them: (4 + 2) * 2 rows instead of 4.
  model.moe = {.router = {.gate = "noisy-topk",
                          .num_experts = 4,
                          .num_zero_experts = 2,
                          .top_k = 2,
                          .hidden_size = 8},
               .ffn_hidden_size = 5};
  EXPECT_EQ(SizeOf(model).active, rest - 168 + 8 * 8 + 2 * 120);
}

TEST(ReproduceTest, FlagsGiveTheSameSettings) {
  const auto s = Load({"--data", "my text/it's", "--data", "b", "--ep", "2", "--steps", "7",
                       "--moe-pad-expert-input-to-capacity", "--capacity-factor", "1.5", "-q"},
                      {"MOE_SEED=5"}, R"({"num_layers": 3, "micro_batches": 8})");
  ASSERT_TRUE(s.ok()) << s.status();
  EXPECT_EQ(
      FlagsOf(*s, [](const Setting& setting) { return setting.name == "quiet"; }),
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
  const auto biases = Load({"--router", "gpt-oss", "--moe-projection-biases=false"});
  ASSERT_TRUE(biases.ok()) << biases.status();
  EXPECT_EQ(FlagsOf(*biases, none), " --moe-projection-biases=false --router gpt-oss");
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

TEST(SettingsTest, NamesAndAliasesAreUnique) {
  const Settings settings(TrainSettings());
  Strings names = settings.Names();
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end());
}

}  // namespace
}  // namespace moe::cli
