// The oracle itself, by hand.
#include "tests/gating/routing_oracle.h"

#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace moe {
namespace {

using ::testing::ElementsAre;

TEST(RoutingOracle, AgreesWithAHandMadeBatch) {
  // Two tokens that both prefer expert 2 of p = 1/8, 2/8, 4/8, 1/8; room for one.
  const double ln2 = std::log(2.0);
  const oracle::RoutingInput input = {.logits = {{0, ln2, 2 * ln2, 0}, {0, ln2, 2 * ln2, 0}},
                                      .sequence_offsets = {0, 2},
                                      .micro_batch_offsets = {0, 2}};
  oracle::RoutingSpec spec = oracle::RuleOf("gshard", 2);
  spec.experts = 4;
  spec.capacity_factor = spec.aux_coeff = spec.z_coeff = 1;
  const oracle::RoutingResult gshard = oracle::Route(spec, input);
  EXPECT_THAT(gshard.token[0].expert, ElementsAre(2, 1));
  EXPECT_THAT(gshard.token[1].dropped, ElementsAre(true, true));
  EXPECT_NEAR(gshard.token[0].weight[0], 2.0 / 3, 1e-15);
  EXPECT_NEAR(gshard.aux_loss, 4.0 / 4 * (1.0 * 2), 1e-15);  // P_2 = 1, c_2 = 2
  EXPECT_NEAR(gshard.z_loss, 9 * ln2 * ln2, 1e-14);          // lse = log 8
  spec.gate = "olmoe";
  spec.normalised = false;
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
