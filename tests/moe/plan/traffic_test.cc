// Formulas of traffic and memory against what runs on threads count.
#include "moe/plan/traffic.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/base/status_macros.h"
#include "moe/lm/training_loop.h"
#include "moe/plan/memory.h"
#include "tests/comm/local_ranks.h"

namespace moe::plan {
namespace {

struct TrafficCase {
  const char* name;
  Layout layout;
  DType dtype = DType::kFloat32;
  int64_t shared_width = 0;
};

// 4 ranks, 4 micro-batches of 2 sequences of 64 bytes, 4 layers.
lm::TrainConfig TrafficConfig(const TrafficCase& c) {
  lm::TrainConfig config;
  config.model.hidden_size = 64;
  config.model.num_layers = 4;
  config.model.moe = {
      .router = {.num_experts = 16, .top_k = 4, .micro_batch_tokens = 128, .aux_loss_coeff = 0.01f},
      .ffn_hidden_size = 128,
      .shared_expert_ffn_hidden_size = c.shared_width};
  config.model.recompute = c.layout.recompute;
  config.trainer.dtype = c.dtype;
  config.trainer.session.mesh = c.layout.mesh;
  if (c.layout.mesh.tensor * c.layout.mesh.expert_tensor > 1)
    config.trainer.session.tensor_leaves = 8;
  if (c.layout.mesh.tensor > 1) config.model.qk_norm = lm::QkNorm::kHeads;
  config.trainer.pipeline_schedule = c.layout.schedule;
  config.trainer.pipeline_chunks = c.layout.chunks;
  config.trainer.zero = c.layout.zero;
  config.trainer.micro_batches = 4;
  config.sequence_length = 64;
  config.micro_batch_size = 2;
  config.steps = 1;
  config.evaluation.sequences = 1;
  config.schedule = {.peak = 1e-3, .total_steps = 1};
  return config;
}

lm::TrainReport ReportOf(const lm::TrainConfig& config) {
  std::vector<uint8_t> text(20'000);
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<uint8_t>(i * i / 7);
  const lm::Corpus corpus = lm::CorpusOf(std::move(text), 64).value();
  lm::TrainReport report;
  testing::RunLocalRanks(4, [&](std::unique_ptr<Communicator> world) -> absl::Status {
    const bool first = world->rank() == 0;
    MOE_ASSIGN_OR_RETURN(auto mine, lm::Train(config, corpus, std::move(world), {}));
    if (first) report = std::move(mine);
    return absl::OkStatus();
  });
  return report;
}

class TrafficTest : public ::testing::TestWithParam<TrafficCase> {};

TEST_P(TrafficTest, IsWithinTwoPercentOfTheCountersOfARun) {
  const TrafficCase& c = GetParam();
  lm::TrainConfig config = TrafficConfig(c);
  const lm::TrainReport report = ReportOf(config);
  int64_t gradients = report.all_reduce_bytes;
  if (c.layout.zero == ZeroStage::kWeights) {
    // Evaluations gather weights, too: those of a second step are its own.
    config.steps = 2;
    gradients = ReportOf(config).all_reduce_bytes - gradients;
  }
  const Workload work = {.ranks = 4,
                         .sequences = 8,
                         .sequence_length = 64,
                         .element_bytes = static_cast<double>(SizeOf(c.dtype)),
                         .sum_bytes = 8};
  Layout layout = c.layout;
  layout.micro_batch_size = 2;
  const Traffic traffic = TrafficOf(CostOf(config.model), work, layout, 4);
  const auto expect = [](const char* what, double formula, int64_t counted) {
    EXPECT_NEAR(formula, static_cast<double>(counted), 0.02 * static_cast<double>(counted)) << what;
  };
  const ExchangeBytes& rows = report.exchange_bytes;
  if (c.layout.mesh.expert > 1) {
    expect("exchange", traffic.experts_self + traffic.experts_node, rows.self + rows.same_node);
    expect("exchange with others", traffic.experts_node, rows.same_node);
  }
  expect("gradients", traffic.gradients(), gradients);
  expect("stages", traffic.stages, report.pipeline_bytes);
  expect("tensor ranks", traffic.tensors + traffic.shared_experts, report.tensor_bytes);
  const MemoryEstimate memory = EstimateMemory(ShapeOfTraining(config, 4));
  expect("state", memory.state_bytes(), report.state_bytes);
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, TrafficTest,
    ::testing::Values(
        TrafficCase{"experts", {.mesh = {.expert = 4}}},
        TrafficCase{"half_the_experts_zero_1",
                    {.mesh = {.expert = 2}, .zero = ZeroStage::kOptimizer},
                    DType::kBFloat16},
        TrafficCase{"interleaved_layers_again_zero_2",
                    {.mesh = {.pipeline = 2, .expert = 2},
                     .schedule = ScheduleKind::kInterleaved,
                     .chunks = 2,
                     .zero = ZeroStage::kGradients,
                     .recompute = Recompute::kLayer}},
        TrafficCase{"zero_3", {.mesh = {.expert = 2}, .zero = ZeroStage::kWeights}},
        TrafficCase{"stages_zero_3",
                    {.mesh = {.pipeline = 2, .expert = 2}, .zero = ZeroStage::kWeights},
                    DType::kBFloat16},
        TrafficCase{"tensor_shared", {.mesh = {.tensor = 4, .expert = 4}}, DType::kBFloat16, 128},
        // Tensor ranks that share experts, and a forward of these twice.
        TrafficCase{"shared_experts_layers_again",
                    {.mesh = {.tensor = 2, .expert_tensor = 2, .expert = 2},
                     .recompute = Recompute::kLayer},
                    DType::kBFloat16},
        TrafficCase{"shared_experts_zero_1",
                    {.mesh = {.pipeline = 2, .expert_tensor = 2}, .zero = ZeroStage::kOptimizer}}),
    [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace moe::plan
