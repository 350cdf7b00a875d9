#include "gating/router.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/gating/router_case.h"
#include "tests/gating/routing_oracle.h"

namespace moe {
namespace {

// The configurations that together meet every branch: units, policies, losses, the gate's own
// options.
std::vector<RouterConfig> Variants(const std::string& gate) {
  const RouterConfig plain = SmallConfig(gate, 7);
  std::vector<RouterConfig> all = {plain};
  for (const DropPolicy policy : {DropPolicy::kProbability, DropPolicy::kPosition}) {
    for (const int64_t group : {0, -1, 6}) {
      RouterConfig c = plain;
      c.capacity_factor = 0.8;
      c.drop_policy = policy;
      // Sequences of the case are no multiples of 6 long, its micro-batches are.
      c.token_group.tokens = group;
      c.aux_loss_coeff = 0.7f;
      c.z_loss_coeff = policy == DropPolicy::kPosition ? 0.3f : 0.0f;
      all.push_back(c);
    }
  }
  RouterConfig sequence_loss = plain;
  sequence_loss.load_balancing = LoadBalancing::kSeqAuxLoss;
  sequence_loss.aux_loss_coeff = 0.9f;
  if (gate != "noisy-topk") all.push_back(sequence_loss);  // its own loss has the token group
  RouterConfig z_only = plain;
  z_only.load_balancing = LoadBalancing::kNone;
  z_only.aux_loss_coeff = 1;
  z_only.z_loss_coeff = 0.5f;
  all.push_back(z_only);
  RouterConfig all_experts = plain;
  if (FindGate(gate)->only_top_k == 0) all_experts.top_k = 7;
  all_experts.aux_loss_coeff = 0.5f;
  all.push_back(all_experts);
  const uint32_t options = FindGate(gate)->options;
  if ((options & kGateGroups) != 0) {
    RouterConfig groups = SmallConfig(gate, 12);
    groups.num_groups = 4;
    groups.group_top_k = 2;
    groups.top_k = 4;
    groups.scaling_factor = 2.5f;
    groups.aux_loss_coeff = 0.6f;
    all.push_back(groups);
  }
  if ((options & kGateNormTopK) != 0) {
    for (const bool norm : {false, true}) {
      RouterConfig normalised = plain;
      normalised.norm_topk_prob = norm;
      all.push_back(normalised);
    }
  }
  if ((options & kGateScoreFunction) != 0) {
    RouterConfig score = plain;
    score.pre_softmax = true;
    all.push_back(score);
    score.pre_softmax = false;
    score.score_function = ScoreFunction::kSigmoid;
    score.expert_bias = true;
    score.aux_loss_coeff = 0.3f;
    score.z_loss_coeff = 0.2f;
    all.push_back(score);
  }
  if ((options & kGateRouterJitter) != 0) {
    RouterConfig shared = plain;  // many logits are near
    shared.router_jitter = 0.3f;
    shared.capacity_factor = 0.8;
    shared.aux_loss_coeff = 0.7f;
    all.push_back(shared);
  }
  if ((options & kGateRandomSecond) != 0) {
    RouterConfig random = plain;
    random.random_second_expert = true;
    random.capacity_factor = 0.8;
    random.aux_loss_coeff = 0.7f;
    all.push_back(random);
  }
  if ((options & kGateZeroExperts) != 0) {
    RouterConfig zero = plain;
    zero.num_experts = 4;
    zero.num_zero_experts = 3;
    zero.capacity_factor = 0.5;
    zero.aux_loss_coeff = 0.4f;
    all.push_back(zero);
  }
  return all;
}

class RouterGateTest : public testing::TestWithParam<std::string> {};

std::string TestName(std::string gate) {
  gate.erase(std::remove(gate.begin(), gate.end(), '-'), gate.end());
  return gate;
}

INSTANTIATE_TEST_SUITE_P(Gates, RouterGateTest, testing::ValuesIn(GateNames()),
                         [](const auto& gate) { return TestName(gate.param); });

TEST_P(RouterGateTest, RoutingAndLossesAreThoseOfTheOracle) {
  for (const RouterConfig& config : Variants(GetParam())) {
    SCOPED_TRACE(testing::Message() << "group " << config.token_group.tokens << " cf "
                                    << config.capacity_factor.value_or(0));
    const auto c = LogitCase(config, 11);
    const oracle::RoutingSpec spec = SpecOf(config);
    const oracle::RoutingInput input = InputOf(*c);
    ASSERT_GT(oracle::DecisionMargin(spec, input), 1e-5);  // float32 rounding is below 1e-6
    ASSERT_TRUE(RunForward(*c).ok());
    const oracle::RoutingResult want = oracle::Route(spec, input);

    size_t s = 0;
    int64_t dropped = 0;
    std::vector<int64_t> count(static_cast<size_t>(config.num_outputs()), 0);
    for (size_t t = 0; t < want.token.size(); ++t) {
      ASSERT_EQ(c->routing.slot_offset[t], static_cast<int64_t>(s));
      for (size_t j = 0; j < want.token[t].expert.size(); ++j, ++s) {
        ASSERT_EQ(c->routing.expert[s], want.token[t].expert[j]) << t;
        ASSERT_EQ(c->routing.dropped[s] != 0, want.token[t].dropped[j]) << t << " " << j;
        // p errs by (|l - m| + 10) u with |l - m| < 8, the quotient of two such by twice that.
        ASSERT_NEAR(c->routing.weight[s], want.token[t].weight[j],
                    40 * 0x1p-24 * static_cast<double>(config.scaling_factor))
            << t;
        dropped += want.token[t].dropped[j];
        ++count[static_cast<size_t>(want.token[t].expert[j])];
      }
    }
    EXPECT_EQ(c->routing.slots(), static_cast<int64_t>(s));
    EXPECT_EQ(c->routing.tokens(), 72);
    EXPECT_EQ(c->stats.dropped_slots, dropped);
    EXPECT_EQ(c->stats.expert_count, count);
    const bool drops = config.capacity_factor.has_value() && config.gate != "expert-choice";
    EXPECT_EQ(dropped > 0, drops);
    // Relative error of p and of lse as above; everything after is float64.
    EXPECT_NEAR(c->stats.aux_loss, want.aux_loss, 20 * 0x1p-24 * want.aux_loss);
    EXPECT_NEAR(c->stats.z_loss, want.z_loss, 20 * 0x1p-24 * (want.z_loss + 1));
  }
}

TEST_P(RouterGateTest, GradientIsThatOfFiniteDifferences) {
  for (const RouterConfig& config : Variants(GetParam())) {
    SCOPED_TRACE(testing::Message() << "group " << config.token_group.tokens << " cf "
                                    << config.capacity_factor.value_or(0));
    const auto c = LogitCase(config, 11, /*u=*/2);
    const oracle::RoutingSpec spec = SpecOf(config);
    const oracle::RoutingInput input = InputOf(*c);
    ASSERT_TRUE(RunForward(*c).ok());
    const auto tokens = static_cast<size_t>(c->tokens);
    const auto slots = static_cast<size_t>(c->routing.slots());
    const std::vector<float> d_slot = RandomVector<float>(slots, 12);
    std::vector<std::vector<double>> d_weight(tokens);
    for (size_t t = 0; t < tokens; ++t) {
      const auto first = static_cast<size_t>(c->routing.slot_offset[t]);
      const auto last = static_cast<size_t>(c->routing.slot_offset[t + 1]);
      for (size_t s = first; s < last; ++s) d_weight[t].push_back(double{d_slot[s]});
    }
    const auto want = oracle::LogitGradient(spec, input, d_weight);

    const CaseGradients<float> g = RunBackward(*c, d_slot);
    const auto experts = want.front().size();  // logits of a token
    for (size_t t = 0; t < tokens; ++t) {
      for (size_t e = 0; e < experts; ++e) {
        // Central differences with step 1e-5: h^2/6 * f''' + eps/h, both below 1e-9 here; float32:
        // a dozen roundings of values below 4.
        ASSERT_NEAR(g.d_tokens[t * experts + e], want[t][e],
                    5e-6 * static_cast<double>(config.scaling_factor))
            << t << " " << e;
      }
    }
    // dW = d_logits^T x.
    for (size_t e = 0; e < experts; ++e) {
      for (size_t h = 0; h < experts; ++h) {
        double sum = 0;
        for (size_t t = 0; t < tokens; ++t) sum += want[t][e] * double{c->x[t * experts + h]};
        ASSERT_NEAR(g.d_weight[e * experts + h], sum,
                    static_cast<double>(tokens) * 5e-6 * static_cast<double>(config.scaling_factor))
            << e << " " << h;
      }
    }
    // db = column sums of d_logits.
    for (size_t e = 0; e < g.d_bias.size(); ++e) {
      double sum = 0;
      for (size_t t = 0; t < tokens; ++t) sum += want[t][e];
      ASSERT_NEAR(g.d_bias[e], sum, static_cast<double>(tokens) * 5e-6) << e;
    }
  }
}

TEST(Router, LogitsAreTheProductOfTokensAndWeight) {
  RouterConfig config = SmallConfig("qwen3", 6);
  config.hidden_size = 19;
  const auto c = LogitCase(config, 21);
  c->x = RandomVector<float>(72 * 19, 22);
  c->weight = RandomVector<float>(6 * 19, 23, 0.3);
  const oracle::RoutingInput input = InputOf(*c);
  ASSERT_GT(oracle::DecisionMargin(SpecOf(config), input), 1e-4);
  ASSERT_TRUE(RunForward(*c).ok());
  const oracle::RoutingResult want = oracle::Route(SpecOf(config), input);
  for (int64_t t = 0; t < 72; ++t) {
    for (int64_t e = 0; e < 6; ++e) {
      // 19 fused terms, each below 4 * 1.2: 19 roundings of a sum below 20.
      const double l = input.logits[static_cast<size_t>(t)][static_cast<size_t>(e)];
      ASSERT_NEAR(c->saved.logits(t, e), l, 19 * 20 * 0x1p-24);
    }
    const oracle::TokenRouting& token = want.token[static_cast<size_t>(t)];
    for (size_t j = 0; j < 3; ++j) {
      ASSERT_EQ(c->routing.expert[static_cast<size_t>(3 * t) + j], token.expert[j]);
    }
  }
  // The gradient goes through the weight: d_tokens = d_logits W, dW = d_logits^T x.
  const std::vector<float> d_slot = RandomVector<float>(72 * 3, 24);
  std::vector<std::vector<double>> d_weight(72);
  for (size_t s = 0; s < d_slot.size(); ++s) d_weight[s / 3].push_back(double{d_slot[s]});
  const auto d_logits = oracle::LogitGradient(SpecOf(config), input, d_weight);
  const CaseGradients<float> g = RunBackward(*c, d_slot);
  for (size_t t = 0; t < 72; ++t) {
    for (size_t h = 0; h < 19; ++h) {
      double sum = 0;
      for (size_t e = 0; e < 6; ++e) sum += d_logits[t][e] * double{c->weight[e * 19 + h]};
      ASSERT_NEAR(g.d_tokens[t * 19 + h], sum, 2e-5);  // six terms with the error of d_logits
    }
  }
  for (size_t e = 0; e < 6; ++e) {
    for (size_t h = 0; h < 19; ++h) {
      double sum = 0;
      for (size_t t = 0; t < 72; ++t) sum += d_logits[t][e] * double{c->x[t * 19 + h]};
      ASSERT_NEAR(g.d_weight[e * 19 + h], sum, 72 * 1e-5);
    }
  }
}

}  // namespace
}  // namespace moe
