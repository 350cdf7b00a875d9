// Runs whose layers are in stages of a pipeline, against one rank that has all of them.
#include <algorithm>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moe/lm/text_rounds.h"
#include "tests/moe/lm/train_harness.h"
#include "tests/sanitizers.h"

namespace moe::lm::testing {
namespace {

using ::moe::testing::kSanitized;
using ::moe::testing::kThreadSanitized;
using ::moe::testing::Layout;

// What the pipeline's own axes meet.
struct Case {
  int ranks = 2, pp = 2, vp = 1, ep = 1;
  ScheduleKind schedule = ScheduleKind::k1F1B;
  ZeroStage zero = ZeroStage::kNone;
  Recompute recompute = Recompute::kNone;
  int overlap = 1;
  std::vector<int32_t> layout = {};
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.ranks << " ranks, PP " << c.pp << ", VP " << c.vp << ", EP " << c.ep << ", "
             << NameOf(c.schedule, kScheduleWords) << ", zero " << static_cast<int>(c.zero) << ", "
             << NameOf(c.recompute, kRecomputeWords) << ", overlap " << c.overlap << ", layout "
             << ::testing::PrintToString(c.layout);
}

// Mixtures in every second layer, so that parts have none, one or two; a bias that steps move;
// several buckets; and rounds without a micro-batch.
TrainConfig PipelineConfig() {
  TrainConfig config = SmallConfig();
  config.model.num_layers = 6;
  config.model.moe_layer_freq = 2;
  config.model.moe.router.num_experts = 4;
  config.model.moe.router.load_balancing = LoadBalancing::kGlobalAuxLoss;
  LearnBias(config.model.moe.router);
  config.trainer.micro_batches = 5;
  config.trainer.bucket_bytes = 6'000;
  config.steps = 3;
  config.evaluation.interval = 2;
  config.verify_replicas = 2;
  return config;
}

TrainConfig With(TrainConfig config, const Case& c) {
  config.trainer.session.mesh.pipeline = c.pp;
  config.trainer.pipeline_chunks = c.vp;
  config.trainer.pipeline_schedule = c.schedule;
  config.trainer.zero = c.zero;
  config.model.recompute = c.recompute;
  config.model.pipeline_layout = c.layout;
  return config;
}

Layout LayoutOf(const Case& c, int tensor = 1) {
  return {.ranks = c.ranks, .expert_parallel = c.ep, .overlap = c.overlap, .tensor = tensor};
}

Trace TrainIn(const TrainConfig& config, const Case& c, int tensor = 1) {
  return testing::TrainIn(With(config, c), LayoutOf(c, tensor));
}

constexpr auto kGPipe = ScheduleKind::kGPipe, k1F1B = ScheduleKind::k1F1B,
               kInterleaved = ScheduleKind::kInterleaved, kZeroBubble = ScheduleKind::kZeroBubbleH1,
               kOverlap = ScheduleKind::k1F1BOverlap;
constexpr auto kZero0 = ZeroStage::kNone, kZero1 = ZeroStage::kOptimizer,
               kZero2 = ZeroStage::kGradients, kZero3 = ZeroStage::kWeights;
constexpr auto kLayer = Recompute::kLayer, kActivations = Recompute::kActivations;

// Every pair of values that fits meets once; under sanitizers the largest ones, beside hybrid_test.
std::vector<Case> Cases() {
  const Case large = {8, 2, 3, 2, kInterleaved, kZero2, kLayer, 2};
  if (kSanitized) {
    return {large, {4, 2, 1, 2, kZeroBubble, kZero2}, {4, 2, 1, 2, kOverlap, kZero3, kLayer, 2}};
  }
  return {
      {2, 2, 1, 1, kGPipe, kZero0, kLayer, 1},
      {4, 4, 1, 1, k1F1B, kZero1, kActivations},
      {3, 3, 1, 1, k1F1B, kZero2, kLayer, 1},
      {4, 2, 1, 2, kGPipe, kZero2, Recompute::kNone, 2},
      {6, 3, 2, 2, kInterleaved, kZero1, kActivations},
      {2, 2, 2, 1, kInterleaved, kZero0},
      {8, 2, 1, 4, k1F1B, kZero0, kLayer, 2},
      {4, 4, 1, 1, kZeroBubble, kZero0},
      {4, 2, 1, 2, kZeroBubble, kZero2, Recompute::kNone, 2},
      {6, 3, 1, 1, kZeroBubble, kZero1, kLayer},
      {4, 2, 2, 1, kInterleaved, kZero3, kLayer},
      {8, 2, 1, 2, kZeroBubble, kZero3, kActivations},
      {3, 3, 1, 1, k1F1B, kZero1, Recompute::kNone, 1, {3, 1, 2}},
      {2, 2, 2, 1, kInterleaved, kZero0, Recompute::kNone, 1, {1, 3, 1, 1}},
      {2, 1, 1, 2, kOverlap, kZero0},
      {3, 1, 1, 3, kOverlap, kZero3, kActivations, 2},
      {4, 2, 3, 2, kOverlap, kZero2, kLayer},
      {8, 2, 1, 2, kOverlap, kZero1, kActivations, 2},
      {6, 3, 2, 2, kOverlap, kZero3},
      large,
  };
}

TEST(PipelineTest, StagesHaveTheBitsOfOneRank) {
  const TrainConfig config = PipelineConfig();
  const Trace expected = testing::TrainIn(config);
  ASSERT_TRUE(expected.status.ok()) << expected.status;
  for (const Case& c : Cases()) {
    SCOPED_TRACE(::testing::Message() << c);
    const Trace got = TrainIn(config, c);
    ExpectSameTrace(got, expected);
    EXPECT_EQ(got.report.parameters_total, expected.report.parameters_total);
    EXPECT_EQ(got.report.parameters_active, expected.report.parameters_active);
    EXPECT_EQ(got.report.grid_loss_tensor, expected.report.grid_loss_tensor);
    // Rows and gradients of every micro-batch, across each edge between two parts.
    const int64_t rows = config.steps * config.trainer.micro_batches * config.micro_batch_size *
                         config.sequence_length;
    EXPECT_EQ(got.report.pipeline_bytes,
              rows * config.model.hidden_size * 4 * 2 * (c.pp * c.vp - 1));
  }
}

// An embedding that is also the output layer, of which both ends of a pipeline have a copy: one
// table in counts, norms and hashes, and equal bits in both copies (verify_replicas).
TEST(PipelineTest, ATiedTableOfBothEndsHasTheBitsOfOneRank) {
  TrainConfig config = PipelineConfig();
  config.model.tied_embeddings = true;
  config.trainer.session.tensor_leaves = 2;
  const Trace expected = testing::TrainIn(config);
  ASSERT_TRUE(expected.status.ok()) << expected.status;
  struct TiedCase {
    Case on;
    int tensor = 1;
  };
  const std::vector<TiedCase> cases = {{{2, 2, 1, 1, kGPipe, kZero0}},
                                       {{3, 3, 1, 1, k1F1B, kZero3}},
                                       {{6, 3, 2, 2, kInterleaved, kZero1, kActivations}},
                                       {{4, 2, 2, 1, kInterleaved, kZero3, kLayer}},
                                       {{8, 4, 1, 2, kZeroBubble, kZero2}, 2}};
  for (const auto& [c, tensor] : cases) {
    if (kSanitized && tensor == 1) continue;
    SCOPED_TRACE(::testing::Message() << c << ", TP " << tensor);
    const Trace got = TrainIn(config, c, tensor);
    ExpectSameTrace(got, expected);
    EXPECT_EQ(got.report.parameters_total, expected.report.parameters_total);
    EXPECT_EQ(got.report.grid_loss_tensor, expected.report.grid_loss_tensor);
  }
}

// Tensor groups within stages, whose ranks each send all rows.
TEST(PipelineTest, TensorRanksInStagesHaveTheBitsOfOneRank) {
  TrainConfig config = PipelineConfig();
  config.model.dense_ffn_hidden_size = 48;
  config.trainer.session.tensor_leaves = 2;
  config.steps = 2;
  const Trace expected = testing::TrainIn(config);
  ASSERT_TRUE(expected.status.ok()) << expected.status;
  for (const Case& c : {Case{4, 2, 1, 2, k1F1B, kZero2}, Case{8, 2, 3, 2, kInterleaved, kZero3},
                        Case{8, 2, 1, 4, kZeroBubble, kZero1}}) {
    SCOPED_TRACE(::testing::Message() << c);
    ExpectSameTrace(TrainIn(config, c, /*tensor=*/2), expected);
    if (kThreadSanitized) return;
  }
}

TEST(PipelineTest, SixteenBitsAndFastNumerics) {
  TrainConfig config = PipelineConfig();
  config.steps = 2;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    config.trainer.dtype = dtype;
    const Trace expected = testing::TrainIn(config);
    ASSERT_TRUE(expected.status.ok()) << expected.status;
    ExpectSameTrace(TrainIn(config, {4, 2, 1, 2}), expected);
    if (kThreadSanitized) return;
  }
  config.trainer.dtype = DType::kFloat32;
  config.trainer.session.numerics = Numerics::kFast;
  // One rank for each part: the same sums, in the same order.
  ExpectSameTrace(TrainIn(config, {2, 2}), testing::TrainIn(config));
}

// Peak bytes of each stage's stashes in a step of `rounds` micro-batches.
std::vector<int64_t> StashBytes(TrainConfig config, const Case& c, int64_t rounds) {
  static const Corpus& corpus = *new Corpus(MakeCorpus());
  config.trainer.micro_batches = rounds;
  config = LaidOut(With(config, c), LayoutOf(c));
  std::vector<int64_t> bytes(static_cast<size_t>(c.pp));
  ::moe::testing::RunLocalRanks(c.ranks, [&](std::unique_ptr<Communicator> world) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const auto owner, CreateTrainer(config, std::move(world)));
    Trainer& trainer = *owner;
    MOE_ASSIGN_OR_RETURN(auto created,
                         Model<float>::Create(ModelConfig(config), trainer.pipeline().shape(),
                                              trainer.parameters(), trainer.context()));
    MOE_ASSIGN_OR_RETURN(Model<float>* const model, trainer.Add(std::move(created)));
    StepTotals totals(model->moe_layers());
    TextRounds<float> host(config, corpus.train, *model, totals, nullptr);
    MOE_RETURN_IF_ERROR(trainer.RunRounds(model->pipeline(), host));
    MOE_RETURN_IF_ERROR(trainer.Step({}).status());
    const int stage = trainer.context().mesh->index(MeshGroup::kPipeline);
    bytes[static_cast<size_t>(stage)] = trainer.session().stashes().peak_bytes();
    return absl::OkStatus();
  });
  return bytes;
}

