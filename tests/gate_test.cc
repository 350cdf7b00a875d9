// Each gate by hand, through the interface that the router uses.
#include "gating/gate.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "gating/router.h"
#include "kernels/base/rng.h"
#include "tests/routing_oracle.h"

namespace moe {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::FloatEq;
using ::testing::Pointwise;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::unique_ptr<const Gate> MakeGate(const std::string& name, int32_t top_k) {
  return FindGate(name)->make({.gate = name, .top_k = top_k});
}

// One gate on [T, E] logits, with the memory that its results live in.
struct Run {
  std::unique_ptr<const Gate> gate;
  std::vector<float> logits;
  int64_t experts = 0;
  std::vector<uint8_t> dropped;
  Workspace workspace;
  std::unique_ptr<Stream> stream = MakeInlineStream();
  GateSelection selection;

  MatrixView<const float> Logits() const {
    return {logits.data(), static_cast<int64_t>(logits.size()) / experts, experts};
  }

  void Select() {
    const auto selected = gate->Select(Logits(), Batch{}, workspace, *stream);
    ASSERT_TRUE(selected.ok()) << selected.status();
    selection = *selected;
    dropped.assign(selection.expert.size(), 0);
  }

  std::vector<float> Backward(const std::vector<float>& d_weight) {
    std::vector<float> d_logits(logits.size(), kNan);  // must be overwritten
    const Routing routing = {.slot_offset = selection.slot_offset,
                             .expert = selection.expert,
                             .weight = selection.weight,
                             .dropped = dropped};
    EXPECT_TRUE(gate->Backward({.logits = Logits(),
                                .probs = selection.probs,
                                .routing = routing,
                                .d_weight = d_weight},
                               MatrixView<float>(d_logits.data(), Logits().rows(), experts),
                               *stream)
                    .ok());
    return d_logits;
  }
};

std::unique_ptr<Run> Select(const std::string& gate, int32_t k, const std::vector<float>& logits,
                            int64_t experts) {
  auto run = std::make_unique<Run>();
  run->gate = MakeGate(gate, k);
  run->logits = logits;
  run->experts = experts;
  run->Select();
  return run;
}

// p = 1/8, 2/8, 4/8, 1/8.
std::vector<float> Eighths() {
  return {0, std::log(2.0f), std::log(4.0f), 0};
}

struct HandMade {
  const char* gate;
  std::vector<int32_t> expert;
  std::vector<float> weight;
  std::vector<float> d_logits;  // for d_weight = 1 at the first choice, 0 at the second
};

TEST(Gates, HandMadeTokenHasTheWeightsAndGradientsOfItsDefinition) {
  const float third = 1.0f / 3;
  // Raw p: dl_e = p_e (d_e - p_2).  Normalised: dl_j = w_j (dw_j - w_2) over the selected.
  const std::vector<float> raw = {-1.0f / 16, -2.0f / 16, 4.0f / 16, -1.0f / 16};
  const std::vector<float> normalised = {0, -third * 2 * third, 2 * third * third, 0};
  const HandMade cases[] = {
      {"switch", {2}, {0.5f}, raw},
      {"olmoe", {2, 1}, {0.5f, 0.25f}, raw},
      {"gshard", {2, 1}, {2 * third, third}, normalised},
      {"mixtral", {2, 1}, {2 * third, third}, normalised},
      {"qwen3", {2, 1}, {2 * third, third}, normalised},
  };
  for (const HandMade& want : cases) {
    SCOPED_TRACE(want.gate);
    const auto k = static_cast<int32_t>(want.expert.size());
    const auto run = Select(want.gate, k, Eighths(), 4);
    EXPECT_THAT(run->selection.expert, ElementsAreArray(want.expert));
    EXPECT_THAT(run->selection.weight, Pointwise(FloatEq(), want.weight));
    EXPECT_THAT(run->selection.slot_offset, ElementsAre(0, k));
    std::vector<float> d_weight(want.expert.size(), 0.0f);
    d_weight[0] = 1;
    EXPECT_THAT(run->Backward(d_weight), Pointwise(testing::FloatNear(1e-7f), want.d_logits));
  }
}

TEST(Gates, OnlyGshardCountsFirstChoicesAlone) {
  EXPECT_EQ(MakeGate("gshard", 2)->balance_choices(), 1);
  EXPECT_EQ(MakeGate("switch", 1)->balance_choices(), 1);
  for (const char* gate : {"mixtral", "olmoe", "qwen3"}) {
    EXPECT_EQ(MakeGate(gate, 3)->balance_choices(), 3) << gate;
  }
}

TEST(Gates, EqualLogitsChooseTheLowestIds) {
  for (const char* gate : {"mixtral", "olmoe", "qwen3"}) {
    const auto run = Select(gate, 3, std::vector<float>(10, 1.5f), 5);
    EXPECT_THAT(run->selection.expert, ElementsAre(0, 1, 2, 0, 1, 2)) << gate;
    EXPECT_THAT(run->selection.count, ElementsAre(2, 2, 2, 0, 0)) << gate;
  }
  EXPECT_THAT(Select("switch", 1, {2, 2, 2}, 3)->selection.expert, ElementsAre(0));
  EXPECT_THAT(Select("gshard", 2, {1, 2, 2, 2}, 4)->selection.expert, ElementsAre(1, 2));
}

TEST(Gates, AllExpertsChosenWeighAsTheSoftmax) {
  for (const char* gate : {"mixtral", "olmoe", "qwen3"}) {
    const auto run = Select(gate, 4, Eighths(), 4);
    EXPECT_THAT(run->selection.expert, ElementsAre(2, 1, 0, 3)) << gate;
    EXPECT_THAT(run->selection.weight,
                Pointwise(FloatEq(), std::vector<float>{.5f, .25f, .125f, .125f}))
        << gate;
  }
}

TEST(Gates, NoTokensSelectNothing) {
  for (const std::string& gate : GateNames()) {
    const auto run = Select(gate, gate == "switch" ? 1 : 2, {}, 4);
    EXPECT_TRUE(run->selection.expert.empty()) << gate;
    EXPECT_THAT(run->selection.slot_offset, ElementsAre(0)) << gate;
    EXPECT_THAT(run->selection.count, Each(0)) << gate;
  }
}

TEST(GshardGate, KeptChoiceOfATokenTakesTheWholeWeight) {
  std::vector<float> logits = Eighths();
  for (int copies = 0; copies < 3; ++copies) {
    for (const float l : Eighths()) logits.push_back(l);
  }
  const auto run = Select("gshard", 2, logits, 4);
  run->dropped = {0, 1, 1, 0, 1, 1, 0, 0};
  ASSERT_TRUE(run->gate->Reweigh(run->selection, run->dropped, *run->stream).ok());
  EXPECT_FLOAT_EQ(run->selection.weight[0], 1);
  EXPECT_FLOAT_EQ(run->selection.weight[3], 1);
  EXPECT_FLOAT_EQ(run->selection.weight[6], 2.0f / 3);
  EXPECT_FLOAT_EQ(run->selection.weight[7], 1.0f / 3);
  // g / g is constant: no gradient but for the token that keeps both.
  const std::vector<float> d_logits = run->Backward({5, 7, 5, 7, 5, 7, 1, 0});
  for (size_t i = 0; i < 12; ++i) EXPECT_NEAR(d_logits[i], 0, 1e-15) << i;
  EXPECT_FLOAT_EQ(d_logits[14], 2.0f / 9);
}

TEST(GshardGate, ChoiceThatUnderflowedStaysZeroWhenItIsTheOnlyOneKept) {
  const auto run = Select("gshard", 2, {0, 200, -kInf}, 3);
  EXPECT_THAT(run->selection.expert, ElementsAre(1, 0));
  run->dropped = {1, 0};
  ASSERT_TRUE(run->gate->Reweigh(run->selection, run->dropped, *run->stream).ok());
  EXPECT_EQ(run->selection.weight[1], 0.0f);
  EXPECT_THAT(run->Backward({1, 1}), Each(0.0f));
}

TEST(Gates, DroppedChoiceOfARenormalisedGateStillShapesTheOthers) {
  // w_0 = e_0 / (e_0 + e_1): with choice 1 dropped, its logit still has a gradient through w_0.
  for (const char* gate : {"mixtral", "qwen3"}) {
    const auto run = Select(gate, 2, Eighths(), 4);
    run->dropped = {0, 1};
    EXPECT_THAT(run->Backward({1, kNan}),
                Pointwise(testing::FloatNear(1e-7f), std::vector<float>{0, -2.0f / 9, 2.0f / 9, 0}))
        << gate;
  }
}

TEST(Gates, NanLogitsGiveNanWeightsAndIdsInRange) {
  for (const std::string& gate : GateNames()) {
    const auto run = Select(gate, gate == "switch" ? 1 : 2, {1, kNan, 2, 0, 0, 0}, 3);
    const size_t k = run->selection.expert.size() / 2;
    for (size_t s = 0; s < 2 * k; ++s) {
      EXPECT_GE(run->selection.expert[s], 0);
      EXPECT_LT(run->selection.expert[s], 3);
      EXPECT_EQ(std::isnan(run->selection.weight[s]), s < k) << gate;
    }
    EXPECT_EQ(run->selection.expert[0], 2) << gate;
  }
}

TEST(RoutingOracle, AgreesWithAHandMadeBatch) {
  // Two tokens that both prefer expert 2 of p = 1/8, 2/8, 4/8, 1/8; room for one.
  const double ln2 = std::log(2.0);
  const oracle::RoutingInput input = {.logits = {{0, ln2, 2 * ln2, 0}, {0, ln2, 2 * ln2, 0}},
                                      .sequence_offsets = {0, 2},
                                      .micro_batch_offsets = {0, 2}};
  oracle::RoutingSpec spec = {.gate = "gshard",
                              .experts = 4,
                              .top_k = 2,
                              .capacity_factor = 1,
                              .aux_coeff = 1,
                              .z_coeff = 1};
  const oracle::RoutingResult gshard = oracle::Route(spec, input);
  EXPECT_THAT(gshard.token[0].expert, ElementsAre(2, 1));
  EXPECT_THAT(gshard.token[1].dropped, ElementsAre(true, true));
  EXPECT_NEAR(gshard.token[0].weight[0], 2.0 / 3, 1e-15);
  EXPECT_NEAR(gshard.aux_loss, 4.0 / 4 * (1.0 * 2), 1e-15);  // P_2 = 1, c_2 = 2
  EXPECT_NEAR(gshard.z_loss, 9 * ln2 * ln2, 1e-14);          // lse = log 8
  spec.gate = "olmoe";
  const oracle::RoutingResult olmoe = oracle::Route(spec, input);
  EXPECT_NEAR(olmoe.token[0].weight[1], 0.25, 1e-15);
  EXPECT_NEAR(olmoe.aux_loss, 4.0 / 8 * (0.5 * 2 + 1.0 * 2), 1e-15);
  EXPECT_EQ(oracle::DecisionMargin(spec, input), 0);  // the two tokens tie for the room
  // d/dl of w_0 = p_2 of token 0: p_2 (1 - p_2), -p_2 p_e.
  spec.capacity_factor = spec.aux_coeff = spec.z_coeff = 0;
  const auto d = oracle::LogitGradient(spec, input, {{1, 0}, {0, 0}});
  EXPECT_NEAR(d[0][2], 0.25, 1e-9);
  EXPECT_NEAR(d[0][1], -0.125, 1e-9);
  EXPECT_EQ(d[1][2], 0);
}

}  // namespace
}  // namespace moe
