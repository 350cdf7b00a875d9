// Runs on all axes of parallelism at once, against one rank: every pair of values of two axes meets
// in one of them.
#include <array>
#include <cstddef>
#include <ostream>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "tests/moe/lm/train_harness.h"
#include "tests/sanitizers.h"

namespace moe::lm::testing {
namespace {

using ::moe::testing::kSanitized;
using ::moe::testing::kThreadSanitized;
using ::moe::testing::Layout;

enum Axis : size_t {
  kTp,
  kEtp,
  kEp,
  kReplicas,
  kPp,
  kSchedule,
  kZero,
  kRecompute,
  kOffload,
  kAxes
};
constexpr std::array<int, kAxes> kLast = {2, 2, 2, 2, 2, 5, 4, 3, 2};  // how many values each has

// A value of each axis.
using Hybrid = std::array<int, kAxes>;

int TensorRanks(const Hybrid& h) {
  return 1 + h[kTp];
}
int ExpertTensorRanks(const Hybrid& h) {
  return 1 + h[kEtp];
}
int ExpertRanks(const Hybrid& h) {
  return 2 + 2 * h[kEp];
}
int Stages(const Hybrid& h) {
  return 2 + 2 * h[kPp];
}
int Ranks(const Hybrid& h) {
  return ExpertRanks(h) * ExpertTensorRanks(h) * (1 + h[kReplicas]) * Stages(h);
}
ScheduleKind Schedule(const Hybrid& h) {
  return static_cast<ScheduleKind>(h[kSchedule]);
}

std::ostream& Describe(std::ostream& out, const Hybrid& h) {
  return out << Ranks(h) << " ranks, TP " << TensorRanks(h) << ", ETP " << ExpertTensorRanks(h)
             << ", EP " << ExpertRanks(h) << ", PP " << Stages(h) << " "
             << NameOf(Schedule(h), kScheduleWords) << ", zero " << h[kZero] << ", recompute "
             << h[kRecompute] << ", offload " << h[kOffload];
}

std::vector<Hybrid> AllThatFit(int most_ranks) {
  std::vector<Hybrid> all;
  Hybrid h = {};
  while (true) {
    if (Ranks(h) <= most_ranks) all.push_back(h);
    size_t axis = 0;
    while (axis < kAxes && ++h[axis] == kLast[axis]) h[axis++] = 0;
    if (axis == kAxes) return all;
  }
}

using Pair = std::tuple<size_t, int, size_t, int>;
std::vector<Pair> PairsOf(const Hybrid& h) {
  std::vector<Pair> pairs;
  for (size_t a = 0; a < kAxes; ++a) {
    for (size_t b = a + 1; b < kAxes; ++b) pairs.emplace_back(a, h[a], b, h[b]);
  }
  return pairs;
}

// Greedy: the one with the most pairs not yet covered, the first of equals.
std::vector<Hybrid> PairwiseCover(const std::vector<Hybrid>& all) {
  std::set<Pair> open;
  for (const Hybrid& h : all) {
    for (const Pair& pair : PairsOf(h)) open.insert(pair);
  }
  std::vector<Hybrid> cover;
  while (!open.empty()) {
    const auto gain = [&](const Hybrid& h) {
      size_t count = 0;
      for (const Pair& pair : PairsOf(h)) count += open.count(pair);
      return count;
    };
    const Hybrid* best = &all.front();
    for (const Hybrid& h : all) {
      if (gain(h) > gain(*best)) best = &h;
    }
    cover.push_back(*best);
    for (const Pair& pair : PairsOf(*best)) open.erase(pair);
  }
  return cover;
}

// Layers for four stages of two chunks, a mixture in every second one; heads and columns of experts
// for two ranks that share them.
TrainConfig HybridConfig() {
  TrainConfig config = SmallConfig();
  config.model.num_layers = 8;
  config.model.moe_layer_freq = 2;
  config.model.dense_ffn_hidden_size = 32;
  config.model.moe.ffn_hidden_size = 20;
  config.model.moe.shared_expert_ffn_hidden_size = 32;
  config.trainer.session.tensor_leaves = 2;
  config.trainer.micro_batches = 5;
  config.trainer.bucket_bytes = 8'000;
  config.micro_batch_size = 1;
  config.steps = 2;
  config.evaluation.interval = 0;
  config.evaluation.sequences = 2;
  return config;
}

// Costs about 0.2 s a run. Under sanitizers runs of 16 ranks repeat what smaller ones do.
TEST(HybridTest, EveryPairOfAxesHasTheBitsOfOneRank) {
  const TrainConfig config = HybridConfig();
  const Trace expected = TrainIn(config);
  ASSERT_TRUE(expected.status.ok()) << expected.status;
  std::vector<Hybrid> cover = PairwiseCover(AllThatFit(kSanitized ? 8 : 16));
  EXPECT_LE(cover.size(), 25u);
  if (kThreadSanitized) cover.resize(3);
  for (const Hybrid& h : cover) {
    std::ostringstream name;
    Describe(name, h);
    SCOPED_TRACE(name.str());
    TrainConfig laid_out = config;
    laid_out.trainer.session.mesh.pipeline = Stages(h);
    laid_out.trainer.pipeline_schedule = Schedule(h);
    laid_out.trainer.pipeline_chunks = Schedule(h) == ScheduleKind::kInterleaved ? 2 : 1;
    laid_out.trainer.zero = static_cast<ZeroStage>(h[kZero]);
    laid_out.model.recompute = static_cast<Recompute>(h[kRecompute]);
    if (h[kOffload] == 1) {
      laid_out.trainer.offload.optimizer = OffloadTo::kFile;
      laid_out.trainer.offload.file.folder = ::testing::TempDir();
    }
    Layout layout = {.ranks = Ranks(h), .expert_parallel = ExpertRanks(h)};
    layout.tensor = TensorRanks(h);
    layout.expert_tensor = ExpertTensorRanks(h);
    ExpectSameTrace(TrainIn(laid_out, layout), expected);
  }
}

// Documents that end with a line feed, more or fewer in each micro-batch. Costs about 1 s.
TEST(HybridTest, DocumentsHaveTheBitsOfOneRank) {
  TrainConfig config = HybridConfig();
  const Trace plain = TrainIn(config);
  config.model.eos_token_ids = {'\n'};
  config.documents = {
      .reset_position_ids = true, .reset_attention_mask = true, .eod_mask_loss = true};
  const Trace expected = TrainIn(config);
  ASSERT_TRUE(expected.status.ok()) << expected.status;
  EXPECT_NE(expected.loss, plain.loss);
  config.trainer.session.mesh.pipeline = 2;
  config.trainer.zero = ZeroStage::kWeights;
  Layout layout = {.ranks = 4, .expert_parallel = 2};
  layout.tensor = 2;
  ExpectSameTrace(TrainIn(config, layout), expected);
  config.trainer.session.mesh.pipeline = 1;
  config.model.recompute = Recompute::kLayer;
  ExpectSameTrace(TrainIn(config, {.ranks = 3, .expert_parallel = 3}), expected);
}

}  // namespace
}  // namespace moe::lm::testing
