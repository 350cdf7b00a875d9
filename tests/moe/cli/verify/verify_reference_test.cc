// The float64 reference of moe verify: by hand, and its gradients by central differences.
#include <cmath>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/base/dtype.h"
#include "kernels/base/rng.h"
#include "moe/cli/verify/reference.h"

namespace moe::verify {
namespace {

Grid<double> Filled(int64_t rows, int64_t cols, const std::vector<double>& values) {
  Grid<double> grid(rows, cols);
  grid.data = values;
  return grid;
}

double Silu(double v) {
  return v / (1 + std::exp(-v));
}

// H = 1, F = 1, two experts e with out(x) = scale_e * silu(x) * x.
struct Tiny {
  ReferenceConfig config = {.experts = 2, .top_k = 1, .hidden = 1, .ffn = 1};
  LayerWeights<double> weights;
  ReferenceState state;
  ReferenceBatch batch;

  Tiny(const std::vector<double>& router, const std::vector<double>& x) {
    weights.router = Filled(2, 1, router);
    for (const double scale : {1.0, -2.0}) {
      ExpertWeights<double> expert;
      expert.gate_up = Filled(2, 1, {1, 1});
      expert.down = Filled(1, 1, {scale});
      weights.experts.push_back(expert);
    }
    const auto tokens = static_cast<int64_t>(x.size());
    batch = {.micro_batch_offsets = {0, tokens},
             .sequence_offsets = {0, tokens},
             .x = Filled(tokens, 1, x),
             .dy = Filled(tokens, 1, std::vector<double>(x.size(), 1.0))};
  }
  ReferenceResult Run() const { return RunReference(config, weights, state, batch); }
};

TEST(ReferenceTest, TokenGoesToItsLargestLogitByHand) {
  // logits of x = 2 are 2 and -2: expert 0, weight 1: y = silu(2) * 2.
  Tiny tiny({1, -1}, {2, -1});
  tiny.config.gate.normalised = true;
  const ReferenceResult result = tiny.Run();
  EXPECT_EQ(result.undecided, "");
  EXPECT_NEAR(result.y(0, 0).value, Silu(2) * 2, 1e-15);
  // x = -1: logits -1 and 1: expert 1: -2 * silu(-1) * -1.
  EXPECT_NEAR(result.y(1, 0).value, 2 * Silu(-1), 1e-15);
  EXPECT_EQ(result.expert_count, (std::vector<int64_t>{1, 1}));
  // One weight of 1 whatever the logits: no gradient reaches the router.
  EXPECT_NEAR(result.gradients.router(0, 0).value, 0, 1e-15);
  // Each expert's down projection: d = dy * hidden.
  EXPECT_NEAR(result.gradients.experts[0].down(0, 0).value, Silu(2) * 2, 1e-15);
}

TEST(ReferenceTest, CapacityKeepsTheLargestWeightOrTheFirstToken) {
  // Both tokens want expert 0, C = ceil(2 * 1 * 1 / 2) = 1; the second one wants it more.
  Tiny tiny({1, -1}, {1, 2});
  tiny.config.capacity_factor = 1.0;
  ReferenceResult result = tiny.Run();
  EXPECT_EQ(result.dropped, std::vector<int64_t>{1});
  EXPECT_EQ(result.y(0, 0).value, 0);
  EXPECT_GT(result.y(1, 0).value, 0);
  tiny.config.drop_by_position = true;
  result = tiny.Run();
  EXPECT_GT(result.y(0, 0).value, 0);
  EXPECT_EQ(result.y(1, 0).value, 0);
}

TEST(ReferenceTest, CapacityFactorIsADecimal) {
  // All want expert 0: C = 100 * 1.1 / 2 = 55; in float64, 100 * 1.1 is above 110.
  Tiny tiny({1, -1}, std::vector<double>(100, 1));
  tiny.config.capacity_factor = 1.1;
  EXPECT_EQ(tiny.Run().dropped, std::vector<int64_t>{45});
  tiny.config.capacity_factor = 1e-30;
  EXPECT_EQ(tiny.Run().dropped, std::vector<int64_t>{99});
  tiny.config.capacity_factor = 2;
  EXPECT_EQ(tiny.Run().dropped, std::vector<int64_t>{0});
}

TEST(ReferenceTest, EvenLoadCostsTheCoefficient) {
  // Equal logits: p = 1/2 each; ties go to expert 0, so c = (2, 0):
  // L = 0.1 * 2 / (1 * 4) * (1 * 2 + 1 * 0) = 0.1.
  Tiny tiny({0, 0}, {1, 2});
  tiny.config.gate.balance_choices = 1;
  tiny.config.balance = LoadBalancing::kAuxLoss;
  tiny.config.aux_coeff = 0.1;
  tiny.config.z_coeff = 1;
  const ReferenceResult result = tiny.Run();
  EXPECT_EQ(result.expert_count, (std::vector<int64_t>{2, 0}));
  EXPECT_NEAR(result.aux_loss[0].value, 0.1, 1e-15);
  EXPECT_NEAR(result.z_loss[0].value, std::log(2.0) * std::log(2.0), 1e-15);
}

TEST(ReferenceTest, NearDecisionIsReportedAndAnExactTieIsNot) {
  EXPECT_EQ(Tiny({1, 1}, {1}).Run().undecided, "");
  EXPECT_NE(Tiny({1, 1 + 1e-9}, {1}).Run().undecided, "");
  EXPECT_EQ(Tiny({1, 1 + 1e-3}, {1}).Run().undecided, "");
}

TEST(ReferenceTest, ExpertBiasMovesTowardsTheMean) {
  const ReferenceConfig config = {.experts = 3, .bias_update_rate = 0.25};
  ReferenceState state = {.expert_bias = {0, 0.5, -1}};
  EndReferenceStep(config, {4, 0, 2}, state);  // the mean is 2
  EXPECT_EQ(state.expert_bias, (std::vector<double>{-0.25, 0.75, -1}));
  EXPECT_EQ(state.expert_share, (std::vector<double>{4.0 / 6, 0, 2.0 / 6}));
}

TEST(ReferenceTest, RoundsToNearestEven) {
  EXPECT_EQ(RoundTo({}, 1 + 0x1p-24), 1.0);
  EXPECT_EQ(RoundTo({}, 1 + 3 * 0x1p-24), 1 + 0x1p-22);
  EXPECT_EQ(RoundTo({.bits = 8}, -257.0), -256.0);
  EXPECT_EQ(RoundTo({}, 0.1), static_cast<double>(0.1f));
  const Storage half = {.bits = 11, .least_log2 = -24};
  EXPECT_EQ(RoundTo(half, 0.1), static_cast<double>(static_cast<float>(Float16(0.1f))));
  EXPECT_EQ(RoundTo(half, 5 * 0x1p-25), 0x1p-23);  // 2.5 units, below the normal numbers
  EXPECT_EQ(RoundTo(half, -0x1p-26), 0.0);
}

TEST(BoundedTest, ErrorCoversFloat32ArithmeticInAnyOrder) {
  // 1 + 2^-24 + ... in float32, ascending, loses every small term; the bound says that it may.
  Sum sum;
  float forward = 0;
  for (int i = 0; i < 100; ++i) {
    const double term = i == 0 ? 1 : 0x1p-25;
    sum.Add(term);
    forward += static_cast<float>(term);
  }
  const Bounded total = sum.Total();
  EXPECT_NE(static_cast<double>(forward), total.value);
  EXPECT_LE(std::fabs(static_cast<double>(forward) - total.value), total.error);
  // 100 roundings of a magnitude near 1, and no more.
  EXPECT_LE(total.error, 101 * kUnit * 1.01);
}

// A layer of every mechanism at small sizes, at random.
struct Random {
  ReferenceConfig config;
  LayerWeights<double> weights;
  ReferenceState state;
  ReferenceBatch batch;
  uint64_t next = 0;

