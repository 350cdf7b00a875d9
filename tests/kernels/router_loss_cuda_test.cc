// kernels/router_loss on the simulated GPU. The simulator's exponential and logarithm are the
// host's: all results have the bits of the CPU's loops.
#include "kernels/router_loss/router_loss_cuda.h"

#include <cstdint>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/base/parallel.h"
#include "kernels/router_loss/router_loss_cpu.h"
#include "tests/cusim/schedules.h"

namespace moe {
namespace {

using cusim::DeviceMatrix;
using cusim::kLayouts;
using cusim::Layout;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Scores are positive; a token's may all have underflowed.
DeviceMatrix<float> Scores(int64_t tokens, int64_t experts, Layout layout) {
  auto score = DeviceMatrix<float>::Random(tokens, experts, layout, 1);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t e = 0; e < experts; ++e) {
      const float x = score.view()(t, e);
      score.view()(t, e) = t == 3 || e == 2 ? 0.0f : x * x / 8;
    }
  }
  return score;
}

// What the two paths write, scratch and all.
struct Outputs {
  Outputs(int64_t tokens, int64_t cols, Layout layout)
      : d_logits(DeviceMatrix<float>::Random(tokens, cols, layout, 5)) {}
  double sum = 100;
  DeviceMatrix<float> d_logits;
  std::vector<double> block_sums, by_prob, values;
  std::vector<int32_t> block_counts;
};

// The balance loss of tokens with three slots each, of which two count.
class BalanceCase {
 public:
  BalanceCase(const std::vector<int64_t>& groups, const std::vector<int64_t>& micro_batch,
              int64_t experts, Layout layout)
      : blocks_(router_loss::CutIntoBlocks(groups)),
        micro_batch_(micro_batch),
        score_(Scores(groups.back(), experts, layout)) {
    for (int64_t t = 0; t <= groups.back(); ++t) slot_offset_.push_back(3 * t - (t == 2 ? 2 : 0));
    for (int64_t s = 0; s < 3 * groups.back(); ++s) {
      expert_.push_back(static_cast<int32_t>(s * s % 31 % experts));
    }
    for (const float x : cusim::RandomFloats(experts, 2)) share_.push_back(x);
    for (const float x : cusim::RandomFloats(static_cast<int64_t>(groups.size()), 3)) {
      scale_.push_back(x);
    }
  }

  router_loss::Balance Terms(ScoreFunction function, bool given_share, Outputs& out) const {
    const auto blocks = blocks_.view();
    const int64_t experts = score_.view().cols();
    out.block_sums.assign(blocks.blocks * experts, kNan);
    out.block_counts.assign(blocks.blocks * experts, -77);
    out.by_prob.assign(blocks.units * experts, kNan);
    out.values.assign(blocks.units, kNan);
    return {.groups = blocks,
            .score = score_.view(),
            .function = function,
            .slot_offset = slot_offset_.data(),
            .expert = expert_.data(),
            .choices = 2,
            .expert_share = given_share ? share_.data() : nullptr,
            .scale = scale_.data(),
            .d_logits = out.d_logits.view(),
            .block_sums = out.block_sums.data(),
            .block_counts = out.block_counts.data(),
            .by_prob = out.by_prob.data(),
            .group_loss = out.values.data(),
            .fold = {.value = out.values.data(),
                     .offset = micro_batch_.data(),
                     .parts = static_cast<int64_t>(micro_batch_.size()) - 1,
                     .sum = &out.sum}};
  }

  int64_t tokens() const { return score_.view().rows(); }

 private:
  router_loss::HostBlocks blocks_;
  std::vector<int64_t> micro_batch_, slot_offset_;
  DeviceMatrix<float> score_;
  std::vector<int32_t> expert_;
  std::vector<double> share_, scale_;
};

void CheckBalance(const BalanceCase& balance, int64_t cols, Layout layout) {
  for (const ScoreFunction function : {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid}) {
    for (const bool given_share : {false, true}) {
      Outputs got(balance.tokens(), cols, layout), want = got;
      ASSERT_EQ(router_loss::Run(balance.Terms(function, given_share, got), nullptr), cudaSuccess);
      router_loss::Run(balance.Terms(function, given_share, want), ThreadPool::Serial());
      EXPECT_EQ(got.sum, want.sum);
      EXPECT_TRUE(got.d_logits == want.d_logits) << given_share;
    }
  }
}

// Groups of less than a block, of several, of exactly one; micro-batches with none, one and three.
TEST(RouterLossCudaTest, BalanceHasTheBitsOfTheCpuForAnyWidthLayoutAndSchedule) {
  cusim::ForSeeds([] {
    CheckBalance(BalanceCase({0, 300, 556, 557, 570}, {0, 1, 1, 4}, 19, kLayouts[0]), 19,
                 kLayouts[3]);
    for (const int64_t experts : {1, 16, 70, 300}) {
      CheckBalance(BalanceCase({0, 5, 21}, {0, 2}, experts, kLayouts[4]), experts + 3, kLayouts[1]);
    }
  });
  CheckBalance(BalanceCase({0, 7}, {0, 1}, 1024, kLayouts[0]), 1024, kLayouts[0]);
}

