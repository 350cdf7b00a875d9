// kernels/router_loss on every device of this build: by hand, then against plain loops and a CPU's
// bits.
#include "kernels/router_loss/router_loss.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/kernels/device_memory.h"
#include "tests/kernels/op_test.h"

namespace moe {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using testing::TestDevice;
using testing::TestDevices;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr double kSoFar = 100;  // losses are added to

// One call's host arrays; empty gradients are not asked for.
struct Case {
  int64_t experts = 1;
  std::vector<float> score;
  std::vector<int32_t> expert;
  std::vector<int64_t> groups, micro_batch;
  int32_t k = 1;        // slots of a token
  int32_t choices = 0;  // 0 = k
  std::vector<double> share = {};
  float coeff = 1;
  ScoreFunction function = ScoreFunction::kSoftmax;
  bool gradient = true;

  int64_t tokens() const { return static_cast<int64_t>(score.size()) / experts; }
};

struct Result {
  double loss = 0;
  std::vector<float> gradient;
};

testing::DeviceArray<double> Loss(const TestDevice& device) {
  return device.Copy<double>({kSoFar});
}

// What was added; NaN if the stream has failed.
double Added(const TestDevice& device, const testing::DeviceArray<double>& loss) {
  const std::vector<double> value = device.Read(loss);
  return value.empty() ? std::numeric_limits<double>::quiet_NaN() : value[0] - kSoFar;
}

Result Balance(const TestDevice& device, const Case& c) {
  std::vector<int64_t> slots;
  for (int64_t t = 0; t <= c.tokens(); ++t) slots.push_back(t * c.k);
  const auto score = device.Copy(c.score);
  const auto offset = device.Copy(slots);
  const auto expert = device.Copy(c.expert);
  const auto gradient = device.Copy(std::vector<float>(c.score.size(), 0.0f));
  const auto loss = Loss(device);
  Workspace workspace(device.memory());
  const absl::Status status = AddLoadBalanceLoss(
      {.score = score.view(c.tokens(), c.experts, c.experts), .function = c.function},
      {.slot_offset = offset.span(),
       .expert = expert.span(),
       .choices = c.choices == 0 ? c.k : c.choices,
       .expert_share = c.share,
       .coeff = c.coeff},
      {.offsets = c.groups, .micro_batch = c.micro_batch}, loss.span().data(),
      c.gradient ? gradient.view(c.tokens(), c.experts, c.experts) : MatrixView<float>(), workspace,
      device.stream());
  EXPECT_TRUE(status.ok()) << status;
  return {Added(device, loss), device.Read(gradient)};
}

// check(a function from a Case to its Result).
template <typename Check>
void OnEveryDevice(Check check) {
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    check([&](const Case& c) { return Balance(*device, c); });
  }
}

TEST(LoadBalanceLoss, AnEmptyGroupIsRefused) {
  const std::vector<float> score(8, 0.25f);
  const std::vector<int32_t> expert = {0, 1};
  const std::vector<int64_t> slot_offset = {0, 1, 2}, groups = {0, 2, 2}, micro_batch = {0, 2};
  double loss = 0;
  Workspace workspace;
  const absl::Status status = AddLoadBalanceLoss(
      {.score = MatrixView<const float>(score.data(), 2, 4)},
      {.slot_offset = slot_offset, .expert = expert, .coeff = 1},
      {.offsets = groups, .micro_batch = micro_batch}, &loss, {}, workspace, *MakeInlineStream());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("token group 1 is empty"));
  EXPECT_EQ(loss, 0);
}

TEST(LoadBalanceLoss, IsTheCoefficientAtPerfectBalanceForAnyK) {
  OnEveryDevice([](auto loss) {
    // Every expert gets as many slots as the others: the gradient by p is the same for all.
    Case c = {.experts = 4,
              .score = std::vector<float>(16, 0.25f),
              .expert = {0, 1, 2, 3},
              .groups = {0, 4},
              .micro_batch = {0, 1},
              .coeff = 0.5f};
    const Result one = loss(c);
    EXPECT_DOUBLE_EQ(one.loss, 0.5);
    EXPECT_THAT(one.gradient, Each(0.0f));
    c.k = 2;
    c.expert = {0, 1, 2, 3, 0, 1, 2, 3};
    const Result two = loss(c);
    EXPECT_DOUBLE_EQ(two.loss, 0.5);
    EXPECT_THAT(two.gradient, Each(0.0f));
  });
}

