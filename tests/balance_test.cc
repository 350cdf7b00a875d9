#include "gating/balance.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace moe {
namespace {

using ::testing::Each;

// T tokens with K slots each over E experts, losses over `groups` within one micro-batch.
struct Balance {
  int64_t experts;
  int32_t k;
  std::vector<float> probs;
  std::vector<int32_t> expert;
  std::vector<int64_t> groups;
  std::vector<float> gradient;

  int64_t tokens() const { return static_cast<int64_t>(probs.size()) / experts; }

  double Loss(float coeff, int32_t choices) {
    std::vector<int64_t> offset;
    for (int64_t t = 0; t <= tokens(); ++t) offset.push_back(t * k);
    const std::vector<int64_t> micro_batch = {0, static_cast<int64_t>(groups.size()) - 1};
    gradient.assign(probs.size(), 0.0f);
    double loss = 100;  // is added to
    Workspace workspace;
    const absl::Status status =
        AddLoadBalanceLoss({.score = {probs.data(), tokens(), experts},
                            .slot_offset = offset,
                            .expert = expert,
                            .choices = choices},
                           {.offsets = groups, .micro_batch = micro_batch}, coeff, &loss,
                           MatrixView<float>(gradient.data(), tokens(), experts), workspace);
    EXPECT_TRUE(status.ok()) << status;
    return loss - 100;
  }
};

TEST(LoadBalanceLoss, IsTheCoefficientAtPerfectBalanceForAnyK) {
  // Every expert gets as many slots as the others: the gradient by p is the same for all.
  Balance one = {.experts = 4,
                 .k = 1,
                 .probs = std::vector<float>(16, 0.25f),
                 .expert = {0, 1, 2, 3},
                 .groups = {0, 4}};
  EXPECT_DOUBLE_EQ(one.Loss(0.5f, 1), 0.5);
  EXPECT_THAT(one.gradient, Each(0.0f));
  Balance two = {.experts = 4,
                 .k = 2,
                 .probs = std::vector<float>(16, 0.25f),
                 .expert = {0, 1, 2, 3, 0, 1, 2, 3},
                 .groups = {0, 4}};
  EXPECT_DOUBLE_EQ(two.Loss(0.5f, 2), 0.5);
  EXPECT_THAT(two.gradient, Each(0.0f));
}

TEST(LoadBalanceLoss, IsEIfOneExpertTakesEverythingWithCertainty) {
  Balance all = {
      .experts = 4, .k = 1, .probs = {0, 0, 1, 0, 0, 0, 1, 0}, .expert = {2, 2}, .groups = {0, 2}};
  EXPECT_DOUBLE_EQ(all.Loss(1, 1), 4);
}

TEST(LoadBalanceLoss, CountsFirstChoicesOnlyWhereTheGateSaysSo) {
  Balance two = {.experts = 2,
                 .k = 2,
                 .probs = {.75f, .25f, .75f, .25f},
                 .expert = {0, 1, 0, 1},
                 .groups = {0, 2}};
  EXPECT_DOUBLE_EQ(two.Loss(1, 2), 1);    // 2 / (2 * 4) * (1.5 * 2 + .5 * 2)
  EXPECT_DOUBLE_EQ(two.Loss(1, 1), 1.5);  // 2 / (1 * 4) * (1.5 * 2 + .5 * 0)
  // G = (2, 0) / T; p (G - mean): .75 * (1 - .75) and .25 * (0 - .75).
  EXPECT_THAT(two.gradient, testing::ElementsAre(.1875f, -.1875f, .1875f, -.1875f));
}

TEST(LoadBalanceLoss, OverSeveralGroupsIsTheirMean) {
  // Two sequences, each alone on one expert: 2 for each. Over the whole micro-batch it is 1.
  Balance sequences = {.experts = 2,
                       .k = 1,
                       .probs = {1, 0, 1, 0, 0, 1, 0, 1},
                       .expert = {0, 0, 1, 1},
                       .groups = {0, 2, 4}};
  EXPECT_DOUBLE_EQ(sequences.Loss(1, 1), 2);
  sequences.groups = {0, 4};
  EXPECT_DOUBLE_EQ(sequences.Loss(1, 1), 1);
  // Lengths do not weigh: 1 and 3 tokens.
  Balance uneven = {.experts = 2,
                    .k = 1,
                    .probs = {1, 0, .5f, .5f, .5f, .5f, .5f, .5f},
                    .expert = {0, 0, 1, 1},
                    .groups = {0, 1, 4}};
  EXPECT_DOUBLE_EQ(uneven.Loss(1, 1), (2 + 1) / 2.0);
}

TEST(ZLoss, IsTheMeanSquareOfLogSumExpOfEachMicroBatch) {
  const std::vector<float> probs = {.5f, .5f, .25f, .75f, .5f, .5f};
  const std::vector<float> lse = {2, 4, -3};
  const std::vector<int64_t> micro_batches = {0, 0, 2, 3};
  std::vector<float> gradient(6, 1.0f);
  double loss = 100;
  AddZLoss(MatrixView<const float>(probs.data(), 3, 2), lse, micro_batches, 0.5f, &loss,
           MatrixView<float>(gradient.data(), 3, 2));
  EXPECT_DOUBLE_EQ(loss, 100 + 0.5 * (4 + 16) / 2 + 0.5 * 9);
  // 1 + 0.5 * 2 * lse * p / T
  EXPECT_THAT(gradient, testing::ElementsAre(1.5f, 1.5f, 1.5f, 2.5f, -.5f, -.5f));
}

TEST(Losses, WithoutAGradientGiveTheSameValue) {
  const std::vector<float> probs = {.75f, .25f, .5f, .5f};
  const std::vector<float> lse = {1, 2};
  const std::vector<int64_t> offsets = {0, 2}, slots = {0, 1, 2}, one = {0, 1};
  const std::vector<int32_t> expert = {0, 1};
  const MatrixView<const float> p(probs.data(), 2, 2);
  Workspace workspace;
  double loss = 0;
  ASSERT_TRUE(AddLoadBalanceLoss({.score = p, .slot_offset = slots, .expert = expert, .choices = 1},
                                 {.offsets = offsets, .micro_batch = one}, 1, &loss, {}, workspace)
                  .ok());
  EXPECT_DOUBLE_EQ(loss, 2.0 / 4 * (1.25 + .75));
  AddZLoss(p, lse, offsets, 1, &loss, {});
  EXPECT_DOUBLE_EQ(loss, 1 + 2.5);
}

TEST(LoadBalanceLoss, OfSigmoidScoresTakesTheirShares) {
  // s = 3/4, 1/4 and 1/2, 1/2: p is the same, since rows sum to 1. dl has the factor 1 - s.
  const std::vector<float> score = {.75f, .25f, .5f, .5f};
  const std::vector<int64_t> offsets = {0, 2}, slots = {0, 1, 2}, one = {0, 1};
  const std::vector<int32_t> expert = {0, 0};
  std::vector<float> gradient(4, 0.0f);
  Workspace workspace;
  double loss = 0;
  ASSERT_TRUE(AddLoadBalanceLoss({.score = {score.data(), 2, 2},
                                  .function = ScoreFunction::kSigmoid,
                                  .slot_offset = slots,
                                  .expert = expert},
                                 {.offsets = offsets, .micro_batch = one}, 1, &loss,
                                 MatrixView<float>(gradient.data(), 2, 2), workspace)
                  .ok());
  EXPECT_DOUBLE_EQ(loss, 2.0 / 4 * (1.25 * 2));
  // G = 1, 0; softmax gradients p (G - p_0): 3/16, -3/16 and 1/4, -1/4.
  EXPECT_THAT(gradient, testing::ElementsAre(3.0f / 16 / 4, -3.0f / 16 * .75f, .125f, -.125f));
}

TEST(LoadBalanceLoss, AgainstGivenSharesIgnoresTheCounts) {
  const std::vector<float> probs = {.75f, .25f, .5f, .5f};
  const std::vector<int64_t> offsets = {0, 2}, slots = {0, 1, 2}, one = {0, 1};
  const std::vector<int32_t> expert = {0, 0};
  const std::vector<double> share = {.25, .75};
  Workspace workspace;
  double loss = 0;
  ASSERT_TRUE(AddLoadBalanceLoss({.score = {probs.data(), 2, 2},
                                  .slot_offset = slots,
                                  .expert = expert,
                                  .expert_share = share},
                                 {.offsets = offsets, .micro_batch = one}, 3, &loss, {}, workspace)
                  .ok());
  EXPECT_DOUBLE_EQ(loss, 3 * 2 * (.25 * 1.25 + .75 * .75) / 2);  // alpha E sum f P, P a mean
}

TEST(EntropySum, IsThatOfEveryTokensShares) {
  Workspace workspace;
  ThreadPool two(2);
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  // Ten logits: more than one block of partials. 1/2, 1/2 and a certain choice.
  std::vector<float> logits(20, -inf), probs(20, 0.0f);
  logits[3] = logits[9] = 1;
  probs[3] = probs[9] = 0.5f;
  logits[18] = 7;
  probs[18] = 1;
  const std::vector<float> lse = {1 + std::log(2.0f), 7};
  const EntropyInput softmax = {
      .logits = {logits.data(), 2, 10}, .score = {probs.data(), 2, 10}, .log_sum_exp = lse};
  EXPECT_NEAR(*EntropySum(softmax, workspace, two), std::log(2.0), 2 * 0x1p-24 * 1.7);
  probs[3] = nan;
  EXPECT_TRUE(std::isnan(*EntropySum(softmax, workspace, two)));

  const std::vector<float> score = {.25f, .25f, .75f, 0};
  EXPECT_NEAR(*EntropySum({.score = {score.data(), 2, 2}, .function = ScoreFunction::kSigmoid},
                          workspace, ThreadPool::Serial()),
              std::log(2.0), 2 * 0x1p-24 * 1.4);
}

}  // namespace
}  // namespace moe