// The table of docs/parallelism.md, of three stages: micro-batches in a chunk that stage s keeps.
int64_t KeptBy(ScheduleKind schedule, int s, int64_t rounds) {
  switch (schedule) {
    case kGPipe:
      return rounds;
    case k1F1B:
      return std::min<int64_t>(3 - s, rounds);
    case kZeroBubble:
      return std::min<int64_t>(3, rounds);
    case kInterleaved:  // of two chunks
      return std::min<int64_t>(2 * (3 - s - 1) + 3 + 1, 2 * rounds);
    case kOverlap:
      return std::min<int64_t>(2 * (3 - s - 1) + 2, rounds);
  }
  return 0;
}

// In bytes of a micro-batch in a chunk, with the copies of zb-h1. Chunks are alike, but for the
// rows of embedding and output layer, which one of two has.
TEST(PipelineTest, AStageKeepsAsManyMicroBatchesAsItsScheduleSays) {
  if (kSanitized) GTEST_SKIP() << "passes as in the other tests";
  TrainConfig config = PipelineConfig();
  config.model.moe_layer_freq = 1;
  config.sequence_length = 128;  // rows of experts take more than a router's scratch
  config.micro_batch_size = 4;
  for (const ScheduleKind schedule : {kGPipe, k1F1B, kZeroBubble, kInterleaved}) {
    const int chunks = schedule == kInterleaved ? 2 : 1;
    TrainConfig of_chunk = config;
    of_chunk.model.num_layers /= chunks;
    const std::vector<int64_t> one =
        StashBytes(of_chunk, {3, 3, 1, 1, chunks == 1 ? schedule : k1F1B}, 1);
    for (const int64_t rounds : {2, 3, 6}) {
      if (chunks > 1 && rounds % 3 != 0) continue;
      const Case c = {3, 3, chunks, 1, schedule};
      const std::vector<int64_t> got = StashBytes(config, c, rounds);
      for (int s = 0; s < 3; ++s) {
        SCOPED_TRACE(::testing::Message() << c << ", stage " << s << ", rounds " << rounds);
        const int64_t kept = KeptBy(schedule, s, rounds);
        EXPECT_LE(got[s], kept * one[s]);
        EXPECT_GE(got[s], kept * one[chunks == 1 ? s : 1]);
      }
    }
  }
}