TEST(LoadBalanceLoss, IsEIfOneExpertTakesEverythingWithCertainty) {
  OnEveryDevice([](auto loss) {
    EXPECT_DOUBLE_EQ(loss({.experts = 4,
                           .score = {0, 0, 1, 0, 0, 0, 1, 0},
                           .expert = {2, 2},
                           .groups = {0, 2},
                           .micro_batch = {0, 1}})
                         .loss,
                     4);
  });
}

TEST(LoadBalanceLoss, CountsFirstChoicesOnlyWhereTheGateSaysSo) {
  OnEveryDevice([](auto loss) {
    Case c = {.experts = 2,
              .score = {.75f, .25f, .75f, .25f},
              .expert = {0, 1, 0, 1},
              .groups = {0, 2},
              .micro_batch = {0, 1},
              .k = 2};
    EXPECT_DOUBLE_EQ(loss(c).loss, 1);  // 2 / (2 * 4) * (1.5 * 2 + .5 * 2)
    c.choices = 1;
    const Result first = loss(c);
    EXPECT_DOUBLE_EQ(first.loss, 1.5);  // 2 / (1 * 4) * (1.5 * 2 + .5 * 0)
    // G = (2, 0) / T; p (G - mean): .75 * (1 - .75) and .25 * (0 - .75).
    EXPECT_THAT(first.gradient, ElementsAre(.1875f, -.1875f, .1875f, -.1875f));
    c.gradient = false;
    const Result value = loss(c);
    EXPECT_DOUBLE_EQ(value.loss, 1.5);
    EXPECT_THAT(value.gradient, Each(0.0f));
  });
}

TEST(LoadBalanceLoss, OverSeveralGroupsIsTheirMeanAndOverMicroBatchesTheSum) {
  OnEveryDevice([](auto loss) {
    // Two sequences, each alone on one expert: 2 for each. Over the whole micro-batch it is 1.
    Case c = {.experts = 2,
              .score = {1, 0, 1, 0, 0, 1, 0, 1},
              .expert = {0, 0, 1, 1},
              .groups = {0, 2, 4},
              .micro_batch = {0, 2}};
    EXPECT_DOUBLE_EQ(loss(c).loss, 2);
    c.micro_batch = {0, 1, 1, 2};
    EXPECT_DOUBLE_EQ(loss(c).loss, 4);
    c.groups = {0, 4};
    c.micro_batch = {0, 1};
    EXPECT_DOUBLE_EQ(loss(c).loss, 1);
    // Lengths do not weigh: 1 and 3 tokens.
    c.score = {1, 0, .5f, .5f, .5f, .5f, .5f, .5f};
    c.groups = {0, 1, 4};
    c.micro_batch = {0, 2};
    EXPECT_DOUBLE_EQ(loss(c).loss, (2 + 1) / 2.0);
  });
}

TEST(LoadBalanceLoss, OfSigmoidScoresTakesTheirShares) {
  OnEveryDevice([](auto loss) {
    // s = 3/4, 1/4 and 1/2, 1/2: p is the same, since rows sum to 1. dl has the factor 1 - s.
    const Result result = loss({.experts = 2,
                                .score = {.75f, .25f, .5f, .5f},
                                .expert = {0, 0},
                                .groups = {0, 2},
                                .micro_batch = {0, 1},
                                .function = ScoreFunction::kSigmoid});
    EXPECT_DOUBLE_EQ(result.loss, 2.0 / 4 * (1.25 * 2));
    // G = 1, 0; softmax gradients p (G - p_0): 3/16, -3/16 and 1/4, -1/4.
    EXPECT_THAT(result.gradient, ElementsAre(3.0f / 16 / 4, -3.0f / 16 * .75f, .125f, -.125f));
  });
}

TEST(LoadBalanceLoss, AgainstGivenSharesIgnoresTheCounts) {
  OnEveryDevice([](auto loss) {
    const Result result = loss({.experts = 2,
                                .score = {.75f, .25f, .5f, .5f},
                                .expert = {0, 0},
                                .groups = {0, 2},
                                .micro_batch = {0, 1},
                                .share = {.25, .75},
                                .coeff = 3});
    EXPECT_DOUBLE_EQ(result.loss,
                     3 * 2 * (.25 * 1.25 + .75 * .75) / 2);  // alpha E sum f P, P a mean
  });
}

// Groups of one block, of several, and of less than one, in three micro-batches, one of them empty.
Case LargeCase(ScoreFunction function) {
  Case c = {.experts = 19,
            .groups = {0, 700, 956, 957, 1000},
            .micro_batch = {0, 1, 1, 4},
            .k = 3,
            .choices = 2,
            .coeff = 0.25f,
            .function = function};
  for (const float x : testing::RandomFloats(1000 * c.experts, 1)) c.score.push_back(x * x / 8);
  for (int64_t s = 0; s < 1000 * c.k; ++s) {
    c.expert.push_back(static_cast<int32_t>(s * s % 31 % c.experts));
  }
  return c;
}

