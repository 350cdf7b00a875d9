#include "gating/router.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moe/cli/verify/problem.h"
#include "moe/cli/verify/reference_parts.h"
#include "tests/gating/router_case.h"

namespace moe {
namespace {

// What moe verify's float64 reference says of a case, and the gradient by the logits of
// sum d_slot * weight + aux_loss + z_loss, all without their bounds.
struct Reference {
  std::vector<verify::ReferenceToken> token;
  double aux_loss = 0, z_loss = 0;  // sums over micro-batches
  verify::Grid<double> d_logits;
  std::string undecided;  // what float32 may decide otherwise
};

verify::Grid<double> GridOf(const std::vector<float>& values, int64_t cols) {
  verify::Grid<double> grid(static_cast<int64_t>(values.size()) / cols, cols);
  grid.data = {values.begin(), values.end()};
  return grid;
}

Reference ReferenceOf(const RouterCase<float>& c, const std::vector<float>& d_slot = {}) {
  const auto config = verify::ReferenceConfigOf({.layer = {.router = c.config}}).value();
  verify::LayerWeights<double> weights = {.router = GridOf(c.weight, c.config.hidden_size)};
  const int64_t columns = weights.router.rows;
  if (!c.bias.empty()) weights.router_bias = GridOf(c.bias, columns);
  const verify::ReferenceState state = {
      .expert_bias = {c.expert_bias.begin(), c.expert_bias.end()}};
  const verify::ReferenceBatch batch = {.micro_batch_offsets = c.micro_batches,
                                        .sequence_offsets = c.sequences,
                                        .x = GridOf(c.x, c.config.hidden_size),
                                        .step = c.step};
  Reference result = {.d_logits = {c.tokens, columns}};
  result.token = RouteReference(config, weights, state, batch, batch.x, result.undecided);
  verify::Grid<verify::Sum> d_logits(c.tokens, columns);
  for (size_t b = 0; b + 1 < c.micro_batches.size(); ++b) {
    const verify::ReferenceLoss loss = AddLossGradients(
        config, state, batch, {c.micro_batches[b], c.micro_batches[b + 1]}, result.token, d_logits);
    result.aux_loss += loss.aux.value;
    result.z_loss += loss.z.value;
  }
  auto next = d_slot.begin();
  for (int64_t t = 0; t < c.tokens && !d_slot.empty(); ++t) {
    const auto end = next + static_cast<int64_t>(result.token[t].slots.size());
    AddGateGradient(config, result.token[t], {next, end}, &d_logits(t, 0));
    next = end;
  }
  for (size_t i = 0; i < d_logits.data.size(); ++i) {
    result.d_logits.data[i] = d_logits.data[i].Total().value;
  }
  return result;
}

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

// d_tokens = d_logits W, dW = d_logits^T x, db = column sums of d_logits: within `error`, sums over
// tokens within as much for each.
void ExpectGradients(const RouterCase<float>& c, const CaseGradients<float>& got,
                     const verify::Grid<double>& d_logits, double error) {
  const int64_t hidden = c.config.hidden_size, experts = d_logits.cols;
  const double sum_error = static_cast<double>(c.tokens) * error;
  for (int64_t h = 0; h < hidden; ++h) {
    for (int64_t t = 0; t < c.tokens; ++t) {
      double sum = 0;
      for (int64_t e = 0; e < experts; ++e)
        sum += d_logits(t, e) * double{c.weight[e * hidden + h]};
      ASSERT_NEAR(got.d_tokens[t * hidden + h], sum, error) << t << " " << h;
    }
    for (int64_t e = 0; e < experts; ++e) {
      double sum = 0;
      for (int64_t t = 0; t < c.tokens; ++t) sum += d_logits(t, e) * double{c.x[t * hidden + h]};
      ASSERT_NEAR(got.d_weight[e * hidden + h], sum, sum_error) << e << " " << h;
    }
  }
  for (size_t e = 0; e < got.d_bias.size(); ++e) {
    double sum = 0;
    for (int64_t t = 0; t < c.tokens; ++t) sum += d_logits(t, static_cast<int64_t>(e));
    ASSERT_NEAR(got.d_bias[e], sum, sum_error) << e;
  }
}

class RouterGateTest : public testing::TestWithParam<std::string> {};

std::string TestName(std::string gate) {
  gate.erase(std::remove(gate.begin(), gate.end(), '-'), gate.end());
  return gate;
}

INSTANTIATE_TEST_SUITE_P(Gates, RouterGateTest, testing::ValuesIn(GateNames()),
                         [](const auto& gate) { return TestName(gate.param); });

TEST_P(RouterGateTest, RoutingAndLossesAreThoseOfTheReference) {
  for (const RouterConfig& config : Variants(GetParam())) {
    SCOPED_TRACE(testing::Message() << "group " << config.token_group.tokens << " cf "
                                    << config.capacity_factor.value_or(0));
    const auto c = LogitCase(config, 11);
    // Sinkhorn stops at a change of 1e-4, which the rounding bound of large logits hides.
    if (config.gate == "sinkhorn") {
      for (float& x : c->x) x *= 0.1f;
    }
    const Reference want = ReferenceOf(*c);
    ASSERT_EQ(want.undecided, "");
    ASSERT_TRUE(RunForward(*c).ok());

    size_t s = 0;
    int64_t dropped = 0;
    std::vector<int64_t> count(static_cast<size_t>(config.num_outputs()), 0);
    for (size_t t = 0; t < want.token.size(); ++t) {
      ASSERT_EQ(c->routing.slot_offset[t], static_cast<int64_t>(s));
      for (const verify::ReferenceSlot& slot : want.token[t].slots) {
        ASSERT_EQ(c->routing.expert[s], slot.expert) << t;
        ASSERT_EQ(c->routing.dropped[s] != 0, slot.dropped) << t;
        // p errs by (|l - m| + 10) u with |l - m| < 8, the quotient of two such by twice that.
        ASSERT_NEAR(c->routing.weight[s], slot.weight.value,
                    40 * 0x1p-24 * static_cast<double>(config.scaling_factor))
            << t;
        dropped += slot.dropped ? 1 : 0;
        ++count[static_cast<size_t>(slot.expert)];
        ++s;
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

TEST_P(RouterGateTest, GradientIsThatOfTheReference) {
  for (const RouterConfig& config : Variants(GetParam())) {
    SCOPED_TRACE(testing::Message() << "group " << config.token_group.tokens << " cf "
                                    << config.capacity_factor.value_or(0));
    const auto c = LogitCase(config, 11, /*u=*/2);
    ASSERT_TRUE(RunForward(*c).ok());
    const auto slots = static_cast<size_t>(c->routing.slots());
    const std::vector<float> d_slot = RandomVector<float>(slots, 12);
    // float32: a dozen roundings of values below 4.
    ExpectGradients(*c, RunBackward(*c, d_slot), ReferenceOf(*c, d_slot).d_logits,
                    5e-6 * static_cast<double>(config.scaling_factor));
  }
}

TEST(Router, LogitsAreTheProductOfTokensAndWeight) {
  RouterConfig config = SmallConfig("qwen3", 6);
  config.hidden_size = 19;
  const auto c = LogitCase(config, 21);
  c->x = RandomVector<float>(72 * 19, 22);
  c->weight = RandomVector<float>(6 * 19, 23, 0.3);
  const std::vector<float> d_slot = RandomVector<float>(72 * 3, 24);
  const Reference want = ReferenceOf(*c, d_slot);
  ASSERT_EQ(want.undecided, "");
  ASSERT_TRUE(RunForward(*c).ok());
  for (int64_t t = 0; t < 72; ++t) {
    const verify::ReferenceToken& token = want.token[static_cast<size_t>(t)];
    for (int64_t e = 0; e < 6; ++e) {
      // 19 fused terms, each below 4 * 1.2: 19 roundings of a sum below 20.
      ASSERT_NEAR(c->saved.logits(t, e), token.logits[static_cast<size_t>(e)].value,
                  19 * 20 * 0x1p-24);
    }
    for (size_t j = 0; j < 3; ++j) {
      ASSERT_EQ(c->routing.expert[static_cast<size_t>(3 * t) + j], token.slots[j].expert);
    }
  }
  ExpectGradients(*c, RunBackward(*c, d_slot), want.d_logits, 1e-5);
}

}  // namespace
}  // namespace moe
