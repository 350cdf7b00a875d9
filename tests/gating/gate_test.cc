// Each gate by hand, through the interface that the router uses.
#include "gating/gate.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "gating/router.h"
#include "gating/token_choice_gate.h"
#include "kernels/base/rng.h"

namespace moe {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::FloatEq;
using ::testing::Pointwise;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// One gate on [T, logit_sets * E] logits, one micro-batch, with the memory that its results live
// in.
struct GateRun {
  std::unique_ptr<const Gate> gate;
  std::vector<float> logits;
  int64_t columns = 0;
  std::vector<float> expert_bias;
  Batch batch;
  std::vector<uint8_t> dropped;
  Workspace workspace;
  std::unique_ptr<Stream> stream = MakeInlineStream();
  GateSelection selection;

  MatrixView<const float> Logits() const {
    return {logits.data(), static_cast<int64_t>(logits.size()) / columns, columns};
  }

  void Select() {
    batch = *CopyBatch(batch, Logits().rows(), workspace);
    const TokenGroups groups = *MakeTokenGroups({}, batch, workspace);
    const auto selected =
        gate->Select(
                {.logits = Logits(), .batch = batch, .groups = groups, .expert_bias = expert_bias},
                workspace, *stream)
            .value();
    selection = selected;
    dropped.assign(selection.expert.size(), 0);
  }