TEST(LoadBalanceLoss, IsTheFormulaInPlainLoopsAndHasTheSameBitsOnEveryDevice) {
  for (const ScoreFunction function : {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid}) {
    const Case c = LargeCase(function);
    double expected = 0;
    for (size_t b = 0; b + 1 < c.micro_batch.size(); ++b) {
      for (int64_t g = c.micro_batch[b]; g < c.micro_batch[b + 1]; ++g) {
        const int64_t begin = c.groups[g], end = c.groups[g + 1];
        std::vector<double> p(c.experts), count(c.experts);
        for (int64_t t = begin; t < end; ++t) {
          double sum = 0;
          for (int64_t e = 0; e < c.experts; ++e) sum += c.score[t * c.experts + e];
          const double scale = function == ScoreFunction::kSigmoid ? 1 / sum : 1;
          for (int64_t e = 0; e < c.experts; ++e) p[e] += scale * c.score[t * c.experts + e];
          for (int32_t j = 0; j < c.choices; ++j) ++count[c.expert[t * c.k + j]];
        }
        double product = 0;
        for (int64_t e = 0; e < c.experts; ++e) product += p[e] * count[e];
        const auto tokens = static_cast<double>(end - begin);
        expected += 0.25 * 19 * product / (2 * tokens * tokens) /
                    static_cast<double>(c.micro_batch[b + 1] - c.micro_batch[b]);
      }
    }
    Result first;
    OnEveryDevice([&](auto loss) {
      const Result got = loss(c);
      // Fewer than 2000 roundings on the way of a term, and those of 100 and the sum.
      EXPECT_NEAR(got.loss, expected, 2100 * 0x1p-53 * expected + 2 * 0x1p-53 * 100);
      if (first.gradient.empty()) first = got;
      EXPECT_TRUE(testing::SameBits(got.loss, first.loss));
      EXPECT_TRUE(testing::SameBits(got.gradient, first.gradient));
    });
  }
}

// What a rank holds does not decide a micro-batch's loss or gradient.
TEST(LoadBalanceLoss, AMicroBatchAloneHasTheSameBits) {
  OnEveryDevice([](auto loss) {
    const Case all = LargeCase(ScoreFunction::kSigmoid);
    Case first = all, second = all;
    first.score.resize(700 * all.experts);
    first.expert.resize(700 * all.k);
    first.groups = {0, 700};
    first.micro_batch = {0, 1};
    second.score.assign(all.score.begin() + 700 * all.experts, all.score.end());
    second.expert.assign(all.expert.begin() + 700 * all.k, all.expert.end());
    second.groups = {0, 256, 257, 300};
    second.micro_batch = {0, 3};
    std::vector<float> gradient = loss(first).gradient;
    for (const float x : loss(second).gradient) gradient.push_back(x);
    EXPECT_TRUE(testing::SameBits(gradient, loss(all).gradient));
  });
}

// z-loss and entropy of the arrays below.
struct Scores {
  int64_t cols, experts;
  std::vector<float> logits, score, log_sum_exp;
  ScoreFunction function = ScoreFunction::kSoftmax;

  // f(scores in the device's memory, a workspace of it).
  template <typename Function>
  void With(const TestDevice& device, Function f) const {
    const auto tokens = static_cast<int64_t>(log_sum_exp.size());
    const auto l = device.Copy(logits), s = device.Copy(score), lse = device.Copy(log_sum_exp);
    Workspace workspace(device.memory());
    f(RouterScores{.logits = l.view(tokens, cols, cols),
                   .score = s.view(tokens, experts, experts),
                   .function = function,
                   .log_sum_exp = lse.span()},
      workspace);
  }
};

Result ZLoss(const TestDevice& device, const Scores& scores, std::vector<int64_t> micro_batches,
             float coeff) {
  Result result;
  scores.With(device, [&](const RouterScores& on_device, Workspace& workspace) {
    const auto gradient = device.Copy(std::vector<float>(scores.logits.size(), 1.0f));
    const auto loss = Loss(device);
    const absl::Status status =
        AddZLoss(on_device, micro_batches, coeff, loss.span().data(),
                 gradient.view(on_device.score.rows(), scores.cols, scores.cols), workspace,
                 device.stream());
    std::fill(micro_batches.begin(), micro_batches.end(), int64_t{-1});  // may change at once
    EXPECT_TRUE(status.ok()) << status;
    result = {Added(device, loss), device.Read(gradient)};
  });
  return result;
}

