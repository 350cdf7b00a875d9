// The whole layer in every layout: one rank against a float64 loop, the others against one rank.
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "gating/gate.h"
#include "tests/comm/local_ranks.h"
#include "tests/moe/cli/verify/verify_case.h"
#include "tests/sanitizers.h"

namespace moe::verify {
namespace {

ProblemSpec Small(std::vector<int64_t> micro_batches) {
  return {.layer = {.router = {.gate = "mixtral",
                               .num_experts = 5,
                               .top_k = 2,
                               .hidden_size = 7,
                               .aux_loss_coeff = 0.02f,
                               .z_loss_coeff = 0.003f},
                    .ffn_hidden_size = 6},
          .micro_batch_tokens = std::move(micro_batches)};
}

// Under sanitizers and on a simulated device more ranks and chunks repeat what fewer do.
bool FewLayouts() {
  return ::moe::testing::kSanitized || ::moe::testing::LayerDevice() == DeviceKind::kCuda;
}

std::vector<Layout> ExpertParallel(std::initializer_list<int> sizes) {
  std::vector<Layout> layouts;
  for (const int ep : sizes) {
    if (ep <= 4 || !FewLayouts()) {
      layouts.push_back({.ranks = ep, .expert_parallel = ep});
    }
  }
  return layouts;
}

RunResult RunIn(const Layout& layout, const Problem& problem, Numerics numerics,
                bool padding = false) {
  RunResult result;
  ::moe::testing::RunLocalRanks(
      layout.ranks, [&](std::unique_ptr<Communicator> world) -> absl::Status {
        const bool first = world->rank() == 0;
        MOE_ASSIGN_OR_RETURN(RunResult mine, RunLayer(problem,
                                                      {.layout = layout,
                                                       .numerics = numerics,
                                                       .device = ::moe::testing::LayerDevice(),
                                                       .padding = padding},
                                                      std::move(world)));
        if (first) result = std::move(mine);
        return absl::OkStatus();
      });
  return result;
}

void ExpectSameBits(const Problem& problem, const RunResult& got, const RunResult& expected) {
  for (const TensorReport& t : CompareResults(problem, got, expected, Measure::kBits)) {
    EXPECT_TRUE(t.ok()) << t.tensor << " at " << Describe(t.first);
  }
}

TEST(MoeLayerTest, HoldsForEveryExpertParallelSize) {
  ExpectHolds(Small({6, 5, 7, 6, 1, 6, 6, 9}), ExpertParallel({2, 3, 4, 8}));
}

TEST(MoeLayerTest, HoldsWhenExpertsAreReplicated) {
  ExpectHolds(Small({6, 5, 7, 6, 4, 6}), {{.ranks = 3}, {.ranks = 6, .expert_parallel = 3}});
}

TEST(MoeLayerTest, RanksWithoutTokensJoin) {
  // Two micro-batches on four ranks, and empty micro-batches.
  ExpectHolds(Small({6, 8}), ExpertParallel({3, 4}));
  ExpectHolds(Small({0, 6, 0, 5}), ExpertParallel({2, 4}));
}

TEST(MoeLayerTest, AllTokensToOneExpert) {
  ProblemSpec spec = Small({6, 5, 7, 6});
  spec.layer.router.gate = "switch";
  spec.layer.router.top_k = 1;
  Problem problem = MakeProblem(spec).value();
  const int64_t hidden = spec.layer.router.hidden_size;
  for (int64_t t = 0; t < problem.tokens(); ++t) problem.x[t * hidden] = 1.0f;
  problem.parameters.at("gate.weight")[3 * hidden] = 40.0f;
  const RunResult one = RunIn({}, problem, Numerics::kLayoutInvariant);
  for (size_t i = 0; i < problem.tensors.size(); ++i) {
    if (problem.tensors[i].name != "expert_count") continue;
    EXPECT_EQ(one.tensors[i], (std::vector<float>{0, 0, 0, 24, 0}));
  }
  for (const Layout& layout : ExpertParallel({2, 3, 4, 8})) {
    SCOPED_TRACE(Describe(layout));
    ExpectSameBits(problem, RunIn(layout, problem, Numerics::kLayoutInvariant), one);
  }
}

TEST(MoeLayerTest, EveryTokenToEveryExpert) {
  ProblemSpec spec = Small({4, 3, 5});
  spec.layer.router.top_k = spec.layer.router.num_experts;
  ExpectHolds(spec, ExpertParallel({2, 3, 5}));
}

TEST(MoeLayerTest, FewerExpertsThanRanks) {
  ProblemSpec spec = Small({4, 3, 5, 2});
  spec.layer.router.num_experts = 2;
  ExpectHolds(spec, ExpertParallel({3, 4, 8}));
}

TEST(MoeLayerTest, CapacityDropsTheSameSlotsInEveryLayout) {
  for (const auto policy : {DropPolicy::kProbability, DropPolicy::kPosition}) {
    for (const bool pad : {false, true}) {
      // Which slots a rank drops is its own affair; padding is what the exchanges see.
      if (::moe::testing::kThreadSanitized && (policy == DropPolicy::kPosition || !pad)) continue;
      ProblemSpec spec = Small({6, 6, 6, 6, 6});
      spec.layer.router.capacity_factor = 0.75;
      spec.layer.router.drop_policy = policy;
      spec.layer.router.pad_to_capacity = pad;
      spec.layer.router.micro_batch_tokens = 6;
      ExpectHolds(spec, ExpertParallel({pad ? 3 : 2, 4}));
    }
  }
}

TEST(MoeLayerTest, HoldsForEveryDispatchAndOverlap) {
  std::vector<Layout> layouts;
  for (const auto dispatch :
       {DispatchAlgorithm::kStaged, DispatchAlgorithm::kDirect, DispatchAlgorithm::kHierarchical}) {
    for (const int overlap : {1, 2, 4}) {
      if (FewLayouts() && overlap != 2) continue;
      layouts.push_back(
          {.ranks = 4, .expert_parallel = 4, .dispatch = dispatch, .overlap = overlap});
    }
  }
  layouts.push_back(
      {.ranks = 5, .expert_parallel = 5, .dispatch = DispatchAlgorithm::kDirect, .overlap = 3});
  ProblemSpec spec = Small({6, 5, 7, 6, 3});
  spec.layer.router.num_experts = 18;
  spec.layer.router.top_k = 3;
  ExpectHolds(spec, layouts);
}

// What verify_test, which has every gate in every layout, leaves at its default.
TEST(MoeLayerTest, HoldsForEveryOptionOfEveryRouter) {
  if (FewLayouts()) GTEST_SKIP() << "judges numbers of one rank";
  for (const std::string& gate : GateNames()) {
    const GateDefinition& definition = *FindGate(gate);
    const auto holds = [&](const char* what, const std::function<void(RouterConfig&)>& change) {
      SCOPED_TRACE(gate + ": " + what);
      ProblemSpec spec = Small({12, 6, 0, 18});
      RouterConfig& router = spec.layer.router;
      router.gate = gate;
      router.num_experts = 7;
      router.top_k = definition.only_top_k != 0 ? definition.only_top_k : 3;
      change(router);
      ExpectHolds(spec, {{}});
    };
    for (const DropPolicy policy : {DropPolicy::kProbability, DropPolicy::kPosition}) {
      for (const int64_t group : {0, -1, 6}) {
        holds("capacity of a token group", [&](RouterConfig& c) {
          c.capacity_factor = 0.8;
          c.drop_policy = policy;
          c.token_group.tokens = group;
        });
      }
    }
    holds("z-loss alone", [](RouterConfig& c) { c.load_balancing = LoadBalancing::kNone; });
    if (definition.only_top_k == 0) {
      holds("every expert chosen", [](RouterConfig& c) { c.top_k = c.num_experts; });
    }
    for (const bool norm : {false, true}) {
      if ((definition.options & kGateNormTopK) == 0) continue;
      holds("norm_topk_prob", [&](RouterConfig& c) { c.norm_topk_prob = norm; });
    }
    if ((definition.options & kGateScoreFunction) == 0) continue;
    holds("softmax before the choice", [](RouterConfig& c) { c.pre_softmax = true; });
    holds("sigmoid", [](RouterConfig& c) {
      c.pre_softmax = false;
      c.score_function = ScoreFunction::kSigmoid;
      c.expert_bias = true;
    });
  }
}

// y, dx, gradients, losses, drops, counts and a moved expert bias of every gate, with rows of NaN
// among the tokens, whose y and dx RunLayer expects to be 0. One micro-batch is padding alone.
TEST(MoeLayerTest, PaddingChangesNoBitOfAnyGate) {
  constexpr DispatchAlgorithm kAlgorithms[] = {
      DispatchAlgorithm::kStaged, DispatchAlgorithm::kDirect, DispatchAlgorithm::kHierarchical};
  int next = 0;  // gates take the layouts and options in turn
  for (const std::string& gate : GateNames()) {
    const GateDefinition& definition = *FindGate(gate);
    ProblemSpec spec = Small({8, 5, 0, 7});
    spec.layer.shared_expert_ffn_hidden_size = next % 2 == 0 ? 5 : 0;
    spec.layer.gated_shared_expert = next % 4 == 0;
    RouterConfig& router = spec.layer.router;
    router.gate = gate;
    router.num_experts = 8;
    router.top_k = definition.only_top_k != 0 ? definition.only_top_k : 2;
    if (gate != "expert-choice") router.capacity_factor = 0.8;
    router.token_group.tokens = next % 3 == 0 ? -1 : 0;
    const Problem problem = DrawProblem(spec, /*data_seed=*/1).value();
    const RunResult alone = RunIn({}, problem, Numerics::kLayoutInvariant);
    std::vector<Layout> layouts = {{}};
    for (const int ep : {2, 4}) {
      layouts.push_back({.ranks = 4, .expert_parallel = ep, .dispatch = kAlgorithms[next++ % 3]});
    }
    for (const Layout& layout : layouts) {
      SCOPED_TRACE(gate + " " + Describe(layout));
      ExpectSameBits(problem, RunIn(layout, problem, Numerics::kLayoutInvariant, /*padding=*/true),
                     alone);
    }
  }
}

// Expert inputs that are padded to capacity, chunks that overlap, sums in float32, 16 bits.
TEST(MoeLayerTest, PaddingChangesNoBitOfOtherOptions) {
  const Layout layout = {.ranks = 4, .expert_parallel = 4, .overlap = 2};
  for (const auto& [numerics, dtype] : {std::pair(Numerics::kLayoutInvariant, DType::kFloat32),
                                        std::pair(Numerics::kFast, DType::kFloat32),
                                        std::pair(Numerics::kFast, DType::kBFloat16)}) {
    ProblemSpec spec = Small({6, 6, 6, 6, 6});
    spec.dtype = dtype;
    spec.layer.router.capacity_factor = 0.75;
    spec.layer.router.pad_to_capacity = true;
    spec.layer.router.micro_batch_tokens = 6;
    const Problem problem = DrawProblem(spec, /*data_seed=*/1).value();
    ExpectSameBits(problem, RunIn(layout, problem, numerics, /*padding=*/true),
                   RunIn(layout, problem, numerics));
  }
}

TEST(MoeLayerTest, FastNumericsRepeatsItsOwnBits) {
  const Problem problem = MakeProblem(Small({6, 5, 7, 6, 3, 8})).value();
  const Layout layout = {.ranks = 4, .expert_parallel = 2, .overlap = 2};
  ExpectSameBits(problem, RunIn(layout, problem, Numerics::kFast),
                 RunIn(layout, problem, Numerics::kFast));
}

}  // namespace
}  // namespace moe::verify
