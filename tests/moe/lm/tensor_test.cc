// Runs whose ranks share matrices (TP), against one rank that has all of them.
#include <optional>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "gating/capacity.h"
#include "moe/lm/generation.h"
#include "tests/moe/lm/train_harness.h"
#include "tests/sanitizers.h"

namespace moe::lm::testing {
namespace {

using ::moe::testing::kSanitized;
using ::moe::testing::kThreadSanitized;
using ::moe::testing::Layout;

// A dense layer and a mixture with a shared expert; eight heads, of which pairs share one of keys;
// items that no number of ranks divides; micro-batches that not every rank has.
TrainConfig TensorConfig() {
  TrainConfig config = SmallConfig();
  config.model.hidden_size = 24;
  config.model.num_attention_heads = 16;
  config.model.num_query_groups = 8;
  config.model.kv_channels = 4;
  config.model.qkv_bias = true;
  config.model.moe_layer_freq = 2;
  config.model.dense_ffn_hidden_size = 140;  // nine items, the last of 12
  config.model.moe.router.num_experts = 9;
  config.model.moe.router.z_loss_coeff = 0.01f;
  config.model.moe.router.capacity_factor = 1.5f;  // over all rows of a micro-batch
  config.model.moe.shared_expert_ffn_hidden_size = 128;
  config.model.moe.gated_shared_expert = true;
  config.trainer.session.tensor_leaves = 8;
  config.trainer.bucket_bytes = 30'000;
  config.micro_batch_size = 1;
  config.trainer.micro_batches = 3;
  config.steps = 3;
  config.evaluation.interval = 0;
  config.evaluation.sequences = 2;
  config.verify_replicas = 3;
  return config;
}

Layout TensorLayout(int tensor, int expert, int ranks, int expert_tensor = 1) {
  return {
      .ranks = ranks, .expert_parallel = expert, .tensor = tensor, .expert_tensor = expert_tensor};
}
std::string TensorName(const Layout& layout) {
  return absl::StrCat("TP ", layout.tensor, ", EP ", layout.expert_parallel, ", ETP ",
                      layout.expert_tensor, ", ", layout.ranks, " ranks");
}

std::vector<Layout> TensorLayouts() {
  if (kSanitized) return {TensorLayout(2, 2, 4), TensorLayout(3, 3, 3)};
  return {TensorLayout(2, 2, 2), TensorLayout(2, 2, 4), TensorLayout(2, 4, 4),
          TensorLayout(3, 3, 3), TensorLayout(4, 4, 8), TensorLayout(8, 8, 8)};
}

TEST(TensorTest, LossesAndWeightsHaveTheBitsOfOneRank) {
  const TrainConfig config = TensorConfig();
  const Trace expected = TrainIn(config);
  ASSERT_TRUE(expected.status.ok()) << expected.status;
  for (const Layout& layout : TensorLayouts()) {
    SCOPED_TRACE(TensorName(layout));
    const Trace got = TrainIn(config, layout);
    ExpectSameTrace(got, expected);
    EXPECT_EQ(got.report.parameters_total, expected.report.parameters_total);
  }
}

// TensorConfig, whose experts have columns for three ranks.
TrainConfig ExpertTensorConfig() {
  TrainConfig config = TensorConfig();
  config.model.moe.ffn_hidden_size = 40;  // three items, the last of 8
  return config;
}

// Ranks that share experts, alone and with ranks that share a micro-batch: of one and of two
// expert-tensor groups, and replicas of both. About 0.5 s.
TEST(TensorTest, ExpertsThatRanksShareHaveTheBitsOfOneRank) {
  const TrainConfig config = ExpertTensorConfig();
  const Trace expected = TrainIn(config);
  ASSERT_TRUE(expected.status.ok()) << expected.status;
  std::vector<Layout> layouts = {TensorLayout(1, 1, 2, 2), TensorLayout(2, 2, 8, 2)};
  if (!kSanitized) {
    layouts.insert(layouts.end(),
                   {TensorLayout(1, 2, 4, 2), TensorLayout(1, 1, 3, 3), TensorLayout(2, 1, 2, 2),
                    TensorLayout(4, 2, 4, 2), TensorLayout(3, 2, 6, 3), TensorLayout(1, 4, 8, 2)});
  }
  for (const Layout& layout : layouts) {
    SCOPED_TRACE(TensorName(layout));
    const Trace got = TrainIn(config, layout);
    ExpectSameTrace(got, expected);
    EXPECT_EQ(got.report.parameters_total, expected.report.parameters_total);
    EXPECT_EQ(got.report.grid_loss_tensor, expected.report.grid_loss_tensor);
  }
}

// By docs/parallelism.md, of two ranks: a node each of every sum, no slot dropped; and the counts
// of each of two rounds.
TEST(TensorTest, ExpertTensorRanksSendAsManyBytesAsTheFormulaSays) {
  TrainConfig config = ExpertTensorConfig();
  config.model.moe.router.capacity_factor = std::nullopt;
  config.steps = 2;
  const Trace got = TrainIn(config, TensorLayout(1, 1, 2, 2));
  ASSERT_TRUE(got.status.ok()) << got.status;
  const int64_t t = config.sequence_length, h = config.model.hidden_size, b = sizeof(float);
  const int64_t rows = config.trainer.micro_batches * config.model.moe.router.top_k * t;
  const int64_t counts = int64_t{2} * 2 * 4 * config.model.moe.router.num_experts;
  EXPECT_EQ(got.report.tensor_bytes, config.steps * (2 * rows * (b + 4) * h + counts));
}

// By docs/parallelism.md, of two ranks: a node each of every sum, T even.
TEST(TensorTest, TensorRanksSendAsManyBytesAsTheFormulaSays) {
  TrainConfig config = TensorConfig();
  config.model.qk_norm = QkNorm::kHeads;
  config.steps = 2;
  const Trace got = TrainIn(config, TensorLayout(2, 2, 4));
  ASSERT_TRUE(got.status.ok()) << got.status;
  const int64_t t = config.sequence_length, h = config.model.hidden_size, b = sizeof(float);
  // Rows gathered forward, and both operands of weight gradients backward; nodes of sums each way.
  const int64_t networks = 2 * config.model.num_layers;  // attention; a dense or shared network
  const int64_t rows = (3 * networks + 1) * b * t * h / 2;
  const int64_t sums = (2 * networks + 1) * 4 * t * h / 2;
  const RouterConfig& router = config.model.moe.router;
  const int64_t experts = 4 * t * (router.num_experts + router.top_k) / 2;
  const int64_t output = (4 + b) * t * config.model.vocab_size / 4;
  const int64_t norms = 2 * config.model.num_layers * 2 * 4 * t;  // of q and k, each way
  EXPECT_EQ(got.report.tensor_bytes, 2 * config.steps * config.trainer.micro_batches *
                                         (rows + sums + experts + output + norms));
  EXPECT_EQ(TrainIn(config, {.ranks = 2}).report.tensor_bytes, 0);
}

// Biases of gate and up are cut with their columns, and that of down is whole on all ranks that
// share an expert, which sum its gradient: over groups of them, copies, ZeRO and late gradients.
TEST(TensorTest, BiasesOfSharedExpertsHaveTheBitsOfOneRank) {
  TrainConfig config = ExpertTensorConfig();
  config.model.moe.projection_biases = true;
  const Trace expected = TrainIn(config);
  ASSERT_TRUE(expected.status.ok()) << expected.status;
  for (const ZeroStage zero : {ZeroStage::kNone, ZeroStage::kWeights}) {
    for (const Layout& layout :
         {TensorLayout(1, 1, 2, 2), TensorLayout(2, 2, 8, 2), TensorLayout(3, 1, 3, 3)}) {
      if (kSanitized && layout.expert_tensor == 3) continue;
      SCOPED_TRACE(absl::StrCat(TensorName(layout), ", ZeRO ", NameOf(zero, kZeroWords)));
      TrainConfig with = config;
      with.trainer.zero = zero;
      const Trace got = TrainIn(with, layout);
      ExpectSameTrace(got, expected);
      EXPECT_EQ(got.report.parameters_total, expected.report.parameters_total);
      EXPECT_EQ(got.report.grid_loss_tensor, expected.report.grid_loss_tensor);
    }
  }
}

// Experts have the rows of one rank: zeros are behind those of a micro-batch, also in bfloat16,
// which adds pairs of rows, and where a rank has no micro-batch. About 0.3 s.
TEST(TensorTest, InputPaddedToCapacityHasTheBitsOfOneRank) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    TrainConfig config = ExpertTensorConfig();
    config.model.moe.router.pad_to_capacity = true;
    config.model.moe.projection_biases = true;
    config.trainer.dtype = dtype;
    const Trace expected = TrainIn(config);
    ASSERT_TRUE(expected.status.ok()) << expected.status;
    for (const Layout& layout : {TensorLayout(2, 2, 4), TensorLayout(1, 1, 2, 2),
                                 TensorLayout(3, 2, 6, 3), TensorLayout(2, 2, 8, 2)}) {
      if (kSanitized && layout.expert_tensor != 2) continue;
      SCOPED_TRACE(TensorName(layout));
      Layout with = layout;
      with.overlap = layout.ranks == 4 ? 2 : 1;
      ExpectSameTrace(TrainIn(config, with), expected);
    }
  }
}