TEST(ZLoss, IsTheMeanSquareOfLogSumExpOfEachMicroBatch) {
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    const Result result = ZLoss(*device,
                                {.cols = 2,
                                 .experts = 2,
                                 .logits = std::vector<float>(6),
                                 .score = {.5f, .5f, .25f, .75f, .5f, .5f},
                                 .log_sum_exp = {2, 4, -3}},
                                {0, 0, 2, 3}, 0.5f);
    EXPECT_DOUBLE_EQ(result.loss, 0.5 * (4 + 16) / 2 + 0.5 * 9);
    // 1 + 0.5 * 2 * lse * p / T
    EXPECT_THAT(result.gradient, ElementsAre(1.5f, 1.5f, 1.5f, 2.5f, -.5f, -.5f));
  }
}

// A second set of logits, which no expert's probability sees: its gradient stays.
TEST(ZLoss, OfSigmoidScoresTakesTheSoftmaxOfTheLogits) {
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    const float log3 = std::log(3.0f);
    const Result result = ZLoss(*device,
                                {.cols = 4,
                                 .experts = 2,
                                 .logits = {0, log3, 9, 9},
                                 .score = {.5f, .75f},
                                 .log_sum_exp = {std::log(4.0f)},
                                 .function = ScoreFunction::kSigmoid},
                                {0, 1}, 1);
    const float by_lse = 2 * std::log(4.0f);
    EXPECT_FLOAT_EQ(result.gradient[0], 1 + by_lse / 4);
    EXPECT_FLOAT_EQ(result.gradient[1], 1 + by_lse * 3 / 4);
    EXPECT_EQ(result.gradient[2], 1);
    EXPECT_EQ(result.gradient[3], 1);
  }
}

Scores LargeScores(ScoreFunction function) {
  Scores s = {.cols = 21, .experts = 19, .function = function};
  s.logits = testing::RandomFloats(1000 * s.cols, 2);
  s.log_sum_exp = testing::RandomFloats(1000, 3);
  for (const float x : testing::RandomFloats(1000 * s.experts, 4)) s.score.push_back(x * x / 8);
  return s;
}

TEST(ZLoss, HasTheSameBitsOnEveryDevice) {
  Result first;
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    const Result got =
        ZLoss(*device, LargeScores(ScoreFunction::kSoftmax), {0, 300, 300, 1000}, 0.5f);
    if (first.gradient.empty()) first = got;
    EXPECT_TRUE(testing::SameBits(got.loss, first.loss));
    EXPECT_TRUE(testing::SameBits(got.gradient, first.gradient));
  }
}

double EntropyOf(const TestDevice& device, const Scores& scores) {
  double result = 0;
  scores.With(device, [&](const RouterScores& on_device, Workspace& workspace) {
    const auto sum = Loss(device);
    const absl::Status status =
        AddEntropy(on_device, sum.span().data(), workspace, device.stream());
    EXPECT_TRUE(status.ok()) << status;
    result = Added(device, sum);
  });
  return result;
}

TEST(Entropy, IsThatOfEveryTokensShares) {
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    // Twenty logits: more than one round of partial sums. 1/2, 1/2 and a certain choice.
    Scores softmax = {.cols = 20,
                      .experts = 20,
                      .logits = std::vector<float>(40, -200.0f),
                      .score = std::vector<float>(40, 0.0f),
                      .log_sum_exp = {1 + std::log(2.0f), 7}};
    softmax.logits[3] = softmax.logits[19] = 1;
    softmax.score[3] = softmax.score[19] = 0.5f;
    softmax.logits[38] = 7;
    softmax.score[38] = 1;
    EXPECT_NEAR(EntropyOf(*device, softmax), std::log(2.0), 2 * 0x1p-24 * 1.7);
    softmax.score[3] = testing::kNaN;
    EXPECT_TRUE(std::isnan(EntropyOf(*device, softmax)));

    EXPECT_NEAR(EntropyOf(*device, {.cols = 2,
                                    .experts = 2,
                                    .logits = std::vector<float>(4),
                                    .score = {.25f, .25f, .75f, 0},
                                    .log_sum_exp = {0, 0},
                                    .function = ScoreFunction::kSigmoid}),
                std::log(2.0), 2 * 0x1p-24 * 1.4);
  }
}

