#include "gating/router.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/rng.h"
#include "tests/routing_oracle.h"

namespace moe {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// One router with its inputs; the router's weight is the identity, so that logits are the tokens
// and the gradient by the tokens is the gradient by the logits, unless a test sets another one.
template <typename T>
struct Case {
  RouterConfig config;
  int64_t tokens = 0;
  std::vector<T> x, weight;
  std::vector<int64_t> sequences, micro_batches;

  Workspace workspace;
  std::unique_ptr<Stream> stream = MakeInlineStream();
  RouterSaved<T> saved;
  RouterStats stats;
  Routing routing;

  Batch batch() const {
    return {.sequence_offsets = sequences, .micro_batch_offsets = micro_batches};
  }
  MatrixView<const T> X() const { return {x.data(), tokens, config.hidden_size}; }
  MatrixView<const T> W() const { return {weight.data(), config.num_experts, config.hidden_size}; }
};

template <typename T>
std::vector<T> RandomVector(size_t size, uint64_t seed, double scale = 1) {
  std::vector<T> values(size);
  for (size_t i = 0; i < size; ++i) {
    values[i] = static_cast<T>(static_cast<float>(scale * Normal({.seed = seed, .item = i})));
  }
  return values;
}

RouterConfig SmallConfig(const std::string& gate, int32_t experts) {
  const int32_t k = gate == "switch" ? 1 : gate == "gshard" ? 2 : std::min(3, experts);
  return {.gate = gate, .num_experts = experts, .top_k = k, .hidden_size = experts};
}

// Three micro-batches of sequences of 4, 8, 12 | 12, 12 | 24 tokens.
template <typename T = float>
std::unique_ptr<Case<T>> LogitCase(const RouterConfig& config, uint64_t seed) {
  auto c = std::make_unique<Case<T>>();
  c->config = config;
  c->sequences = {0, 4, 12, 24, 36, 48, 72};
  c->micro_batches = {0, 24, 48, 72};
  c->tokens = 72;
  c->x = RandomVector<T>(static_cast<size_t>(72 * config.num_experts), seed);
  c->weight.assign(
      static_cast<size_t>(config.num_experts) * static_cast<size_t>(config.num_experts), T(0.0f));
  for (size_t e = 0; e < static_cast<size_t>(config.num_experts); ++e) {
    c->weight[e * static_cast<size_t>(config.num_experts) + e] = T(1.0f);
  }
  return c;
}

template <typename T>
absl::Status Forward(Case<T>& c) {
  auto router = Router<T>::Create(c.config);
  if (!router.ok()) return router.status();
  auto routing =
      (*router)->Forward(c.X(), c.W(), c.batch(), c.workspace, *c.stream, &c.saved, &c.stats);
  if (!routing.ok()) return routing.status();
  c.routing = *routing;
  return absl::OkStatus();
}

template <typename T>
struct Gradients {
  std::vector<T> d_tokens;
  std::vector<float> d_weight;
};

template <typename T>
Gradients<T> Backward(Case<T>& c, const std::vector<float>& d_slot, float loss_scale = 1) {
  Gradients<T> g;
  g.d_tokens.assign(c.x.size(), T(0.0f));
  g.d_weight.assign(c.weight.size(), 0.0f);
  const auto router = Router<T>::Create(c.config);
  const absl::Status status =
      (*router)->Backward(d_slot, c.saved, c.W(), loss_scale,
                          MatrixView<T>(g.d_tokens.data(), c.tokens, c.config.hidden_size),
                          GradAccumulator(absl::MakeSpan(g.d_weight)), c.workspace, *c.stream);
  EXPECT_TRUE(status.ok()) << status;
  return g;
}

oracle::RoutingSpec SpecOf(const RouterConfig& config) {
  const int64_t group = config.token_group.tokens;
  const oracle::Unit unit = group == 0    ? oracle::Unit::kMicroBatch
                            : group == -1 ? oracle::Unit::kSequence
                                          : oracle::Unit::kBlock;
  return {.gate = config.gate,
          .experts = config.num_experts,
          .top_k = config.top_k,
          .capacity_factor = config.capacity_factor.value_or(0),
          .drop = config.drop_policy == DropPolicy::kPosition ? oracle::Drop::kByPosition
                                                              : oracle::Drop::kByWeight,
          .capacity_unit = unit,
          .balance_unit =
              config.load_balancing == LoadBalancing::kSeqAuxLoss ? oracle::Unit::kSequence : unit,
          .block = group,
          .aux_coeff = config.load_balancing == LoadBalancing::kNone
                           ? 0
                           : static_cast<double>(config.aux_loss_coeff),
          .z_coeff = static_cast<double>(config.z_loss_coeff)};
}

// x * W^T in float64.
template <typename T>
oracle::RoutingInput InputOf(const Case<T>& c) {
  oracle::RoutingInput input;
  input.sequence_offsets = c.sequences;
  input.micro_batch_offsets = c.micro_batches;
  for (int64_t t = 0; t < c.tokens; ++t) {
    std::vector<double> l;
    for (int64_t e = 0; e < c.config.num_experts; ++e) {
      double sum = 0;
      for (int64_t h = 0; h < c.config.hidden_size; ++h) {
        sum += double{static_cast<float>(c.X()(t, h))} * double{static_cast<float>(c.W()(e, h))};
      }
      l.push_back(sum);
    }
    input.logits.push_back(l);
  }
  return input;
}

// The configurations that together meet every branch: units, policies, losses.
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
  all.push_back(sequence_loss);
  RouterConfig z_only = plain;
  z_only.load_balancing = LoadBalancing::kNone;
  z_only.aux_loss_coeff = 1;
  z_only.z_loss_coeff = 0.5f;
  all.push_back(z_only);
  RouterConfig all_experts = plain;
  if (gate != "switch" && gate != "gshard") all_experts.top_k = 7;
  all_experts.aux_loss_coeff = 0.5f;
  all.push_back(all_experts);
  return all;
}