  double Draw() { return Normal({.seed = 9, .purpose = RandomPurpose::kData, .item = next++}); }
  Grid<double> Draw(int64_t rows, int64_t cols, double scale) {
    Grid<double> grid(rows, cols);
    for (double& v : grid.data) v = scale * Draw();
    return grid;
  }
  ExpertWeights<double> DrawExpert(int64_t ffn, bool biases) {
    const int64_t rows = config.gated_activation() ? 2 * ffn : ffn;
    ExpertWeights<double> e;
    e.gate_up = Draw(rows, config.hidden, 0.7);
    e.down = Draw(config.hidden, ffn, 0.7);
    if (biases) {
      e.gate_up_bias = Draw(1, rows, 0.3);
      e.down_bias = Draw(1, config.hidden, 0.3);
    }
    return e;
  }

  explicit Random(const ReferenceConfig& c) : config(c) {
    config.hidden = 3;
    config.ffn = 2;
    config.balance =
        config.balance == LoadBalancing::kNone ? LoadBalancing::kAuxLoss : config.balance;
    config.aux_coeff = 0.5;
    config.z_coeff = 0.25;
    const bool noisy = config.gate.selection == ReferenceSelection::kNoisyTopK;
    // Sinkhorn stops at a change of 1e-4, which the rounding bound of large logits hides.
    const bool sinkhorn = config.gate.selection == ReferenceSelection::kSinkhorn;
    weights.router = Draw(config.outputs() * (noisy ? 2 : 1), config.hidden, sinkhorn ? 0.1 : 1);
    if (config.gate.router_bias) weights.router_bias = Draw(1, config.outputs(), 0.3);
    for (int64_t e = 0; e < config.experts; ++e) {
      weights.experts.push_back(DrawExpert(config.ffn, config.projection_biases));
    }
    if (config.shared_ffn > 0) weights.shared = DrawExpert(config.shared_ffn, false);
    if (config.shared_gated) weights.shared_gate = Draw(1, config.hidden, 1);
    for (int64_t e = 0; config.gate.expert_bias && e < config.outputs(); ++e) {
      state.expert_bias.push_back(0.3 * Draw());
    }
    state.expert_share.assign(config.outputs(), 0);
    state.expert_share[0] = 1;
    batch = {.micro_batch_offsets = {0, 4, 4, 7},
             .sequence_offsets = {0, 2, 4, 7},
             .x = Draw(7, config.hidden, 1),
             .dy = Draw(7, config.hidden, 1)};
  }