// Ranks that share a micro-batch and experts gather C rows for each of these, filled or not: what
// they send beside ranks that share a micro-batch alone, with a node each of every sum.
TEST(TensorTest, RowsOfPaddingTravel) {
  TrainConfig config = ExpertTensorConfig();
  config.model.moe.router.pad_to_capacity = true;
  config.steps = 2;
  const Trace both = TrainIn(config, TensorLayout(2, 1, 2, 2));
  const Trace rows = TrainIn(config, TensorLayout(2, 2, 2));
  ASSERT_TRUE(both.status.ok() && rows.status.ok()) << both.status << rows.status;
  const int64_t t = config.sequence_length, h = config.model.hidden_size, b = sizeof(float);
  const RouterConfig& router = config.model.moe.router;
  const int64_t experts = router.num_experts, batches = config.trainer.micro_batches;
  const int64_t capacity = ExpertCapacity(t, router.top_k, router.num_experts, 1.5);
  const int64_t sent = 2 * experts * capacity * (b + 4) * h + 2 * 4 * experts;  // and counts
  EXPECT_EQ(both.report.tensor_bytes - rows.report.tensor_bytes, config.steps * batches * sent);
}

// What differs: types, leaves, an output layer that is whole on each rank, layers computed again,
// parts of the state, chunks of the exchange, and weights on the experts' input.
TEST(TensorTest, OtherModelsAndSettingsHaveTheBitsOfOneRank) {
  TrainConfig half = ExpertTensorConfig();
  half.trainer.dtype = DType::kBFloat16;
  half.trainer.session.tensor_leaves = 16;
  half.trainer.zero = ZeroStage::kWeights;
  half.model.moe.overlap_degree = 2;
  half.model.qk_norm = QkNorm::kHead;
  TrainConfig tied = ExpertTensorConfig();
  tied.trainer.session.tensor_leaves = 4;
  tied.model.tied_embeddings = true;
  tied.model.recompute = Recompute::kLayer;
  tied.trainer.zero = ZeroStage::kOptimizer;
  tied.model.moe.router.gate = "llama4";
  tied.model.moe.router.top_k = 1;
  tied.model.moe.router.capacity_factor = std::nullopt;
  tied.model.moe.dispatcher.algorithm = DispatchAlgorithm::kDirect;
  TrainConfig all_heads = ExpertTensorConfig();  // sums of rows that no rank has whole
  all_heads.trainer.session.tensor_leaves = 16;
  all_heads.model.num_attention_heads = 12;  // six heads of keys: some leaves have none
  all_heads.model.num_query_groups = 6;
  all_heads.model.qk_norm = QkNorm::kHeads;
  all_heads.model.recompute = Recompute::kActivations;
  for (const TrainConfig& config : {half, tied, all_heads}) {
    TrainConfig plain = config;
    plain.trainer.zero = ZeroStage::kNone;
    plain.model.moe.overlap_degree = 1;
    plain.model.recompute = Recompute::kNone;
    plain.model.moe.dispatcher.algorithm = DispatchAlgorithm::kStaged;
    const Trace expected = TrainIn(plain);
    ASSERT_TRUE(expected.status.ok()) << expected.status;
    for (const Layout& layout :
         {TensorLayout(2, 4, 4), TensorLayout(3, 3, 3), TensorLayout(2, 2, 4, 2)}) {
      if (kThreadSanitized && layout.tensor == 3) continue;
      SCOPED_TRACE(TensorName(layout));
      Layout with = layout;
      with.dispatch = config.model.moe.dispatcher.algorithm;
      with.overlap = config.model.moe.overlap_degree;
      ExpectSameTrace(TrainIn(config, with), expected);
    }
  }
}