class RouterGateTest : public testing::TestWithParam<const char*> {};

INSTANTIATE_TEST_SUITE_P(Gates, RouterGateTest,
                         testing::Values("switch", "gshard", "mixtral", "olmoe", "qwen3"),
                         [](const auto& gate) { return std::string(gate.param); });

TEST_P(RouterGateTest, RoutingAndLossesAreThoseOfTheOracle) {
  for (const RouterConfig& config : Variants(GetParam())) {
    SCOPED_TRACE(testing::Message() << "group " << config.token_group.tokens << " cf "
                                    << config.capacity_factor.value_or(0));
    const auto c = LogitCase(config, 11);
    const oracle::RoutingSpec spec = SpecOf(config);
    const oracle::RoutingInput input = InputOf(*c);
    ASSERT_GT(oracle::DecisionMargin(spec, input), 1e-5);  // float32 rounding is below 1e-6
    ASSERT_TRUE(Forward(*c).ok());
    const oracle::RoutingResult want = oracle::Route(spec, input);

    size_t s = 0;
    int64_t dropped = 0;
    std::vector<int64_t> count(7, 0);
    for (size_t t = 0; t < want.token.size(); ++t) {
      ASSERT_EQ(c->routing.slot_offset[t], static_cast<int64_t>(s));
      for (size_t j = 0; j < want.token[t].expert.size(); ++j, ++s) {
        ASSERT_EQ(c->routing.expert[s], want.token[t].expert[j]) << t;
        ASSERT_EQ(c->routing.dropped[s] != 0, want.token[t].dropped[j]) << t << " " << j;
        // p errs by (|l - m| + 10) u with |l - m| < 8, the quotient of two such by twice that.
        ASSERT_NEAR(c->routing.weight[s], want.token[t].weight[j], 40 * 0x1p-24) << t;
        dropped += want.token[t].dropped[j];
        ++count[static_cast<size_t>(want.token[t].expert[j])];
      }
    }
    EXPECT_EQ(c->routing.slots(), static_cast<int64_t>(s));
    EXPECT_EQ(c->routing.tokens(), 72);
    EXPECT_EQ(c->stats.dropped_slots, dropped);
    EXPECT_EQ(c->stats.expert_count, count);
    EXPECT_EQ(dropped > 0, config.capacity_factor.has_value());
    // Relative error of p and of lse as above; everything after is float64.
    EXPECT_NEAR(c->stats.aux_loss, want.aux_loss, 20 * 0x1p-24 * want.aux_loss);
    EXPECT_NEAR(c->stats.z_loss, want.z_loss, 20 * 0x1p-24 * (want.z_loss + 1));
  }
}

TEST_P(RouterGateTest, GradientIsThatOfFiniteDifferences) {
  for (const RouterConfig& config : Variants(GetParam())) {
    SCOPED_TRACE(testing::Message() << "group " << config.token_group.tokens << " cf "
                                    << config.capacity_factor.value_or(0));
    const auto c = LogitCase(config, 11);
    const oracle::RoutingSpec spec = SpecOf(config);
    const oracle::RoutingInput input = InputOf(*c);
    ASSERT_TRUE(Forward(*c).ok());
    const auto k = static_cast<size_t>(config.top_k);
    const std::vector<float> d_slot = RandomVector<float>(72 * k, 12);
    std::vector<std::vector<double>> d_weight(72);
    for (size_t s = 0; s < d_slot.size(); ++s) d_weight[s / k].push_back(double{d_slot[s]});
    const auto want = oracle::LogitGradient(spec, input, d_weight);

    const Gradients<float> g = Backward(*c, d_slot);
    const auto experts = static_cast<size_t>(config.num_experts);
    for (size_t t = 0; t < 72; ++t) {
      for (size_t e = 0; e < experts; ++e) {
        // Central differences with step 1e-5: h^2/6 * f''' + eps/h, both below 1e-9 here; float32:
        // a dozen roundings of values below 4.
        ASSERT_NEAR(g.d_tokens[t * experts + e], want[t][e], 5e-6) << t << " " << e;
      }
    }
    // dW = d_logits^T x.
    for (size_t e = 0; e < experts; ++e) {
      for (size_t h = 0; h < experts; ++h) {
        double sum = 0;
        for (size_t t = 0; t < 72; ++t) sum += want[t][e] * double{c->x[t * experts + h]};
        ASSERT_NEAR(g.d_weight[e * experts + h], sum, 72 * 5e-6) << e << " " << h;
      }
    }
  }
}

}  // namespace
}  // namespace moe