  std::vector<float> Backward(const std::vector<float>& d_weight) {
    std::vector<float> d_logits(logits.size(), kNan);  // must be overwritten
    EXPECT_TRUE(gate->Backward({.logits = Logits(),
                                .batch = batch,
                                .selection = selection,
                                .dropped = dropped,
                                .d_weight = d_weight},
                               MatrixView<float>(d_logits.data(), Logits().rows(), columns),
                               *stream)
                    .ok());
    return d_logits;
  }
};

std::unique_ptr<GateRun> Select(const RouterConfig& config, const std::vector<float>& logits,
                                const std::vector<float>& expert_bias = {},
                                Mode mode = Mode::kTraining) {
  auto run = std::make_unique<GateRun>();
  run->batch.mode = mode;
  run->gate = FindGate(config.gate)->make(config);
  run->logits = logits;
  run->columns = int64_t{run->gate->traits().logit_sets} * config.num_outputs();
  run->expert_bias = expert_bias;
  if (run->gate->traits().expert_bias && expert_bias.empty()) {
    run->expert_bias.assign(static_cast<size_t>(config.num_outputs()), 0.0f);
  }
  run->Select();
  return run;
}

std::unique_ptr<GateRun> Select(const std::string& gate, int32_t k,
                                const std::vector<float>& logits, int32_t experts) {
  return Select({.gate = gate, .num_experts = experts, .top_k = k}, logits);
}

GateTraits TraitsOf(const std::string& name, int32_t top_k) {
  return FindGate(name)->make({.gate = name, .num_experts = 8, .top_k = top_k})->traits();
}

int32_t AnyTopK(const std::string& gate) {
  const int32_t only = FindGate(gate)->only_top_k;
  return only != 0 ? only : 2;
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

// sigmoid(l) = 1/5, 1/2, 4/5, 2/3.
std::vector<float> Odds() {
  return {-std::log(4.0f), 0, std::log(4.0f), std::log(2.0f)};
}

TEST(DeepSeekV3Gate, WeighsByTheUnbiasedScore) {
  // v = 1/5 + 1, 1/2, 4/5, 2/3: experts 0 and 2; weights 1/5 and 4/5 of their sum, times 5.
  const RouterConfig config = {
      .gate = "deepseek-v3", .num_experts = 4, .top_k = 2, .scaling_factor = 5};
  const auto run = Select(config, Odds(), {1, 0, 0, 0});
  EXPECT_THAT(run->selection.expert, ElementsAre(0, 2));
  EXPECT_THAT(run->selection.weight, Pointwise(FloatEq(), std::vector<float>{1, 4}));
  // dw_0/ds_0 = 5 (1 - 1/5) / 1, dw_0/ds_2 = -5 (1/5) / 1; ds/dl = s (1 - s) = 4/25 both.
  EXPECT_THAT(run->Backward({1, 0}), Pointwise(testing::FloatNear(1e-6f),
                                               std::vector<float>{4 * 0.16f, 0, -1 * 0.16f, 0}));
}

TEST(DeepSeekV3Gate, AddsItsEpsilonToTheSumOfTheScores) {
  // s = e^-40 = 4.248354e-18 everywhere: w = s / (2 s + 1e-20) = 0.4994122, half without it. In
  // float32 a logit of 40 is rounded by 2^-19 at most, and s by as much.
  const RouterConfig config = {.gate = "deepseek-v3", .num_experts = 4, .top_k = 2};
  const std::vector<float> logits(4, -40.0f);
  const auto run = Select(config, logits, {1, 0, 0, 1});
  EXPECT_THAT(run->selection.expert, ElementsAre(0, 3));
  EXPECT_THAT(run->selection.weight,
              Pointwise(testing::FloatNear(1e-6f), std::vector<float>{0.4994122f, 0.4994122f}));
  // S = 2 s + 1e-20: dw_0/dl_0 = s (1 / S - s / S^2), dw_0/dl_3 = -s^2 / S^2.
  EXPECT_THAT(run->Backward({1, 0}), Pointwise(testing::FloatNear(1e-6f),
                                               std::vector<float>{0.2499997f, 0, 0, -0.2494125f}));
  RouterConfig wider = config;
  wider.norm_epsilon = 1e-6f;  // next to it the scores are nothing
  EXPECT_THAT(Select(wider, logits)->selection.weight, Each(testing::Lt(1e-11f)));
  wider.norm_epsilon = 0.0f;
  EXPECT_THAT(Select(wider, logits)->selection.weight, Each(0.5f));
}

TEST(DeepSeekV3Gate, MaskedExpertIsNeverChosenThoughAllValuesAreNegative) {
  // Groups {0, 1} and {2, 3}; v = s - 2 is negative everywhere: a mask of 0 would win.
  const RouterConfig config = {
      .gate = "deepseek-v3", .num_experts = 4, .top_k = 2, .num_groups = 2, .group_top_k = 1};
  const auto run = Select(config, Odds(), {-2, -2, -2, -2});
  EXPECT_THAT(run->selection.expert, ElementsAre(2, 3));
}

TEST(DeepSeekV3Gate, GroupIsWorthItsTwoBestAndEqualGroupsGoByTheLowestId) {
  // Group {0, 1, 2}: s = 4/5, 1/5, 1/5 is worth 1; {3, 4, 5}: 1/2, 1/2, 1/5 as much, but later;
  // {6, 7, 8}: 2/3, 1/2, 1/5 is worth more.
  const float fifth = -std::log(4.0f), third2 = std::log(2.0f), four = std::log(4.0f);
  const RouterConfig config = {
      .gate = "deepseek-v3", .num_experts = 9, .top_k = 3, .num_groups = 3, .group_top_k = 1};
  const auto best = Select(config, {four, fifth, fifth, 0, 0, fifth, third2, 0, fifth});
  EXPECT_THAT(best->selection.expert, ElementsAre(6, 7, 8));
  const auto equal = Select(config, {0, 0, fifth, 0, 0, 0, 0, 0, 0});
  EXPECT_THAT(equal->selection.expert, ElementsAre(0, 1, 2));
}

TEST(DeepSeekV2Gate, GroupIsWorthItsBest) {
  // By sums group {2, 3} would win (6/16 > 5/16 + ...): p = 5, 1, 3, 3 of 12.
  const std::vector<float> logits = {std::log(5.0f), 0, std::log(3.0f), std::log(3.0f)};
  const RouterConfig config = {.gate = "deepseek-v2",
                               .num_experts = 4,
                               .top_k = 2,
                               .num_groups = 2,
                               .group_top_k = 1,
                               .scaling_factor = 12};
  const auto run = Select(config, logits);
  EXPECT_THAT(run->selection.expert, ElementsAre(0, 1));
  EXPECT_THAT(run->selection.weight, Pointwise(FloatEq(), std::vector<float>{5, 1}));
}

TEST(Llama4Gate, WeighsTheInputBySigmoidAndSelectsByLogits) {
  EXPECT_EQ(TraitsOf("llama4", 1).weight_on, WeightOn::kInput);
  const auto run = Select("llama4", 1, Odds(), 4);
  EXPECT_THAT(run->selection.expert, ElementsAre(2));
  EXPECT_FLOAT_EQ(run->selection.weight[0], 0.8f);
  EXPECT_THAT(run->Backward({1}),
              Pointwise(testing::FloatNear(1e-7f), std::vector<float>{0, 0, 0.16f, 0}));
  // Both sigmoids round to 1: the larger logit wins all the same.
  EXPECT_THAT(Select("llama4", 1, {30, 31}, 2)->selection.expert, ElementsAre(1));
}

TEST(LongCatGate, IdentityExpertsAreOutputsLikeOthers) {
  const RouterConfig config = {
      .gate = "longcat", .num_experts = 2, .num_zero_experts = 2, .top_k = 2, .scaling_factor = 8};
  const auto run = Select(config, Eighths());
  EXPECT_THAT(run->selection.expert, ElementsAre(2, 1));
  EXPECT_THAT(run->selection.weight, Pointwise(FloatEq(), std::vector<float>{4, 2}));
}

TEST(ExpertChoiceGate, ExpertsTakeTheirBestTokensAndTiesGoToTheLowest) {
  // Three tokens, two experts, room for ceil(3 * 1 / 2) = 2 each. p of expert 0: 1/2, 1/2, 3/4.
  const float ln3 = std::log(3.0f);
  const auto run = Select("expert-choice", 1, {0, 0, 0, 0, ln3, 0}, 2);
  EXPECT_THAT(run->selection.slot_offset, ElementsAre(0, 2, 3, 4));
  EXPECT_THAT(run->selection.expert, ElementsAre(0, 1, 1, 0));
  EXPECT_THAT(run->selection.weight, Pointwise(FloatEq(), std::vector<float>{.5f, .5f, .5f, .75f}));
  EXPECT_THAT(run->selection.count, ElementsAre(2, 2));
}

TEST(GshardGate, RandomSecondChoiceIsKeptAsOftenAsTwiceItsWeight) {
  // w_2 = 1/5: kept with probability 2/5. 20000 draws: sd sqrt(.24 / 20000) = 0.0035, five of them.
  RouterConfig config = {
      .gate = "gshard", .num_experts = 3, .top_k = 2, .random_second_expert = true};
  std::vector<float> logits;
  for (int t = 0; t < 20000; ++t) logits.insert(logits.end(), {std::log(4.0f), 0, -9});
  const auto run = Select(config, logits);
  const auto kept = static_cast<double>(run->selection.expert.size()) - 20000;
  EXPECT_NEAR(kept / 20000, 0.4, 0.018);
  EXPECT_EQ(run->selection.count[0], 20000);
  for (size_t t = 0; t < 20000; ++t) {
    const auto first = static_cast<size_t>(run->selection.slot_offset[t]);
    const bool alone = run->selection.slot_offset[t + 1] - run->selection.slot_offset[t] == 1;
    ASSERT_FLOAT_EQ(run->selection.weight[first], alone ? 1.0f : 0.8f);
  }
  EXPECT_EQ(Select(config, logits, {}, Mode::kEvaluation)->selection.expert.size(), 40000u);
}

TEST(NoisyTopKGate, NoiseIsDrawnPerTokenStepAndLayerAndOnlyInTraining) {
  const std::vector<float> logits(2 * 6, 0.0f);  // two tokens, three experts, equal logits
  RouterConfig config = {.gate = "noisy-topk", .num_experts = 3, .top_k = 2, .seed = 3};
  const auto memo = [&](const RouterConfig& c) {
    const auto run = Select(c, logits);
    const MatrixView<const float> m = run->selection.memo;
    return std::vector<float>(m.data(), m.data() + 12);
  };
  const std::vector<float> once = memo(config);
  EXPECT_EQ(memo(config), once);
  EXPECT_NE(std::vector<float>(once.begin(), once.begin() + 6),
            std::vector<float>(once.begin() + 6, once.end()));
  RouterConfig other = config;
  other.layer = 1;
  EXPECT_NE(memo(other), once);
  // softplus(0) + 0.01 = 0.7031...: h = z * that.
  for (size_t e = 0; e < 3; ++e) EXPECT_NEAR(once[e], once[3 + e] * 0.703147f, 1e-6);
}

// A softmax of each choice's own: what it weighs, and the gradient of w_1 + w_2.
struct SparseMixed {
  const char* what;
  float router_jitter;
  std::vector<float> logits;
  std::vector<int32_t> expert;
  std::vector<float> weight;
  std::vector<float> d_logits;
};

TEST(SparseMixerGate, EachChoiceHasTheSoftmaxOfTheLogitsNearIt) {
  const float e = std::exp(1.0f), root = std::exp(0.5f);
  // 1 / (1 + e^-1/2 + e^-1), and 1 / (1 + e^-1/2) of two of them.
  const float three = e / (e + root + 1), two = root / (root + 1);
  const float of_two = two * (1 - two);  // w (1 - w); the other's gradient is -w (1 - w)
  const float far = std::exp(-2.0f), a = 1 / (3 + far), b = 1 / (2 + far);
  const SparseMixed cases[] = {
      // Distances from 2: 1/2, 1/4, 5/3; then from 1.5: 1/3, 3. Exactly the bound is near.
      {"near, far and at the bound",
       0.25f,
       {2, 1, 1.5f, -3},
       {0, 2},
       {three, two},
       {three * (1 - three), -three * three / e - of_two, -three * three / root + of_two, 0}},
      // From -1: 1/3, 3/4 (of |l|, the larger); then from -1.5: 5/8.
      {"negative", 0.2f, {-1, -1.5f, -4}, {0, 1}, {two, 1}, {of_two, -of_two, 0}},
      {"equal",
       0.01f,
       {3, 1, 3, 3},
       {0, 2},
       {1 / 3.0f, 0.5f},
       {2 / 9.0f, 0, 5 / 36.0f, -13 / 36.0f}},
      {"equal, and no jitter", 0, {1, 1, 0.999f}, {0, 1}, {0.5f, 1}, {0.25f, -0.25f, 0}},
      {"different, and no jitter", 0, {1, 3, 2}, {1, 2}, {1, 1}, {0, 0, 0}},
      {"0 / 0 is near", 0.01f, {0, 0, -1}, {0, 1}, {0.5f, 1}, {0.25f, -0.25f, 0}},
      {"0 and -0", 0, {-0.0f, 0, 0}, {0, 1}, {1 / 3.0f, 0.5f}, {2 / 9.0f, 5 / 36.0f, -13 / 36.0f}},
      {"all",
       1,
       {1, -1, 1, 1},
       {0, 2},
       {a, b},
       {a - a * a, -(a * a + b * b) * far, b - a * a - b * b, -a * a - b * b}},
      {"-infinity has no share", 0.25f, {2, -kInf, 1.5f}, {0, 2}, {two, 1}, {of_two, 0, -of_two}},
      {"two experts", 0.25f, {1.5f, 2}, {1, 0}, {two, 1}, {-of_two, of_two}},
  };
  for (const SparseMixed& want : cases) {
    SCOPED_TRACE(want.what);
    const RouterConfig config = {.gate = "sparsemixer",
                                 .num_experts = static_cast<int32_t>(want.logits.size()),
                                 .top_k = 2,
                                 .router_jitter = want.router_jitter};
    const auto run = Select(config, want.logits);
    EXPECT_THAT(run->selection.expert, ElementsAreArray(want.expert));
    EXPECT_THAT(run->selection.weight, Pointwise(FloatEq(), want.weight));
    EXPECT_THAT(run->Backward({1, 1}), Pointwise(testing::FloatNear(1e-7f), want.d_logits));
  }
}

TEST(SparseMixerGate, TrainingIsEvaluationAndDroppedChoicesHaveNoGradient) {
  const RouterConfig config = {
      .gate = "sparsemixer", .num_experts = 3, .top_k = 2, .router_jitter = 0.25f};
  const std::vector<float> logits = {2, 1.5f, 1.25f};
  const auto run = Select(config, logits);
  const auto evaluation = Select(config, logits, {}, Mode::kEvaluation);
  EXPECT_THAT(evaluation->selection.weight, ElementsAreArray(run->selection.weight));
  EXPECT_THAT(evaluation->selection.expert, ElementsAreArray(run->selection.expert));
  const std::vector<float> first = run->Backward({1, 0}), second = run->Backward({0, 1});
  EXPECT_LT(first[1], 0);
  EXPECT_EQ(second[0], 0);  // not near: chosen before
  run->dropped = {1, 0};
  EXPECT_THAT(run->Backward({kNan, 1}), ElementsAreArray(second));
  run->dropped = {0, 1};
  EXPECT_THAT(run->Backward({1, kNan}), ElementsAreArray(first));
}

class DoublingGate final : public TokenChoiceGate {
 public:
  explicit DoublingGate(int32_t top_k) : TokenChoiceGate({.top_k = top_k}) {}

 private:
  void Weigh(absl::Span<float> weight) const override {
    for (float& w : weight) w *= 2;
  }
  void WeighBackward(const TokenWeightGradient& token) const override {
    for (size_t j = 0; j < token.d_score.size(); ++j) {
      token.d_score[j] = 2.0 * static_cast<double>(token.d_weight[j]);
    }
  }
};

TEST(GateRegistry, RegisteredGateIsFoundByNameAndMayNotReplaceAnother) {
  const auto make = [](const RouterConfig& config) {
    return std::make_unique<DoublingGate>(config.top_k);
  };
  ASSERT_TRUE(RegisterGate({.name = "doubling", .make = make}).ok());
  EXPECT_THAT(GateNames(), testing::Contains("doubling"));
  const auto run = Select("doubling", 1, Eighths(), 4);
  EXPECT_FLOAT_EQ(run->selection.weight[0], 1.0f);
  EXPECT_EQ(RegisterGate({.name = "doubling", .make = make}).code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(RegisterGate({.name = "mixtral", .make = make}).code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(RegisterGate({.name = "", .make = make}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(RegisterGate({.name = "nothing"}).code(), absl::StatusCode::kInvalidArgument);
}

TEST(Gates, OfScaledScoresRunOnDevicesAndOthersAskForHostMemory) {
  for (const std::string& name : GateNames()) {
    const auto gate = FindGate(name)->make({.gate = name, .num_experts = 8, .top_k = 2});
    const bool host = name == "gshard" || name == "expert-choice" || name == "noisy-topk" ||
                      name == "sinkhorn" || name == "sparsemixer";
    EXPECT_TRUE(gate->RunsOn(DeviceKind::kCpu)) << name;
    EXPECT_EQ(gate->RunsOn(DeviceKind::kCuda), !host) << name;
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

TEST(Gates, NoTokensSelectNothing) {
  for (const std::string& gate : GateNames()) {
    const auto run = Select(gate, AnyTopK(gate), {}, 4);
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

TEST(Gates, NanLogitsGiveNanWeightsOfASoftmaxAndIdsInRange) {
  for (const std::string& gate : GateNames()) {
    SCOPED_TRACE(gate);
    const int32_t k = AnyTopK(gate);
    const GateTraits traits = TraitsOf(gate, k);
    // Token 0 has a NaN logit, token 1 none.
    std::vector<float> logits;
    for (const auto& row : {std::vector<float>{1, kNan, 2}, std::vector<float>{0, 0, 0}}) {
      logits.insert(logits.end(), row.begin(), row.end());
      logits.insert(logits.end(), 3 * static_cast<size_t>(traits.logit_sets - 1), 0.0f);
    }
    const auto run = Select(gate, k, logits, 3);
    for (const int32_t e : run->selection.expert) EXPECT_TRUE(e >= 0 && e < 3) << e;
    // Sigmoid scores stand each alone; these three choose by the whole group.
    const bool alone = traits.balance_choices > 0 && traits.score == ScoreFunction::kSoftmax;
    if (!alone) continue;
    for (size_t s = 0; s < run->selection.expert.size(); ++s) {
      const bool first_token = static_cast<int64_t>(s) < run->selection.slot_offset[1];
      EXPECT_EQ(std::isnan(run->selection.weight[s]), first_token);
    }
    if (traits.expert_bias) continue;  // compares p, which is NaN for all
    EXPECT_EQ(run->selection.expert[0], 2);
  }
}

}  // namespace
}  // namespace moe
