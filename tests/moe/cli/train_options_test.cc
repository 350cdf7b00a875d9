// The effect of flags of moe train on a run: batches, models of a folder, sizes.
#include "moe/cli/base/train_options.h"

#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "moe/cli/base/settings.h"
#include "moe/plan/model_cost.h"
#include "tests/moe/cli/settings_harness.h"

namespace moe::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Load;
using testing::LoadError;
using testing::Make;
using testing::Strings;

TEST(ExpertParallelTest, AutoIsTheMostRanksThatFit) {
  EXPECT_EQ(MostExpertRanks(8, {}, 64), 8);
  EXPECT_EQ(MostExpertRanks(8, {.pipeline = 2}, 64), 4);
  EXPECT_EQ(MostExpertRanks(12, {}, 8), 6);  // at most the experts
  EXPECT_EQ(MostExpertRanks(7, {}, 4), 1);
  EXPECT_EQ(MostExpertRanks(12, {.tensor = 4}, 64), 12);
  EXPECT_EQ(MostExpertRanks(24, {.tensor = 4}, 9), 8);  // a multiple of --tp
  EXPECT_EQ(MostExpertRanks(16, {.tensor = 4, .expert_tensor = 2}, 64), 8);
  EXPECT_EQ(MostExpertRanks(3, {.tensor = 2}, 8),
            2);  // none: the mesh is refused by its own message
}

TEST(BatchTest, OneOfThreeFollowsFromTheOthers) {
  const auto sizes = [](const Strings& args) {
    const auto options = Make(args).value();
    return std::make_pair(options.train.micro_batch_size, options.train.trainer.micro_batches);
  };
  using Pair = std::pair<int64_t, int64_t>;
  const lm::TrainConfig d;
  EXPECT_EQ(sizes({}), Pair(d.micro_batch_size, d.trainer.micro_batches));
  EXPECT_EQ(sizes({"--train-batch-size", "24", "--micro-batch-size", "3"}), Pair(3, 8));
  EXPECT_EQ(sizes({"--train-batch-size", "24", "--micro-batches", "6"}), Pair(4, 6));
  EXPECT_EQ(sizes({"--gradient-accumulation-steps", "3", "--micro-batch-size", "2"}), Pair(2, 12));
  EXPECT_EQ(sizes({"--gradient-accumulation-steps", "3", "--train-batch-size", "36"}), Pair(3, 12));
  EXPECT_EQ(sizes({"--train-batch-size", "24", "--micro-batch-size", "3", "--micro-batches", "8"}),
            Pair(3, 8));
}

TEST(TrainOptionsTest, GeneralRoutingFlagsChooseTheGeneralGate) {
  const RouterConfig router =
      Make({"--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"})
          ->train.model.moe.router;
  EXPECT_EQ(router.gate, "topk");
  EXPECT_EQ(router.score_function, ScoreFunction::kSigmoid);
  EXPECT_TRUE(router.expert_bias);
  // The bias may be requested for a gate that always has it.
  EXPECT_TRUE(Make({"--router", "deepseek-v3", "--moe-router-enable-expert-bias"}).ok());
  EXPECT_EQ(Make({"--moe-router-load-balancing-type", "sinkhorn"})->train.model.moe.router.gate,
            "sinkhorn");
}

TEST(TrainOptionsTest, AnOrderOfBFloat16IsAWordOrLeftOpen) {
  const auto order_of = [](const Strings& args) {
    return Make(args)->train.trainer.session.bfloat16_order;
  };
  EXPECT_EQ(order_of({"--bf16"}), std::nullopt);
  EXPECT_EQ(order_of({"--bf16", "--bf16-order", "auto"}), std::nullopt);
  EXPECT_EQ(order_of({"--bf16", "--bf16-order", "dot"}), BFloat16Order::kDot);
  EXPECT_EQ(order_of({"--bf16", "--bf16-order", "tile"}), BFloat16Order::kTile);
  EXPECT_EQ(order_of({"--bf16-order", "auto"}), std::nullopt);
  EXPECT_EQ(Load({}, {"MOE_BF16_ORDER=dot"}, R"({"bf16_order": "tile"})")->text("bf16-order"),
            "dot");
  EXPECT_EQ(Load({}, {}, R"({"bf16_order": "tile"})")->text("bf16-order"), "tile");
  const absl::Status cuda = Make({"--bf16", "--device", "cuda", "--bf16-order", "dot"}).status();
  EXPECT_EQ(testing::ErrorOf(cuda),
            "--bf16-order is dot with --device cuda, expected auto: it is an order of products of "
            "bf16 on a CPU");
}

