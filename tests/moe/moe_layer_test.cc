// The whole layer against a dense float64 loop, and against itself in every layout.
#include <algorithm>
#include <cmath>

#include <gtest/gtest.h>

#include "tests/moe/layer_case.h"
#include "tests/sanitizers.h"

namespace moe {
namespace {

using testing::ExpectHoldsInLayouts;
using testing::ExpertParallel;
using testing::LayerResult;
using testing::LayerWork;
using testing::Layout;
using testing::MakeWork;
using testing::RunLayer;
using testing::SmallConfig;

TEST(MoeLayerTest, MatchesTheOracleForEveryExpertParallelSize) {
  ExpectHoldsInLayouts(MakeWork(SmallConfig(), {6, 5, 7, 6, 1, 6, 6, 9}),
                       ExpertParallel({1, 2, 3, 4, 8}));
}

TEST(MoeLayerTest, MatchesTheOracleWhenExpertsAreReplicated) {
  ExpectHoldsInLayouts(MakeWork(SmallConfig(), {6, 5, 7, 6, 4, 6}),
                       {{.ranks = 4, .expert_parallel = 2},
                        {.ranks = 3, .expert_parallel = 1},
                        {.ranks = 6, .expert_parallel = 3}});
}

TEST(MoeLayerTest, RanksWithoutTokensJoin) {
  // Two micro-batches on four ranks, and empty micro-batches.
  ExpectHoldsInLayouts(MakeWork(SmallConfig(), {6, 8}), ExpertParallel({3, 4}));
  ExpectHoldsInLayouts(MakeWork(SmallConfig(), {0, 6, 0, 5}), ExpertParallel({2, 4}));
}

TEST(MoeLayerTest, AllTokensToOneExpert) {
  LayerWork work = MakeWork(SmallConfig(), {6, 5, 7, 6});
  const int64_t hidden = work.config.router.hidden_size;
  for (int64_t t = 0; t < work.tokens(); ++t) work.x[t * hidden] = 1.0f;
  work.override_parameter = [hidden](const ParameterSpec& spec, absl::Span<float> values) {
    if (spec.name == "mlp.gate.weight") values[3 * hidden] = 40.0f;
  };
  work.config.router.gate = "switch";
  work.config.router.top_k = 1;
  const LayerResult one = RunLayer<float>(work, {}, Numerics::kLayoutInvariant);
  EXPECT_EQ(one.expert_count[3], work.tokens());
  ExpectHoldsInLayouts(work, ExpertParallel({2, 3, 4, 8}));
}

TEST(MoeLayerTest, EveryTokenToEveryExpert) {
  MoeLayerConfig config = SmallConfig();
  config.router.top_k = config.router.num_experts;
  ExpectHoldsInLayouts(MakeWork(config, {4, 3, 5}), ExpertParallel({2, 3, 5}));
}

TEST(MoeLayerTest, FewerExpertsThanRanks) {
  MoeLayerConfig config = SmallConfig();
  config.router.num_experts = 2;
  ExpectHoldsInLayouts(MakeWork(config, {4, 3, 5, 2}), ExpertParallel({3, 4, 8}));
}

TEST(MoeLayerTest, CapacityDropsTheSameSlotsInEveryLayout) {
  for (const auto policy : {DropPolicy::kProbability, DropPolicy::kPosition}) {
    for (const bool pad : {false, true}) {
      // Which slots a rank drops is its own affair; padding is what the exchanges see.
      if (testing::kThreadSanitized && (policy == DropPolicy::kPosition || !pad)) continue;
      MoeLayerConfig config = SmallConfig();
      config.router.capacity_factor = 0.75;
      config.router.drop_policy = policy;
      config.router.pad_to_capacity = pad;
      config.router.micro_batch_tokens = 6;
      const LayerWork work = MakeWork(config, {6, 6, 6, 6, 6});
      EXPECT_GT(RunLayer<float>(work, {}, Numerics::kFast).dropped_slots, 0);
      ExpectHoldsInLayouts(work, ExpertParallel({2, 3, 4}));
    }
  }
}

TEST(MoeLayerTest, SameBitsForEveryDispatchOverlapAndThreadCount) {
  std::vector<Layout> layouts;
  for (const auto dispatch :
       {DispatchAlgorithm::kStaged, DispatchAlgorithm::kDirect, DispatchAlgorithm::kHierarchical}) {
    for (const int overlap : {1, 2, 4}) {
      if (testing::kSanitized && overlap != 2) continue;
      layouts.push_back({.ranks = 4,
                         .expert_parallel = 4,
                         .dispatch = dispatch,
                         .node_size = 2,
                         .overlap = overlap,
                         .threads = overlap == 2 ? 2 : 1});
    }
  }
  layouts.push_back({.ranks = 5,
                     .expert_parallel = 5,
                     .dispatch = DispatchAlgorithm::kDirect,
                     .overlap = 3,
                     .all_reduce = AllReduceAlgorithm::kDirect});
  MoeLayerConfig config = SmallConfig();
  config.router.num_experts = 18;
  config.router.top_k = 3;
  ExpectHoldsInLayouts(MakeWork(config, {6, 5, 7, 6, 3}), layouts);
}

TEST(MoeLayerTest, BFloat16HasTheSameBitsInEveryLayout) {
  const LayerWork work = MakeWork(SmallConfig(), {6, 5, 7, 6, 3});
  const LayerResult one = RunLayer<BFloat16>(work, {}, Numerics::kLayoutInvariant);
  for (const Layout& layout :
       {Layout{.ranks = 2, .expert_parallel = 2},
        Layout{.ranks = 4, .expert_parallel = 2, .dispatch = DispatchAlgorithm::kDirect},
        Layout{.ranks = 4,
        .expert_parallel = 4,
        .dispatch = DispatchAlgorithm::kHierarchical,
        .node_size = 2,
        .overlap = 2}}) {
    SCOPED_TRACE(::testing::PrintToString(layout));
    testing::ExpectSameBits(RunLayer<BFloat16>(work, layout, Numerics::kLayoutInvariant), one);
  }
  // bfloat16 keeps 8 bits; sums of a few dozen such products stay within 2^-4 of the largest.
  const LayerResult f32 = RunLayer<float>(work, {}, Numerics::kLayoutInvariant);
  double largest = 0;
  for (const float v : f32.y) largest = std::max(largest, std::fabs(double{v}));
  for (size_t i = 0; i < f32.y.size(); ++i) {
    ASSERT_NEAR(one.y[i], f32.y[i], 0x1p-4 * largest) << i;
  }
}

TEST(MoeLayerTest, FastNumericsRepeatsItsOwnBits) {
  const LayerWork work = MakeWork(SmallConfig(), {6, 5, 7, 6, 3, 8});
  const Layout layout = {.ranks = 4, .expert_parallel = 2, .overlap = 2};
  testing::ExpectSameBits(RunLayer<float>(work, layout, Numerics::kFast),
                          RunLayer<float>(work, layout, Numerics::kFast));
}

}  // namespace
}  // namespace moe