// A layer that is made again has a stash that no micro-batch takes, and which stays as large.
TEST(PipelineTest, MicroBatchesWhoseLayersAreMadeAgainKeepLess) {
  if (kSanitized) GTEST_SKIP() << "passes as in the other tests";
  TrainConfig config = PipelineConfig();
  config.sequence_length = 128;
  config.micro_batch_size = 4;
  const Case again = {2, 2, 1, 1, kGPipe, kZero0, kLayer};
  const std::vector<int64_t> all = StashBytes(config, {2, 2, 1, 1, kGPipe}, 6);
  const std::vector<int64_t> one = StashBytes(config, again, 1), six = StashBytes(config, again, 6);
  for (int s = 0; s < 2; ++s) {
    EXPECT_LT(six[s], all[s] / 2) << "stage " << s;
    EXPECT_LT(six[s], 2 * one[s]) << "stage " << s;
  }
}

// A checkpoint has no stages: any layout goes on from any.
// Of a model whose table two stages hold.
TEST(PipelineTest, ACheckpointGoesOnAtAnyStages) {
  if (kSanitized) GTEST_SKIP() << "passes as in the other tests";
  TrainConfig config = PipelineConfig();
  config.model.tied_embeddings = true;
  std::vector<LaidOutRun> runs;
  for (const Case& c :
       {Case{1, 1}, Case{4, 2, 1, 2, k1F1B, kZero2}, Case{3, 3, 2, 1, kInterleaved}}) {
    runs.push_back({::testing::PrintToString(c), With(config, c), LayoutOf(c)});
  }
  ExpectResumes(runs, runs, testing::TrainIn(config));
}