TEST(Entropy, IsNanWhereALogitIsNotFinite) {
  for (const auto& device : TestDevices()) {
    for (const auto function : {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid}) {
      for (const float bad : {kInf, -kInf, testing::kNaN}) {
        Scores scores = {.cols = 3,
                         .experts = 2,
                         .logits = {0, -200, 1, 0, -200, 1},
                         .score = {.5f, 0, .5f, 0},
                         .log_sum_exp = {0, 0},
                         .function = function};
        EXPECT_TRUE(std::isfinite(EntropyOf(*device, scores)));
        scores.logits[4] = bad;
        EXPECT_TRUE(std::isnan(EntropyOf(*device, scores))) << device->name() << " " << bad;
        scores.logits[4] = 0;
        scores.logits[5] = bad;
        EXPECT_EQ(std::isnan(EntropyOf(*device, scores)), function == ScoreFunction::kSoftmax);
      }
    }
  }
}

TEST(Entropy, OfASoftmaxHasTheSameBitsOnEveryDevice) {
  double first = 0;
  for (const auto& device : TestDevices()) {
    const double got = EntropyOf(*device, LargeScores(ScoreFunction::kSoftmax));
    if (first == 0) first = got;
    EXPECT_TRUE(testing::SameBits(got, first)) << device->name();
  }
}

TEST(RouterLoss, RefusesShapesThatDisagree) {
  testing::TestStream stream;
  Workspace workspace;
  const std::vector<float> score(6), lse(2);
  const std::vector<int64_t> slots = {0, 1, 2}, groups = {0, 2}, one = {0, 1}, three = {0, 3};
  const std::vector<int32_t> expert = {0, 1};
  const RouterScores scores = {
      .logits = {score.data(), 2, 3}, .score = {score.data(), 2, 3}, .log_sum_exp = lse};
  double loss = 0;
  const auto balance = [&](const LoadBalance& b, const LossGroups& g, MatrixView<float> d) {
    return testing::Message(AddLoadBalanceLoss(scores, b, g, &loss, d, workspace, *stream));
  };
  const LoadBalance good = {.slot_offset = slots, .expert = expert, .expert_share = {}};
  const LossGroups units = {.offsets = groups, .micro_batch = one};
  EXPECT_EQ(balance(good, units, {}), "");
  EXPECT_EQ(balance({.slot_offset = groups, .expert = expert, .expert_share = {}}, units, {}),
            "AddLoadBalanceLoss: slot_offset is [2], expected [3]");
  const std::vector<double> share(2);
  EXPECT_EQ(balance({.slot_offset = slots, .expert = expert, .expert_share = share}, units, {}),
            "AddLoadBalanceLoss: expert_share is [2], expected [3]");
  EXPECT_EQ(balance(good, {.offsets = three, .micro_batch = one}, {}),
            "AddLoadBalanceLoss: offsets run from 0 to 3, expected 0 to 2 rows");
  EXPECT_EQ(balance(good, {.offsets = groups, .micro_batch = three}, {}),
            "AddLoadBalanceLoss: offsets run from 0 to 3, expected 0 to 1 rows");
  std::vector<float> d(4);
  EXPECT_EQ(balance(good, units, {d.data(), 2, 2}),
            "AddLoadBalanceLoss: d_logits is [2, 2] with stride 2, expected [2, 3]");
  EXPECT_EQ(testing::Message(AddZLoss(scores, three, 1, &loss, {}, workspace, *stream)),
            "AddZLoss: offsets run from 0 to 3, expected 0 to 2 rows");
  RouterScores short_sums = scores;
  short_sums.log_sum_exp = absl::MakeConstSpan(lse).first(1);
  EXPECT_EQ(testing::Message(AddEntropy(short_sums, &loss, workspace, *stream)),
            "AddEntropy: log_sum_exp is [1], expected [2]");
}

// A block counts its experts in shared memory.
TEST(RouterLoss, BalanceOfMoreExpertsThanTheKernelIsCompiledForIsRefusedByName) {
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    const auto score = device->Copy(std::vector<float>(1025, 0.0f));
    const auto slots = device->Copy<int64_t>({0, 1});
    const auto expert = device->Copy<int32_t>({1024});
    const auto loss = Loss(*device);
    const std::vector<int64_t> one = {0, 1};
    Workspace workspace(device->memory());
    const std::string message = testing::Message(AddLoadBalanceLoss(
        {.score = score.view(1, 1025, 1025)},
        {.slot_offset = slots.span(), .expert = expert.span(), .expert_share = {}},
        {.offsets = one, .micro_batch = one}, loss.span().data(), {}, workspace, device->stream()));
    EXPECT_EQ(message,
              device->stream().device().kind == DeviceKind::kCpu
                  ? ""
                  : "AddLoadBalanceLoss: E (experts) is 1025, expected at most 1024 on CUDA");
  }
}

}  // namespace
}  // namespace moe
