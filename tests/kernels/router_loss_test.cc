// kernels/router_loss, z-loss and entropy: hand-made cases, then against a CPU's bits, on every
// device.
#include "kernels/router_loss/router_loss.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include <gmock/gmock.h>

#include "tests/kernels/loss_results.h"

namespace moe::testing {
namespace {

// z-loss and entropy of the arrays below.
struct Scores {
  int64_t cols = 1, experts = 1;
  std::vector<float> logits, score, log_sum_exp;
  ScoreFunction function = ScoreFunction::kSoftmax;
  MatrixLayout in = {}, out = {};

  // Calls f(scores in the device's memory, a workspace there).
  template <typename Function>
  void With(const TestDevice& device, Function f) const {
    const auto tokens = static_cast<int64_t>(log_sum_exp.size());
    const auto l = device.Copy(Matrix<float>::Of(tokens, cols, logits, in));
    const auto s = device.Copy(Matrix<float>::Of(tokens, experts, score, in));
    const auto lse = device.Copy(log_sum_exp);
    Workspace workspace(device.memory());
    f(
        RouterScores{
            .logits = l.view(), .score = s.view(), .function = function, .log_sum_exp = lse.span()},
        workspace);
  }
};

Result ZLoss(const TestDevice& device, const Scores& scores, std::vector<int64_t> micro_batches,
             float coeff) {
  Result result;
  scores.With(device, [&](const RouterScores& on_device, Workspace& workspace) {
    const auto gradient =
        device.Copy(Matrix<float>(on_device.score.rows(), scores.cols, scores.out, 1));
    const auto loss = Loss(device);
    const absl::Status status = AddZLoss(on_device, micro_batches, coeff, loss.span().data(),
                                         gradient.view(), workspace, device.stream());
    std::fill(micro_batches.begin(), micro_batches.end(), int64_t{-1});  // may change at once
    EXPECT_OK(status);
    result = {Added(device, loss), ElementsOf(device.Read(gradient))};
  });
  return result;
}

TEST(ZLoss, IsTheMeanSquareOfLogSumExpOfEachMicroBatch) {
  ForEachDevice([&](const TestDevice& device) {
    const Result result = ZLoss(device,
                                {.cols = 2,
                                 .experts = 2,
                                 .logits = std::vector<float>(6),
                                 .score = {.5f, .5f, .25f, .75f, .5f, .5f},
                                 .log_sum_exp = {2, 4, -3}},
                                {0, 0, 2, 3}, 0.5f);
    EXPECT_DOUBLE_EQ(result.loss, 0.5 * (4 + 16) / 2 + 0.5 * 9);
    // 1 + 0.5 * 2 * lse * p / T
    EXPECT_THAT(result.gradient, ::testing::ElementsAre(1.5f, 1.5f, 1.5f, 2.5f, -.5f, -.5f));
  });
}

// A second set of logits, on which no expert's probability depends: its gradient stays unchanged.
TEST(ZLoss, OfSigmoidScoresTakesTheSoftmaxOfTheLogits) {
  ForEachDevice([&](const TestDevice& device) {
    const float log3 = std::log(3.0f);
    const Result result = ZLoss(device,
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
  });
}

// bad_logit: -1, all are finite.
double EntropyOf(const TestDevice& device, const Scores& scores, int64_t* bad_logit = nullptr) {
  double result = 0;
  scores.With(device, [&](const RouterScores& on_device, Workspace& workspace) {
    const auto sum = Loss(device);
    const auto bad = device.Copy(std::vector<int64_t>{0});
    EXPECT_OK(
        AddEntropy(on_device, sum.span().data(), bad.span().data(), workspace, device.stream()));
    const int64_t found = device.Read(bad).front();
    if (bad_logit != nullptr) *bad_logit = found == 0 ? -1 : kFirstLogit - found;
    result = Added(device, sum);
  });
  return result;
}

TEST(Entropy, IsThatOfEveryTokensShares) {
  ForEachDevice([&](const TestDevice& device) {
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
    EXPECT_NEAR(EntropyOf(device, softmax), std::log(2.0), 2 * 0x1p-24 * 1.7);
    softmax.score[3] = kNaN;
    EXPECT_TRUE(std::isnan(EntropyOf(device, softmax)));

    EXPECT_NEAR(EntropyOf(device, {.cols = 2,
                                   .experts = 2,
                                   .logits = std::vector<float>(4),
                                   .score = {.25f, .25f, .75f, 0},
                                   .log_sum_exp = {0, 0},
                                   .function = ScoreFunction::kSigmoid}),
                std::log(2.0), 2 * 0x1p-24 * 1.4);
  });
}

TEST(Entropy, IsNanWhereALogitIsNotFinite) {
  ForEachDevice([&](const TestDevice& device) {
    for (const auto function : {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid}) {
      for (const float bad : {kInfinity, -kInfinity, kNaN}) {
        Scores scores = {.cols = 3,
                         .experts = 2,
                         .logits = {0, -200, 1, 0, -200, 1},
                         .score = {.5f, 0, .5f, 0},
                         .log_sum_exp = {0, 0},
                         .function = function};
        int64_t none = 0;
        EXPECT_TRUE(std::isfinite(EntropyOf(device, scores, &none)));
        EXPECT_EQ(none, -1);
        scores.logits[4] = bad;
        int64_t at = 0;
        EXPECT_TRUE(std::isnan(EntropyOf(device, scores, &at))) << bad;
        EXPECT_EQ(at, 4);
        scores.logits[1] = bad;
        EXPECT_TRUE(std::isnan(EntropyOf(device, scores, &at))) << bad;
        EXPECT_EQ(at, 1);  // the first of two tokens
        scores.logits[1] = -200;
        scores.logits[4] = 0;
        scores.logits[5] = bad;
        EXPECT_TRUE(std::isnan(EntropyOf(device, scores, &at))) << bad;
        EXPECT_EQ(at, 5);  // beyond the scores
        if (function == ScoreFunction::kSoftmax) continue;
        scores.logits[5] = 1;
        scores.score = {0, 0, 0, 0};
        EXPECT_EQ(EntropyOf(device, scores), 0);
        scores.logits[3] = bad;
        EXPECT_TRUE(std::isnan(EntropyOf(device, scores, &at))) << bad;
        EXPECT_EQ(at, 3);
      }
    }
  });
}

// For a softmax on all devices, for a sigmoid where the device has the host's exponential.
TEST(RouterLoss, ZLossAndEntropyHaveTheSameBitsForAnyWidthAndLayout) {
  const auto check = [](int64_t experts, const std::vector<int64_t>& micro_batches, Scores s) {
    const int64_t tokens = micro_batches.back();
    s.experts = experts;
    s.cols = experts + 2;
    s.logits = RandomFloats(tokens * s.cols, 2);
    s.log_sum_exp = RandomFloats(tokens, 3);
    s.score = PositiveScores(tokens, experts);
    const TestDevice one{Device()};
    const Result want = ZLoss(one, s, micro_batches, 0.5f);
    const double entropy = EntropyOf(one, s);
    ForEachDevice([&](const TestDevice& device) {
      if (s.function == ScoreFunction::kSigmoid && !device.has_host_math()) return;
      const Result got = ZLoss(device, s, micro_batches, 0.5f);
      EXPECT_TRUE(SameBits(got.loss, want.loss)) << experts;
      EXPECT_TRUE(SameBits(got.gradient, want.gradient)) << experts;
      EXPECT_TRUE(SameBits(EntropyOf(device, s), entropy)) << experts;
    });
  };
  for (const auto function : {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid}) {
    check(19, {0, 5, 5, 300}, {.function = function, .in = kLayouts[0], .out = kLayouts[3]});
    check(19, {0, 300, 300, 1000}, {.function = function});
    for (const int64_t experts : {1, 16, 70}) {
      check(experts, {0, 20}, {.function = function, .in = kLayouts[4], .out = kLayouts[1]});
    }
  }
}

TEST(RouterLoss, NoTokensAddNothing) {
  ForEachDevice([](const TestDevice& device) {
    EXPECT_EQ(ZLoss(device, {.cols = 6, .experts = 4}, {0, 0}, 1).loss, 0);
    EXPECT_EQ(EntropyOf(device, {.cols = 6, .experts = 4}), 0);
  });
}

TEST(RouterLoss, RefusesShapesThatDisagree) {
  const auto stream = MakeInlineStream();
  Workspace workspace;
  const std::vector<float> score(6), lse(2);
  const std::vector<int64_t> three = {0, 3};
  RouterScores scores = {
      .logits = {score.data(), 2, 3}, .score = {score.data(), 2, 3}, .log_sum_exp = lse};
  double loss = 0;
  ExpectRefused(AddZLoss(scores, three, 1, &loss, {}, workspace, *stream),
                "AddZLoss: offsets run from 0 to 3, expected 0 to 2 rows");
  scores.log_sum_exp = absl::MakeConstSpan(lse).first(1);
  ExpectRefused(AddEntropy(scores, &loss, nullptr, workspace, *stream),
                "AddEntropy: log_sum_exp is [1], expected [2]");
}

}  // namespace
}  // namespace moe::testing