  // sum over micro-batches of <y, dy> + aux + z: what gradients are of.
  double Loss() const {
    const ReferenceResult result = RunReference(config, weights, state, batch);
    double loss = 0;
    for (size_t i = 0; i < result.y.data.size(); ++i) {
      loss += result.y.data[i].value * batch.dy.data[i];
    }
    for (const Bounded& l : result.aux_loss) loss += l.value;
    for (const Bounded& l : result.z_loss) loss += l.value;
    return loss;
  }
};

// (L(v + h) - L(v - h)) / 2h is off by h^2 L''' / 6 + eps L / h: with h = 1e-5, L of some ten and
// third derivatives of some hundred, below 1e-7.
void ExpectGradient(Random& random, Grid<double>& values, const Grid<Bounded>& gradient,
                    const std::string& name) {
  constexpr double kStep = 1e-5;
  ASSERT_EQ(values.data.size(), gradient.data.size()) << name;
  for (size_t i = 0; i < values.data.size(); ++i) {
    const double kept = values.data[i];
    values.data[i] = kept + kStep;
    const double above = random.Loss();
    values.data[i] = kept - kStep;
    const double below = random.Loss();
    values.data[i] = kept;
    EXPECT_NEAR(gradient.data[i].value, (above - below) / (2 * kStep), 1e-7) << name << " " << i;
  }
}

struct NamedConfig {
  const char* name;
  ReferenceConfig config;
};
void PrintTo(const NamedConfig& config, std::ostream* out) {
  *out << config.name;
}

class ReferenceGradient : public ::testing::TestWithParam<NamedConfig> {};

TEST_P(ReferenceGradient, IsTheDerivativeOfTheLoss) {
  Random random(GetParam().config);
  const ReferenceResult result =
      RunReference(random.config, random.weights, random.state, random.batch);
  ASSERT_EQ(result.undecided, "");
  ExpectGradient(random, random.batch.x, result.dx, "x");
  ExpectGradient(random, random.weights.router, result.gradients.router, "router");
  ExpectGradient(random, random.weights.router_bias, result.gradients.router_bias, "router bias");
  ExpectGradient(random, random.weights.shared_gate, result.gradients.shared_gate, "shared gate");
  const auto expert = [&](ExpertWeights<double>& weights, const ExpertWeights<Bounded>& gradients,
                          const std::string& name) {
    ExpectGradient(random, weights.gate_up, gradients.gate_up, name + " gate_up");
    ExpectGradient(random, weights.gate_up_bias, gradients.gate_up_bias, name + " gate_up bias");
    ExpectGradient(random, weights.down, gradients.down, name + " down");
    ExpectGradient(random, weights.down_bias, gradients.down_bias, name + " down bias");
  };
  for (size_t e = 0; e < random.weights.experts.size(); ++e) {
    expert(random.weights.experts[e], result.gradients.experts[e], "expert " + std::to_string(e));
  }
  expert(random.weights.shared, result.gradients.shared, "shared");
}

INSTANTIATE_TEST_SUITE_P(
    Gates, ReferenceGradient,
    ::testing::Values(
        NamedConfig{"softmax_scores", {.experts = 4, .top_k = 2, .gate = {.balance_choices = 2}}},
        NamedConfig{"normalised_with_shared_expert",
                    {.experts = 4,
                     .top_k = 2,
                     .shared_ffn = 2,
                     .shared_gated = true,
                     .gate = {.normalised = true, .balance_choices = 2}}},
        NamedConfig{"sigmoid_groups_bias",
                    {.experts = 4,
                     .top_k = 2,
                     .gate = {.score = ScoreFunction::kSigmoid,
                              .select_by_logits = false,
                              .expert_bias = true,
                              .groups = 2,
                              .group_top_k = 1,
                              .group_sum = 2,
                              .normalised = true,
                              .scale = 2.5,
                              .balance_choices = 2},
                     .balance = LoadBalancing::kSeqAuxLoss}},
        NamedConfig{"gshard_with_drops",
                    {.experts = 3,
                     .top_k = 2,
                     .activation = Activation::kGeGlu,
                     .gate = {.normalised = true, .sum_over_kept = true, .balance_choices = 1},
                     .capacity_factor = 0.75,
                     .drop_by_position = true}},
        NamedConfig{"gpt_oss",
                    {.experts = 4,
                     .top_k = 2,
                     .projection_biases = true,
                     .activation = Activation::kClampedSwiGlu,
                     .gate = {.router_bias = true, .normalised = true, .balance_choices = 2},
                     .balance = LoadBalancing::kGlobalAuxLoss}},
        NamedConfig{"weight_on_input",
                    {.experts = 3,
                     .top_k = 1,
                     .activation = Activation::kRelu2,
                     .gate = {.score = ScoreFunction::kSigmoid,
                              .weight_on_input = true,
                              .balance_choices = 1}}},
        NamedConfig{"identity_experts",
                    {.experts = 3,
                     .zero_experts = 2,
                     .top_k = 3,
                     .activation = Activation::kRelu,
                     .gate = {.scale = 1.5, .balance_choices = 3}}},
        NamedConfig{
            "expert_choice",
            {.experts = 3, .top_k = 2, .gate = {.selection = ReferenceSelection::kExpertChoice}}},
        NamedConfig{
            "noisy_top_k",
            {.experts = 4, .top_k = 2, .gate = {.selection = ReferenceSelection::kNoisyTopK}}},
        NamedConfig{"sinkhorn",
                    {.experts = 2,
                     .top_k = 1,
                     .activation = Activation::kGeGluTanh,
                     .gate = {.selection = ReferenceSelection::kSinkhorn,
                              .score = ScoreFunction::kSigmoid}}},
        NamedConfig{"sparsemixer",
                    {.experts = 4, .top_k = 2, .gate = {.near = 0.6, .balance_choices = 2}}}),
    [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace moe::verify