TEST(TrainOptionsTest, WhatThreadsRefuseProcessesTake) {
  EXPECT_TRUE(Make({"--all-reduce", "library"}, {.ranks = 4, .backend = Backend::kMpi}).ok());
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

// As in transformers 5: the golden Mixtral has an output layer of its own, whatever config.json
// says.
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
  EXPECT_EQ(settings.text("moe-aux-loss-coeff"), "0.5");  // k = 2 times, as in docs/routing.md
  EXPECT_EQ(settings.text("max-position-embeddings"), "4096");
  EXPECT_EQ(settings.text("bos-token-id"), "1");
  EXPECT_EQ(settings.text("eos-token-id"), "2,7");
  const auto given =
      model.LoadWith({"--moe-aux-loss-coeff", "0.125", "--eos-token-id", "3"}).value();
  EXPECT_EQ(given.text("moe-aux-loss-coeff"), "0.125");
  EXPECT_EQ(given.text("eos-token-id"), "3");
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

// The golden models have fewer tokens than bytes: a run on text cannot start from them.
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
  // Megatron's name for the width of an expert is also that of dense layers, which are absent here.
  const std::string mixtral = absl::StrCat(MOE_GOLDEN_MODELS, "/mixtral");
  const std::string width = Load({"--init-from", mixtral}).value().text("moe-ffn-hidden-size");
  const auto megatron = Load({"--init-from", mixtral, "--ffn-hidden-size", width});
  EXPECT_TRUE(megatron.ok()) << megatron.status();
}

// A launcher that binds its ranks leaves each less than its share of the machine, or exactly that.
TEST(TrainOptionsTest, ThreadsShareTheCores) {
  const auto threads = [](const Strings& args, int cores, int own_cores) {
    const World world = {.ranks = 4, .local_ranks = 4, .cores = cores, .own_cores = own_cores};
    return Make(args, world)->train.trainer.session.threads;
  };
  EXPECT_EQ(threads({}, 16, 16), 4);
  EXPECT_EQ(threads({}, 16, 4), 4);
  EXPECT_EQ(threads({}, 16, 1), 1);
  EXPECT_EQ(threads({}, 2, 2), 1);
  EXPECT_EQ(threads({"--threads", "3"}, 2, 2), 3);
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
  EXPECT_EQ(plan::SizeOf(model).total, rest + 4 * 120);
  EXPECT_EQ(plan::SizeOf(model).active, rest + 2 * 120);

  // 4 heads of queries, 2 of keys and of values, 6 wide; a norm of 6 for queries and keys each.
  lm::TransformerConfig grouped = model;
  grouped.num_query_groups = 2;
  grouped.kv_channels = 6;
  grouped.qkv_bias = true;
  grouped.qk_norm = lm::QkNorm::kHead;
  grouped.tied_embeddings = true;
  const int64_t attention = 8 * (4 + 2 * 2 + 4) * 6 + 8 * 6 + 2 * 6 - 4 * 64;
  EXPECT_EQ(plan::SizeOf(grouped).total, plan::SizeOf(model).total - 256 * 8 + 3 * attention);
  grouped.qk_norm = lm::QkNorm::kHeads;
  EXPECT_EQ(plan::SizeOf(grouped).total,
            plan::SizeOf(model).total - 256 * 8 + 3 * (attention + 24));

  // A bias of 4 on the logits; biases of 2 * 5 + 8 on an expert; a gate of 8 on the shared expert.
  model.moe.router.gate = "gpt-oss";
  model.moe.projection_biases = true;
  model.moe.gated_shared_expert = true;
  EXPECT_EQ(plan::SizeOf(model).active, rest + 4 + 2 * (120 + 18) + 8);
  // Two rows of logits per output, identity experts included: (4 + 2) * 2 rows instead of 4.
  model.moe = {.router = {.gate = "noisy-topk",
                          .num_experts = 4,
                          .num_zero_experts = 2,
                          .top_k = 2,
                          .hidden_size = 8},
               .ffn_hidden_size = 5};
  EXPECT_EQ(plan::SizeOf(model).active, rest - 168 + 8 * 8 + 2 * 120);
}

}  // namespace
}  // namespace moe::cli