// Rows of a micro-batch that no number of ranks divides, and fewer rows than ranks. About 0.2 s.
TEST(TensorTest, RowsThatRanksCannotShareEvenlyHaveTheBitsOfOneRank) {
  for (const int64_t length : {int64_t{11}, int64_t{3}}) {
    TrainConfig config = TensorConfig();
    config.sequence_length = length;
    config.steps = 2;
    const Trace expected = TrainIn(config);
    ASSERT_TRUE(expected.status.ok()) << expected.status;
    for (const Layout& layout : TensorLayouts()) {
      SCOPED_TRACE(absl::StrCat(TensorName(layout), ", length ", length));
      ExpectSameTrace(TrainIn(config, layout), expected);
    }
  }
}

// Routers whose units are larger than a row of a rank, whose noise is of a token, or that have
// experts at home. About 0.2 s.
TEST(TensorTest, RoutersDecideAboutRowsOfAllRanksAsOneRankDoes) {
  const auto with = [](auto change) {
    TrainConfig config = TensorConfig();
    config.sequence_length = 13;
    config.steps = 2;
    change(config.model.moe.router);
    return config;
  };
  for (const TrainConfig& config : {with([](RouterConfig& router) {
                                      router.gate = "expert-choice";
                                      router.aux_loss_coeff = 0;
                                    }),
                                    with([](RouterConfig& router) {
                                      router.gate = "sinkhorn";
                                      router.top_k = 1;
                                      router.aux_loss_coeff = 0;
                                    }),
                                    with([](RouterConfig& router) {
                                      router.gate = "switch";
                                      router.top_k = 1;
                                      router.input_jitter = 0.2f;
                                      router.drop_policy = DropPolicy::kPosition;
                                    }),
                                    with([](RouterConfig& router) {
                                      router.gate = "gpt-oss";
                                      router.num_zero_experts = 3;
                                      router.load_balancing = LoadBalancing::kSeqAuxLoss;
                                      router.capacity_factor = std::nullopt;
                                    })}) {
    SCOPED_TRACE(config.model.moe.router.gate);
    const Trace expected = TrainIn(config);
    ASSERT_TRUE(expected.status.ok()) << expected.status;
    for (const Layout& layout : {TensorLayout(2, 4, 4), TensorLayout(3, 3, 3)}) {
      SCOPED_TRACE(TensorName(layout));
      ExpectSameTrace(TrainIn(config, layout), expected);
    }
  }
}

