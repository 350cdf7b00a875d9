// The pipeline's simulated time, the search of meshes, and routing at scale.
#include "moe/plan/mesh_search.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "moe/plan/model_cost.h"
#include "moe/plan/pipeline_time.h"
#include "moe/plan/routing_sim.h"

namespace moe::plan {
namespace {

// With F, B = F + W: GPipe and 1F1B wait (p - 1)(F + B), zero bubble H1 (p - 1)(F + B - 2 W) for
// B - W = W = F; Qi et al., arXiv:2401.10241, table 1. Interleaved: a v-th of 1F1B's.
TEST(PipelineSpan, WaitsAsTheClosedFormsSay) {
  for (const int p : {1, 2, 4, 8}) {
    for (const int64_t m : {8, 16, 64}) {
      const double ideal = 3 * static_cast<double>(m);
      const auto waits = [&](ScheduleKind kind, int chunks) {
        const OpTimes part = {.forward = 1.0 / chunks, .backward = 2.0 / chunks};
        return PipelineSpan({.schedule = kind, .stages = p, .chunks = chunks}, m, part) - ideal;
      };
      EXPECT_DOUBLE_EQ(waits(ScheduleKind::kGPipe, 1), 3.0 * (p - 1)) << p << " " << m;
      EXPECT_DOUBLE_EQ(waits(ScheduleKind::k1F1B, 1), 3.0 * (p - 1)) << p << " " << m;
      EXPECT_DOUBLE_EQ(waits(ScheduleKind::kZeroBubbleH1, 1), 1.0 * (p - 1)) << p << " " << m;
      if (p > 1) {
        EXPECT_NEAR(waits(ScheduleKind::kInterleaved, 4), 3.0 * (p - 1) / 4, 1e-9) << p << " " << m;
      }
    }
  }
}

// Two stages, two micro-batches, hops of 1: F0 0-1 | F0 2-3, B0 3-5, hop, B0 6-8 ...
TEST(PipelineSpan, CountsTheWayOfRows) {
  const PipelineShape shape = {.schedule = ScheduleKind::k1F1B, .stages = 2};
  // Stage 1: F0 2-3, B0 3-5, F1 5-6, B1 6-8; stage 0: F0 0-1, F1 1-2, B0 6-8, B1 9-11.
  EXPECT_DOUBLE_EQ(PipelineSpan(shape, 2, {.forward = 1, .backward = 2, .hop = 1}), 11);
}

// Four stages on two cores, GPipe with one micro-batch: one stage computes at a time. With two, the
// second starts an operation behind the first, and each has a core, forward 0-5 and backward 5-15;
// with four, forwards 0-1, 1-2 ... share: work of 4 x 4 x 3 on two cores, and what neither fills.
TEST(PipelineSpan, OfStagesThatShareCoresIsTheirWorkAndWhatTheyWait) {
  const PipelineShape shape = {.schedule = ScheduleKind::kGPipe, .stages = 4};
  const auto span = [&](int64_t rounds, double sharers) {
    return PipelineSpan(shape, rounds, {.forward = 1, .backward = 2, .sharers = sharers});
  };
  EXPECT_DOUBLE_EQ(span(1, 2), 12);
  EXPECT_DOUBLE_EQ(span(2, 2), 15);
  EXPECT_DOUBLE_EQ(span(1, 4), 12);
  EXPECT_DOUBLE_EQ(span(2, 4), 24);  // all on one core: never idle
  EXPECT_GT(span(4, 2), 4 * 4 * 3 / 2);
  EXPECT_LT(span(4, 2), span(4, 1) + 4 * 4 * 3 / 2);
  Bubbles bubbles;
  EXPECT_NEAR(bubbles.Share(shape, 2, {.forward = 5, .backward = 10, .sharers = 4}), 0, 1e-12);
  EXPECT_NEAR(bubbles.Share(shape, 2, {.forward = 5, .backward = 10, .sharers = 2}), 0.25, 1e-12);
}

TEST(Bubbles, OfManyRoundsAreThoseOfTheWholeSimulation) {
  for (const auto& [kind, chunks] :
       {std::pair(ScheduleKind::k1F1B, 1), std::pair(ScheduleKind::kZeroBubbleH1, 1),
        std::pair(ScheduleKind::kInterleaved, 3)}) {
    for (const int stages : {2, 3, 8}) {
      for (const double hop : {0.0, 0.5}) {
        const PipelineShape shape = {.schedule = kind, .stages = stages, .chunks = chunks};
        const OpTimes times = {.forward = 2, .backward = 4, .hop = hop * 2};
        const int64_t rounds = 120;
        const double ideal = static_cast<double>(rounds * chunks) * 6;
        Bubbles bubbles;
        EXPECT_NEAR(bubbles.Share(shape, rounds, times),
                    PipelineSpan(shape, rounds, times) / ideal - 1, 1e-9)
            << static_cast<int>(kind) << " " << stages << " " << hop;
      }
    }
  }
}

// C(6, 2) / C(8, 2) = 15 / 28 of the choices leave out two of eight experts.
TEST(RanksOfToken, CountsDistinctRanks) {
  EXPECT_DOUBLE_EQ(RanksOfToken(8, 1, 2), 1);
  EXPECT_DOUBLE_EQ(RanksOfToken(8, 4, 2), 4 * (1 - 15.0 / 28));
  EXPECT_DOUBLE_EQ(RanksOfToken(8, 8, 2), 2);
  EXPECT_DOUBLE_EQ(RanksOfToken(4, 2, 4), 2);
  // Of three ranks two have one expert more: 3, 3 and 2 of 8.
  EXPECT_DOUBLE_EQ(RanksOfToken(8, 3, 1), 1);
}

SearchOptions SmallSearch() {
  SearchOptions options;
  options.base.model.hidden_size = 64;
  options.base.model.num_layers = 8;
  options.base.model.moe = {.router = {.num_experts = 16, .top_k = 2}, .ffn_hidden_size = 128};
  options.base.sequence_length = 64;
  options.ranks = 16;
  options.sequences = 256;
  options.machine = MachineOf(*FindGpu("h100"));
  return options;
}

TEST(MeshSearch, ListsEachMeshOnceTheFastestFirst) {
  const SearchResult result = SearchMeshes(SmallSearch()).value();
  ASSERT_FALSE(result.fitting.empty());
  EXPECT_TRUE(result.too_big.empty());
  std::vector<std::pair<int, int>> meshes;
  for (size_t i = 0; i < result.fitting.size(); ++i) {
    const Candidate& c = result.fitting[i];
    EXPECT_GE(c.time.total(), result.fitting[i > 0 ? i - 1 : 0].time.total());
    EXPECT_EQ(16 % (c.layout.mesh.pipeline * c.layout.mesh.expert), 0);
    EXPECT_EQ(c.layout.mesh.tensor, 1);  // no trees
    EXPECT_LE(c.memory.total_bytes(), 80e9);
    meshes.emplace_back(c.layout.mesh.pipeline, c.layout.mesh.expert);
  }
  std::sort(meshes.begin(), meshes.end());
  EXPECT_EQ(std::adjacent_find(meshes.begin(), meshes.end()), meshes.end());
  // PP 1: EP 1, 2, 4, 8, 16; PP 2: to 8; 4: to 4; 8: to 2.
  EXPECT_EQ(meshes.size(), 5u + 4 + 3 + 2);
  const SearchResult again = SearchMeshes(SmallSearch()).value();
  for (size_t i = 0; i < result.fitting.size(); ++i) {
    EXPECT_EQ(result.fitting[i].layout, again.fitting[i].layout);
  }
}

TEST(MeshSearch, TakesTensorParallelismWithTreesAlone) {
  SearchOptions options = SmallSearch();
  options.base.trainer.session.tensor_leaves = 4;
  const SearchResult result = SearchMeshes(options).value();
  std::set<std::tuple<int, int, int, int>> meshes;
  int tensor = 1, expert_tensor = 1, both = 1;
  for (const Candidate& c : result.fitting) {
    const MeshShape& mesh = c.layout.mesh;
    EXPECT_TRUE(CheckMeshShape(mesh, 16).ok()) << ToString(mesh);
    EXPECT_TRUE(meshes.emplace(mesh.pipeline, mesh.tensor, mesh.expert, mesh.expert_tensor).second);
    tensor = std::max(tensor, mesh.tensor);
    expert_tensor = std::max(expert_tensor, mesh.expert_tensor);
    if (mesh.expert == 1) both = std::max(both, std::min(mesh.tensor, mesh.expert_tensor));
  }
  EXPECT_EQ(tensor, 4);
  EXPECT_EQ(expert_tensor, 4);
  EXPECT_EQ(both, 4);  // TP divides EP times ETP
  // Of PP 1, TP 1 and ETP 1, 2, 4: EP 1 to 16, to 8 and to 4.
  const auto count = std::count_if(meshes.begin(), meshes.end(), [](const auto& mesh) {
    return std::get<0>(mesh) == 1 && std::get<1>(mesh) == 1;
  });
  EXPECT_EQ(count, 5 + 4 + 3);
}

// Ranks that share experts have all of their rows, in products that are as much narrower, and
// divide what they hold. What it costs is rows and sums between them.
TEST(MeshSearch, SharedExpertsMoveMoreAndHoldNoMore) {
  SearchOptions options = SmallSearch();
  options.base.trainer.session.tensor_leaves = 4;
  options.micro_batch_size = 1;
  options.takes = [](const Layout& layout) {
    return layout.mesh.pipeline == 1 && layout.mesh.tensor == 1 &&
           layout.mesh.expert * layout.mesh.expert_tensor == 8 && layout.zero == ZeroStage::kNone &&
           layout.recompute == Recompute::kNone;
  };
  const SearchResult result = SearchMeshes(options).value();
  ASSERT_EQ(result.fitting.size(), 3u);
  for (int i = 0; i < 3; ++i) {
    const Candidate& c = result.fitting[i];
    EXPECT_EQ(c.layout.mesh.expert_tensor, 1 << i);  // the less of it the faster
    EXPECT_DOUBLE_EQ(c.memory.weight_bytes, result.fitting[0].memory.weight_bytes);
    EXPECT_DOUBLE_EQ(c.time.experts, result.fitting[0].time.experts);
    EXPECT_EQ(c.time.tensors > 0, i > 0);
  }
}

TEST(MeshSearch, NothingFitsAndMoreRanksWould) {
  SearchOptions options = SmallSearch();
  options.goal = Goal::kFits;
  const double least = SearchMeshes(options)->fitting.front().memory.total_bytes();
  options.machine.memory_bytes = 0.7 * least;
  const SearchResult result = SearchMeshes(options).value();
  EXPECT_TRUE(result.fitting.empty());
  ASSERT_FALSE(result.too_big.empty());
  EXPECT_EQ(result.too_big.front().memory.total_bytes(), least);
  const auto ranks = RanksThatFit(options);
  ASSERT_TRUE(ranks.has_value());
  options.ranks = *ranks;
  EXPECT_FALSE(SearchMeshes(options)->fitting.empty());
}

TEST(MeshSearch, RowSkewMakesTheExpertsSlower) {
  SearchOptions options = SmallSearch();
  const auto even = SearchMeshes(options)->fitting;
  options.row_skew = [](int) {
    return 1.5;
  };
  const SearchResult skewed = SearchMeshes(options).value();
  for (const Candidate& c : skewed.fitting) {
    const auto same = std::find_if(even.begin(), even.end(), [&](const Candidate& other) {
      return other.layout.mesh == c.layout.mesh;
    });
    const bool exchanges = c.layout.mesh.expert > 1;
    EXPECT_EQ(c.work.row_skew, exchanges ? 1.5 : 1);
    EXPECT_EQ(c.time.total() > same->time.total(), exchanges);
  }
}

TEST(RoutingSim, SharesAddUpAndFollowTheConcentration) {
  const auto variance = [](double concentration) {
    double sum = 0;
    for (const auto& shares : DirichletShares(256, concentration, 8, 1)) {
      EXPECT_NEAR(std::accumulate(shares.begin(), shares.end(), 0.0), 1, 1e-12);
      for (const double share : shares) sum += (256 * share - 1) * (256 * share - 1);
    }
    return sum / (8 * 256);
  };
  // Of E shares E times each: (E - 1) / (E a + 1).
  EXPECT_NEAR(variance(30), 255 / (256 * 30 + 1.0), 0.005);
  EXPECT_NEAR(variance(0.5), 255 / (128 + 1.0), 0.3);
}

// One expert a rank, one pass, two ranks: the shares themselves, within chance.
TEST(RoutingSim, TheBusiestRankHasItsShare) {
  const Imbalance imbalance =
      SimulateRouting({{0.7, 0.3}}, {.ranks = 2, .expert = 2, .top_k = 1, .tokens = 100'000});
  EXPECT_NEAR(imbalance.slowest_group, 1.4, 0.01);
  EXPECT_EQ(imbalance.mean_group, imbalance.slowest_group);
  EXPECT_EQ(imbalance.worst_pass, imbalance.slowest_group);
  // A token's two choices are distinct, so no expert has more than half of the slots.
  const Imbalance capped =
      SimulateRouting({{0.9, 0.1}}, {.ranks = 2, .expert = 2, .top_k = 2, .tokens = 100'000});
  EXPECT_NEAR(capped.slowest_group, 2 * 0.5 / 0.6, 0.01);
}

// Counts of few slots, too, have the mean and variance of a binomial: of 64 ranks with 10 slots
// each the busiest has about 17.6 (by enumeration of independent counts).
TEST(RoutingSim, FewSlotsAreDrawnExactly) {
  const PassShares even(400, std::vector<double>(64, 1.0 / 64));
  const Imbalance imbalance =
      SimulateRouting(even, {.ranks = 64, .expert = 64, .top_k = 1, .tokens = 10});
  EXPECT_NEAR(imbalance.mean_group, 1.8, 0.05);
}

// What the experiment found: expert parallelism makes imbalance expensive, not the number of ranks.
TEST(RoutingSim, TenThousandRanks) {
  const PassShares shares = DirichletShares(256, 30, 32, 0);
  const auto at = [&](int expert) {
    return SimulateRouting(shares, {.ranks = 10240, .expert = expert, .top_k = 8, .tokens = 4096});
  };
  const Imbalance wide = at(64), narrow = at(8);
  EXPECT_NEAR(wide.mean_group, 1.24, 0.03);
  EXPECT_NEAR(narrow.mean_group, 1.05, 0.01);
  EXPECT_LE(wide.slowest_group, 1.005 * wide.mean_group);
}

}  // namespace
}  // namespace moe::plan
