// The estimate of a rank's memory, against its use; memory of a machine.
#include "moe/plan/memory.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/measure/layer_bench.h"
#include "moe/cli/measure/machine_memory.h"
#include "moe/cli/measure/routing_spec.h"
#include "moe/lm/training_loop.h"
#include "moe/plan/model_cost.h"
#include "tests/comm/local_ranks.h"
#include "tests/moe/io/io_test.h"

namespace moe::plan {
namespace {

lm::Corpus MakeCorpus() {
  lm::Corpus corpus;
  for (int i = 0; i < 40'000; ++i) corpus.text.push_back(static_cast<uint8_t>(i * i / 7));
  corpus.train.Add(corpus.text, lm::TokenType::kU8);
  corpus.held_out.Add(absl::MakeSpan(corpus.text).first(4096), lm::TokenType::kU8);
  return corpus;
}

struct MemoryCase {
  const char* name;
  int64_t hidden = 128, ffn = 256;
  int layers = 2, experts = 8, top_k = 2;
  int ranks = 2, ep = 2;
  int64_t micro_batch = 4, length = 128;
  DType dtype = DType::kFloat32;
  Numerics numerics = Numerics::kFast;
  int moe_layer_freq = 1;
  int64_t shared = 0;
  double capacity_factor = 0;
  int overlap = 1;
  DispatchAlgorithm dispatch = DispatchAlgorithm::kStaged;
  Recompute recompute = Recompute::kNone;
  int tp = 1, etp = 1;
  int pp = 1;
  ScheduleKind schedule = ScheduleKind::k1F1B;
};

lm::TrainConfig ConfigOf(const MemoryCase& c) {
  lm::TrainConfig config;
  config.model.hidden_size = c.hidden;
  config.model.num_layers = c.layers;
  config.model.moe_layer_freq = c.moe_layer_freq;
  config.model.moe = {.router = {.num_experts = c.experts,
                                 .top_k = c.top_k,
                                 .micro_batch_tokens = c.micro_batch * c.length,
                                 .aux_loss_coeff = 0.01f},
                      .ffn_hidden_size = c.ffn,
                      .shared_expert_ffn_hidden_size = c.shared,
                      .dispatcher = {.algorithm = c.dispatch},
                      .overlap_degree = c.overlap};
  config.model.recompute = c.recompute;
  if (c.capacity_factor > 0) config.model.moe.router.capacity_factor = c.capacity_factor;
  config.trainer.dtype = c.dtype;
  config.trainer.session.numerics = c.numerics;
  config.sequence_length = c.length;
  config.micro_batch_size = c.micro_batch;
  config.trainer.micro_batches = c.ranks;
  config.steps = 1;
  config.evaluation.sequences = 1;
  config.schedule = {.peak = 1e-3, .total_steps = 1};
  config.trainer.session.mesh = {
      .tensor = c.tp, .pipeline = c.pp, .expert_tensor = c.etp, .expert = c.ep};
  config.trainer.pipeline_schedule = c.schedule;
  if (c.tp * c.etp > 1) config.trainer.session.tensor_leaves = 8;
  return config;
}

TrainerOptions OnRanks(int ep, DType dtype) {
  return {.session = {.mesh = {.expert = ep}}, .dtype = dtype};
}

class MemoryEstimateTest : public ::testing::TestWithParam<MemoryCase> {};

// What a run uses at once is within a tenth. The whole estimate has room for a workspace that grows
// and for uneven routing, which the estimate ignores: 3/2 of the activations.
TEST_P(MemoryEstimateTest, IsWithinATenthOfAMeasuredRunAndItsRoomWithinAFactorOfTwo) {
  const lm::TrainConfig config = ConfigOf(GetParam());
  const lm::Corpus corpus = MakeCorpus();
  int64_t measured = 0;
  testing::RunLocalRanks(GetParam().ranks, [&](std::unique_ptr<Communicator> world) {
    const auto on_step = [&](const lm::StepMetrics& m) {
      measured = std::max(measured, m.peak_bytes);
      return absl::OkStatus();
    };
    return lm::Train(config, corpus, std::move(world), {on_step}).status();
  });
  const MemoryEstimate estimate = EstimateMemory(ShapeOfTraining(config, GetParam().ranks));
  const double quotient = estimate.total_bytes() / static_cast<double>(measured);
  RecordProperty("quotient", std::to_string(quotient));
  EXPECT_GT(quotient, 0.5) << measured;
  EXPECT_LT(quotient, 2.0) << measured;
  const double used = estimate.used_bytes() / static_cast<double>(measured);
  RecordProperty("used", std::to_string(used));
  EXPECT_NEAR(used, 1, 0.1) << measured;
  // The activations are a significant part of the sum in every case, or this would only test a
  // count of parameters.
  EXPECT_GT(estimate.workspace_bytes, 0.2 * estimate.total_bytes());
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, MemoryEstimateTest,
    ::testing::Values(
        MemoryCase{.name = "Plain"}, MemoryCase{.name = "OneRank", .ranks = 1, .ep = 1},
        MemoryCase{.name = "DataParallel", .ep = 1},
        MemoryCase{.name = "ManyChoices", .experts = 16, .top_k = 6, .micro_batch = 2},
        MemoryCase{.name = "LongSequences", .micro_batch = 8, .length = 256},
        MemoryCase{.name = "WideModel", .hidden = 256, .ffn = 128, .experts = 4},
        MemoryCase{.name = "WideExperts", .hidden = 64, .ffn = 512},
        MemoryCase{.name = "Deep", .hidden = 64, .ffn = 128, .layers = 8},
        MemoryCase{.name = "Recompute",
                   .hidden = 64,
                   .ffn = 128,
                   .layers = 8,
                   .recompute = Recompute::kLayer},
        MemoryCase{.name = "RecomputeActivations",
                   .hidden = 64,
                   .ffn = 128,
                   .layers = 8,
                   .recompute = Recompute::kActivations},
        MemoryCase{.name = "Bfloat16", .dtype = DType::kBFloat16},
        MemoryCase{.name = "LayoutInvariant", .numerics = Numerics::kLayoutInvariant},
        MemoryCase{.name = "DenseLayersToo", .layers = 4, .moe_layer_freq = 2},
        MemoryCase{.name = "SharedExpert", .shared = 512},
        MemoryCase{.name = "Capacity", .capacity_factor = 1},
        MemoryCase{.name = "Overlap", .overlap = 2},
        MemoryCase{.name = "Direct", .dispatch = DispatchAlgorithm::kDirect},
        MemoryCase{.name = "Tensor", .ranks = 4, .ep = 4, .shared = 512, .tp = 2},
        MemoryCase{.name = "TensorDeep", .hidden = 64, .ffn = 128, .layers = 8, .tp = 2},
        MemoryCase{.name = "ExpertTensor", .ranks = 4, .ep = 1, .etp = 2},
        MemoryCase{.name = "Pipeline", .layers = 4, .ranks = 4, .pp = 2},
        MemoryCase{.name = "PipelineOfGPipe",
                   .layers = 4,
                   .ranks = 4,
                   .ep = 1,
                   .pp = 2,
                   .schedule = ScheduleKind::kGPipe},
        MemoryCase{.name = "PipelineOfZeroBubble",
                   .layers = 4,
                   .ranks = 4,
                   .ep = 1,
                   .pp = 2,
                   .schedule = ScheduleKind::kZeroBubbleH1},
        MemoryCase{.name = "PipelineWithTensor", .layers = 4, .ranks = 4, .tp = 2, .pp = 2},
        MemoryCase{.name = "PipelineRecompute",
                   .layers = 8,
                   .ranks = 2,
                   .ep = 1,
                   .recompute = Recompute::kLayer,
                   .pp = 2},
        MemoryCase{.name = "UnevenExperts", .experts = 5, .ranks = 3, .ep = 3}),
    [](const auto& test) { return std::string(test.param.name); });

// What a run has allocated of parameters, sums and state at each ZeRO stage; of a table that both
// ends of a pipeline have, too.
TEST(MemoryEstimate, OfStateIsWithinFivePercentOfARun) {
  struct StateCase {
    ZeroStage zero;
    OffloadTo offload = OffloadTo::kNone;
    int pp = 1;
  };
  const lm::Corpus corpus = MakeCorpus();
  for (const auto& [zero, offload, pp] :
       {StateCase{ZeroStage::kNone}, StateCase{ZeroStage::kOptimizer},
        StateCase{ZeroStage::kGradients}, StateCase{ZeroStage::kWeights},
        StateCase{ZeroStage::kNone, OffloadTo::kFile},
        StateCase{ZeroStage::kOptimizer, OffloadTo::kFile},
        StateCase{ZeroStage::kNone, OffloadTo::kNone, 2},
        StateCase{ZeroStage::kWeights, OffloadTo::kNone, 2}}) {
    SCOPED_TRACE(absl::StrCat(static_cast<int>(zero), ", ", static_cast<int>(offload), ", ", pp));
    lm::TrainConfig config = ConfigOf({.name = "",
                                       .ranks = 4,
                                       .micro_batch = 1,
                                       .length = 32,
                                       .dtype = DType::kBFloat16,
                                       .numerics = Numerics::kLayoutInvariant});
    config.trainer.session.mesh.pipeline = pp;
    config.model.tied_embeddings = pp > 1;
    config.trainer.zero = zero;
    config.trainer.offload = {.optimizer = offload, .file = {.folder = ::testing::TempDir()}};
    config.trainer.bucket_bytes = 1 << 20;
    config.steps = 2;
    int64_t allocated = 0;
    testing::RunLocalRanks(4, [&](std::unique_ptr<Communicator> world) -> absl::Status {
      const bool first = world->rank() == 0;
      MOE_ASSIGN_OR_RETURN(const lm::TrainReport report,
                           lm::Train(config, corpus, std::move(world), {}));
      if (first) allocated = report.state_bytes;
      return absl::OkStatus();
    });
    const double estimate = EstimateMemory(ShapeOfTraining(config, 4)).state_bytes();
    EXPECT_NEAR(estimate / static_cast<double>(allocated), 1, 0.05) << allocated;
  }
}

// A layer alone, with even routing, and with nine tenths of the rows on one rank of four.
TEST(MemoryEstimate, OfALayerIsWithinAFactorOfTwoOfAMeasuredOne) {
  struct LayerCase {
    int ranks;
    const char* routing;
    double skew;
    DType dtype;
  };
  for (const LayerCase& c :
       {LayerCase{1, "", 1, DType::kFloat32}, LayerCase{4, "uniform", 1, DType::kBFloat16},
        LayerCase{4, "hot_rank:0.9", 3.6, DType::kFloat32}}) {
    measure::LayerSpec spec = {
        .trainer = OnRanks(c.ranks, c.dtype),
        .tokens = 1024,
        .layer = {.router = {.num_experts = 8, .top_k = 2, .hidden_size = 128},
                  .ffn_hidden_size = 256}};
    if (*c.routing != '\0') spec.routing = *measure::ParseRouting(c.routing);
    double measured = 0;
    testing::RunLocalRanks(c.ranks, [&](std::unique_ptr<Communicator> world) -> absl::Status {
      const bool first = world->rank() == 0;
      auto result = measure::MeasureLayer(
          spec, {.iterations = 1, .warmup = 1, .budget = absl::ZeroDuration()}, std::move(world));
      if (result.ok() && first) measured = static_cast<double>(result->figures.peak_bytes);
      return result.status();
    });
    lm::TransformerConfig model;
    model.hidden_size = 128;
    model.num_layers = 1;
    model.moe = spec.layer;
    const MemoryEstimate estimate = EstimateMemory({.model = model,
                                                    .trainer = OnRanks(c.ranks, c.dtype),
                                                    .parameters_total = 8 * (3 * 128 * 256 + 128),
                                                    .tokens = spec.tokens,
                                                    .row_skew = c.skew,
                                                    .trained = false});
    EXPECT_GT(estimate.total_bytes() / measured, 0.5) << c.routing << " " << measured;
    EXPECT_LT(estimate.total_bytes() / measured, 2.0) << c.routing << " " << measured;
  }
}

TEST(MemoryEstimate, ParametersAreThoseOfTheRank) {
  lm::TransformerConfig model;
  model.hidden_size = 10;
  model.num_layers = 3;
  model.moe = {.router = {.num_experts = 8, .top_k = 2}, .ffn_hidden_size = 7};
  // Three matrices [7, 10] an expert, 8 experts, 3 layers; 1000 parameters beside them.
  const int64_t total = 1000 + 3 * 8 * 210;
  const auto state = [&](int ep, Numerics numerics, DType dtype, bool trained) {
    TrainerOptions trainer = OnRanks(ep, dtype);
    trainer.session.numerics = numerics;
    return EstimateMemory(
               {.model = model, .trainer = trainer, .parameters_total = total, .trained = trained})
        .state_bytes();
  };
  EXPECT_EQ(state(1, Numerics::kFast, DType::kFloat32, true), 16.0 * static_cast<double>(total));
  EXPECT_EQ(state(4, Numerics::kFast, DType::kFloat32, true), 16.0 * (1000 + 3 * 2 * 210));
  EXPECT_EQ(state(3, Numerics::kFast, DType::kFloat32, true), 16.0 * (1000 + 3 * 3 * 210));
  EXPECT_EQ(state(16, Numerics::kFast, DType::kFloat32, true), 16.0 * (1000 + 3 * 1 * 210));
  EXPECT_EQ(state(4, Numerics::kLayoutInvariant, DType::kFloat32, true), 20.0 * 2260);
  EXPECT_EQ(state(4, Numerics::kFast, DType::kBFloat16, true), 18.0 * 2260);
  EXPECT_EQ(state(4, Numerics::kFast, DType::kFloat32, false), 8.0 * 2260);
  // ZeRO over 16 ranks, of which 4 have the same experts. A bucket of each group, whose sums of a
  // round have buffers as large as the larger one.
  const double rounds = 2 * 8 * 3 * 2 * 210;
  TrainerOptions zero = OnRanks(4, DType::kBFloat16);
  zero.zero = ZeroStage::kGradients;
  EXPECT_EQ(
      EstimateMemory({.model = model, .trainer = zero, .parameters_total = total, .ranks = 16})
          .state_bytes(),
      (2 + 20.0 / 16) * 1000 + (2 + 20.0 / 4) * 3 * 2 * 210 + rounds);
  // Buckets of 400 elements, and half a matrix more: two of each group.
  zero.bucket_bytes = 3200;
  EXPECT_EQ(
      EstimateMemory({.model = model, .trainer = zero, .parameters_total = total, .ranks = 16})
          .state_bytes(),
      (2 + 20.0 / 16) * 1000 + (2 + 20.0 / 4) * 3 * 2 * 210 + 4 * 8 * (400 + 2 * 70 / 2));
  zero.bucket_bytes = TrainerOptions().bucket_bytes;
  // Weights in parts: two blocks of a layer, of which the experts are the most.
  zero.zero = ZeroStage::kWeights;
  model.vocab_size = 20;  // two tables of 200 parameters
  EXPECT_EQ(
      EstimateMemory({.model = model, .trainer = zero, .parameters_total = total, .ranks = 16})
          .state_bytes(),
      22.0 / 16 * 1000 + 22.0 / 4 * 3 * 2 * 210 + 2 * 2 * (200 + 2 * 210) + rounds);
  model.vocab_size = 80;  // an embedding of 800 parameters, which is also the output layer
  model.tied_embeddings = true;
  EXPECT_EQ(
      EstimateMemory({.model = model, .trainer = zero, .parameters_total = total, .ranks = 16})
          .state_bytes(),
      22.0 / 16 * 1000 + 22.0 / 4 * 3 * 2 * 210 + 2 * 2 * 800 + rounds);
  // All ranks together have one more copy of masters and moments.
  const auto saving = [&](bool saves) {
    return EstimateMemory({.model = model,
                           .trainer = OnRanks(4, DType::kFloat32),
                           .parameters_total = total,
                           .ranks = 16,
                           .saves = saves})
        .state_bytes();
  };
  EXPECT_EQ(16 * (saving(true) - saving(false)), 12.0 * static_cast<double>(total));
}

TEST(MemoryEstimate, HugeShapesAreFiniteAndHuge) {
  lm::TransformerConfig model;
  model.hidden_size = 2'000'000'000;
  model.moe = {.router = {.num_experts = 2'000'000'000, .top_k = 2'000'000'000},
               .ffn_hidden_size = 2'000'000'000};
  const MemoryEstimate estimate = EstimateMemory(
      {.model = model, .parameters_total = int64_t{1} << 62, .tokens = 2'000'000'000});
  EXPECT_GT(estimate.workspace_bytes, 1e30);
  EXPECT_LT(estimate.workspace_bytes, 1e300);
}

// A machine emulated by files.
class AvailableMemoryTest : public IoTest {
 protected:
  int64_t Available() const { return measure::AvailableMemoryBytes(root_.string()); }
};

TEST_F(AvailableMemoryTest, IsWhatTheKernelSaysWithoutALimit) {
  EXPECT_EQ(Available(), 0);  // unknown
  EXPECT_EQ(measure::MemoryLimitBytes(root_.string()), 0);
  Put("/proc/meminfo", "MemTotal:  9000 kB\nMemFree: 1 kB\nMemAvailable:    1000 kB\n");
  EXPECT_EQ(Available(), 1000 * 1024);
  Put("/proc/self/cgroup", "0::/\n");
  Put("/sys/fs/cgroup/memory.max", "max\n");
  Put("/sys/fs/cgroup/memory.current", "5\n");
  EXPECT_EQ(Available(), 1000 * 1024);
}

TEST_F(AvailableMemoryTest, VersionTwoGroupsAndThoseAboveLimitIt) {
  Put("/proc/meminfo", "MemAvailable:    1000000 kB\n");
  Put("/proc/self/cgroup", "0::/a/b\n");
  Put("/sys/fs/cgroup/a/memory.max", "5000\n");
  Put("/sys/fs/cgroup/a/memory.current", "3000\n");
  Put("/sys/fs/cgroup/a/memory.stat", "anon 2000\ninactive_file 500\nactive_file 9\n");
  EXPECT_EQ(Available(), 2500);  // 5000 - 3000, and the cache that can go
  Put("/sys/fs/cgroup/a/b/memory.max", "100\n");
  Put("/sys/fs/cgroup/a/b/memory.current", "400\n");
  EXPECT_EQ(Available(), 0);
  EXPECT_EQ(measure::MemoryLimitBytes(root_.string()), 100);
}

TEST_F(AvailableMemoryTest, VersionOneGroupsLimitIt) {
  Put("/proc/meminfo", "MemAvailable:    1000000 kB\n");
  Put("/proc/self/cgroup", "9:name=systemd:/\n4:memory,hugetlb:/job\n0::/\n");
  // A container may show its own group at the mount's top, and not at the path that /proc names.
  Put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "8000\n");
  Put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1000\n");
  Put("/sys/fs/cgroup/memory/memory.stat", "cache 700\ntotal_inactive_file 600\n");
  EXPECT_EQ(Available(), 7600);
  EXPECT_EQ(measure::MemoryLimitBytes(root_.string()), 8000);
}

}  // namespace
}  // namespace moe::plan