TEST(RouterLossCudaTest, BalanceWithoutAGradientGivesTheSameLoss) {
  const BalanceCase balance({0, 300}, {0, 1}, 8, kLayouts[0]);
  Outputs with(300, 8, kLayouts[0]), without = with;
  const DeviceMatrix<float> before = without.d_logits;
  ASSERT_EQ(router_loss::Run(balance.Terms(ScoreFunction::kSoftmax, false, with), nullptr),
            cudaSuccess);
  router_loss::Balance terms = balance.Terms(ScoreFunction::kSoftmax, false, without);
  terms.d_logits = {};
  ASSERT_EQ(router_loss::Run(terms, nullptr), cudaSuccess);
  EXPECT_EQ(without.sum, with.sum);
  EXPECT_TRUE(without.d_logits == before);
  EXPECT_FALSE(with.d_logits == before);
}

// Entropy and z-loss of units, the last of them the only one of more than a block.
class ScoresCase {
 public:
  ScoresCase(const std::vector<int64_t>& units, int64_t experts, Layout layout)
      : blocks_(router_loss::CutIntoBlocks(units)),
        logits_(DeviceMatrix<float>::Random(units.back(), experts + 2, layout, 4)),
        score_(Scores(units.back(), experts, layout)),
        log_sum_exp_(cusim::RandomFloats(units.back(), 6)) {
    for (const float x : cusim::RandomFloats(static_cast<int64_t>(units.size()), 7)) {
      scale_.push_back(x);
    }
  }

  router_loss::Entropy Entropy(ScoreFunction function, Outputs& out) const {
    out.values.assign(blocks_.unit.size(), kNan);
    return {.blocks = blocks_.view(),
            .logits = logits_.view(),
            .score = score_.view(),
            .function = function,
            .log_sum_exp = log_sum_exp_.data(),
            .block_value = out.values.data(),
            .fold = {.value = out.values.data(),
                     .offset = blocks_.first_block.data(),
                     .parts = static_cast<int64_t>(blocks_.first_block.size()) - 1,
                     .sum = &out.sum}};
  }
  router_loss::ZLoss ZLoss(ScoreFunction function, bool gradient, Outputs& out) const {
    return {.input = Entropy(function, out),
            .scale = scale_.data(),
            .d_logits = gradient ? out.d_logits.view() : MatrixView<float>()};
  }

  int64_t tokens() const { return score_.view().rows(); }
  int64_t cols() const { return logits_.view().cols(); }

 private:
  router_loss::HostBlocks blocks_;
  DeviceMatrix<float> logits_, score_;
  std::vector<float> log_sum_exp_;
  std::vector<double> scale_;
};

void CheckScores(const ScoresCase& scores, Layout layout) {
  for (const ScoreFunction function : {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid}) {
    Outputs got(scores.tokens(), scores.cols(), layout), want = got;
    ASSERT_EQ(router_loss::Run(scores.Entropy(function, got), nullptr), cudaSuccess);
    router_loss::Run(scores.Entropy(function, want), ThreadPool::Serial());
    EXPECT_EQ(got.sum, want.sum);
    for (const bool gradient : {false, true}) {
      ASSERT_EQ(router_loss::Run(scores.ZLoss(function, gradient, got), nullptr), cudaSuccess);
      router_loss::Run(scores.ZLoss(function, gradient, want), ThreadPool::Serial());
      EXPECT_EQ(got.sum, want.sum);
      EXPECT_TRUE(got.d_logits == want.d_logits) << gradient;
    }
  }
}

TEST(RouterLossCudaTest, EntropyAndZLossHaveTheBitsOfTheCpuForAnyWidthLayoutAndSchedule) {
  cusim::ForSeeds([] {
    CheckScores(ScoresCase({0, 5, 5, 300}, 19, kLayouts[0]), kLayouts[3]);
    for (const int64_t experts : {1, 16, 70}) {
      CheckScores(ScoresCase({0, 20}, experts, kLayouts[4]), kLayouts[1]);
    }
  });
}

TEST(RouterLossCudaTest, NoTokensAddNothing) {
  const BalanceCase balance({0}, {0, 0}, 4, kLayouts[0]);
  const ScoresCase scores({0, 0}, 4, kLayouts[0]);
  Outputs out(0, 6, kLayouts[0]);
  EXPECT_EQ(router_loss::Run(balance.Terms(ScoreFunction::kSigmoid, false, out), nullptr),
            cudaSuccess);
  EXPECT_EQ(router_loss::Run(scores.Entropy(ScoreFunction::kSoftmax, out), nullptr), cudaSuccess);
  EXPECT_EQ(router_loss::Run(scores.ZLoss(ScoreFunction::kSoftmax, true, out), nullptr),
            cudaSuccess);
  EXPECT_EQ(out.sum, 100);
}

}  // namespace
}  // namespace moe