// Message of the run, which must fail before its first step.
std::string Refused(const TrainConfig& config, const Case& c) {
  const Trace got = TrainIn(config, c);
  EXPECT_EQ(got.status.code(), absl::StatusCode::kInvalidArgument) << got.status;
  return std::string(got.status.message());
}

TEST(PipelineTest, ShapesThatDoNotFitNameOneThatDoes) {
  using ::testing::HasSubstr;
  TrainConfig config = PipelineConfig();
  EXPECT_THAT(Refused(config, {4, 3}),
              HasSubstr("--pp is 3, expected a divisor of the 4 ranks: 1"));
  EXPECT_THAT(Refused(config, {4, 2, 1, 4}),
              HasSubstr("--ep is 4, expected a divisor of the 2 ranks of a stage: 1, 2"));
  EXPECT_THAT(Refused(config, {2, 2, 4}), HasSubstr("--num-layers is 6 with --pp 2 and --vp 4, "
                                                    "expected at least 8"));
  EXPECT_THAT(Refused(config, {2, 2, 2, 1, kGPipe}), HasSubstr("2 chunks a stage"));
  const auto refused = [&](const std::vector<int32_t>& layout) {
    Case c = {3, 3};
    c.layout = layout;
    return Refused(config, c);
  };
  EXPECT_THAT(refused({3, 3}), HasSubstr("--pipeline-layout is 3,3, expected the 6 layers in 3 "
                                         "parts of at least one, such as 3,2,1"));
  EXPECT_THAT(refused({2, 1, 2}), HasSubstr("such as 2,2,2"));
  EXPECT_THAT(refused({6, 0, 0}), HasSubstr("such as 4,1,1"));
  EXPECT_THAT(refused({1, 2, 3, 4}), HasSubstr("such as 1,2,3"));
  EXPECT_THAT(refused({2147483647, -1, 2147483647}), HasSubstr("such as 4,1,1"));
}

}  // namespace
}  // namespace moe::lm::testing