TEST(TensorTest, ACheckpointGoesOnAtAnyNumberOfRanksThatShare) {
  const TrainConfig config = ExpertTensorConfig();
  TrainConfig in_parts = config;
  in_parts.trainer.zero = ZeroStage::kOptimizer;
  std::vector<LaidOutRun> saved, resumed;
  for (const Layout& layout : {Layout{}, TensorLayout(2, 2, 8, 2), TensorLayout(3, 3, 3)}) {
    saved.push_back({TensorName(layout), config, layout});
    resumed.push_back({TensorName(layout), in_parts, layout});
  }
  ExpectResumes(saved, resumed, TrainIn(config));
}

// Tokens of `config` one by one behind a prompt.
std::vector<int32_t> TokensOf(TrainConfig config, int tensor, int ranks) {
  config.trainer.session.mesh.tensor = tensor;
  const GenerationOptions options = {.prompt = {116, 104, 101, 32, 116},
                                     .max_new_tokens = 9,
                                     .sampling = {.temperature = 1, .seed = 3}};
  std::vector<int32_t> tokens;
  ::moe::testing::RunLocalRanks(ranks, [&](std::unique_ptr<Communicator> world) -> absl::Status {
    const bool first = world->rank() == 0;
    const ModelWeights weights = {.load = LoadByElement};
    MOE_ASSIGN_OR_RETURN(const auto report, Generate(config, weights, options, std::move(world)));
    if (first) tokens = report.tokens;
    return absl::OkStatus();
  });
  return tokens;
}

// Nothing else has keys and values of own heads in a cache, and ranks without a row: a token has
// one. Logits of a tied and of an output layer that is cut. About 0.2 s.
TEST(TensorTest, TokensOneByOneAreThoseOfOneRank) {
  TrainConfig cut = TensorConfig(), tied = TensorConfig();
  cut.model.qk_norm = QkNorm::kHeads;
  tied.model.tied_embeddings = true;
  tied.trainer.dtype = DType::kBFloat16;
  for (const TrainConfig& config : {cut, tied}) {
    const std::vector<int32_t> expected = TokensOf(config, 1, 1);
    ASSERT_EQ(expected.size(), 9u);
    EXPECT_EQ(TokensOf(config, 2, 2), expected);
    EXPECT_EQ(TokensOf(config, 2, 4), expected);
    EXPECT_EQ(TokensOf(config, 3, 3), expected);
  }
}

TEST(TensorTest, WhatDoesNotFitIsRefusedWithWhatWould) {
  const auto refused = [](const TrainConfig& config, const Layout& layout) {
    const absl::Status status = TrainIn(config, layout).status;
    return absl::StrCat(status.message());
  };
  TrainConfig config = TensorConfig();
  config.trainer.session.tensor_leaves = 1;
  EXPECT_TRUE(absl::StrContains(refused(config, TensorLayout(2, 2, 2)), "--tensor-leaves 8"));
  config.trainer.session.tensor_leaves = 8;
  EXPECT_TRUE(absl::StrContains(refused(config, TensorLayout(2, 1, 2)),
                                "a divisor of --ep 1: 1; or --ep 2"));
  EXPECT_TRUE(absl::StrContains(refused(config, TensorLayout(3, 1, 6, 2)),
                                "a divisor of --ep 1 times --etp 2: 1, 2; or --ep 3"))
      << refused(config, TensorLayout(3, 1, 6, 2));
  EXPECT_TRUE(absl::StrContains(refused(config, TensorLayout(1, 2, 4, 4)),
                                "--etp is 4, expected a divisor of the 2 ranks for each "
                                "expert-parallel index: 1, 2"));
  EXPECT_TRUE(absl::StrContains(refused(config, TensorLayout(1, 1, 2, 2)),
                                "--etp is 2 and --tensor-leaves 8 of 12 columns of experts by 16, "
                                "expected some for each rank: --etp 1"))
      << refused(config, TensorLayout(1, 1, 2, 2));
  config.model.moe.ffn_hidden_size = 40;
  config.model.num_query_groups = 2;
  EXPECT_TRUE(absl::StrContains(refused(config, TensorLayout(4, 4, 4)),
                                "2 heads of keys, expected some for each rank: --tp 2"))
      << refused(config, TensorLayout(4, 4, 4));
  config.model.num_query_groups = 8;
}

}  // namespace
}  // namespace moe::lm::testing
