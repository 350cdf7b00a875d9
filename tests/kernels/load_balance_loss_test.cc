// kernels/router_loss, the balance of experts: hand-made cases, then against plain loops and the
// bits of a CPU, on every device.
#include <cstdint>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "kernels/router_loss/router_loss.h"
#include "tests/kernels/loss_results.h"

namespace moe::testing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

// One call's host arrays; empty gradients are not requested.
struct Case {
  int64_t experts = 1;
  std::vector<float> score;
  std::vector<int32_t> expert;
  std::vector<int64_t> groups, micro_batch;
  int32_t k = 1;        // slots per token
  int32_t choices = 0;  // 0 = k
  std::vector<double> share = {};
  float coeff = 1;
  ScoreFunction function = ScoreFunction::kSoftmax;
  bool gradient = true;
  MatrixLayout in = {}, out = {};
  int64_t further = 0;  // columns of the gradient beyond the experts

  int64_t tokens() const { return static_cast<int64_t>(score.size()) / experts; }
};

Result Balance(const TestDevice& device, const Case& c) {
  std::vector<int64_t> slots;
  for (int64_t t = 0; t <= c.tokens(); ++t) slots.push_back(t * c.k);
  const auto score = device.Copy(Matrix<float>::Of(c.tokens(), c.experts, c.score, c.in));
  const auto offset = device.Copy(slots);
  const auto expert = device.Copy(c.expert);
  const auto gradient = device.Copy(Matrix<float>(c.tokens(), c.experts + c.further, c.out));
  const auto loss = Loss(device);
  Workspace workspace(device.memory());
  const absl::Status status = AddLoadBalanceLoss(
      {.score = score.view(), .function = c.function},
      {.slot_offset = offset.span(),
       .expert = expert.span(),
       .choices = c.choices == 0 ? c.k : c.choices,
       .expert_share = c.share,
       .coeff = c.coeff},
      {.offsets = c.groups, .micro_batch = c.micro_batch}, loss.span().data(),
      c.gradient ? gradient.view() : MatrixView<float>(), workspace, device.stream());
  EXPECT_OK(status);
  return {Added(device, loss), ElementsOf(device.Read(gradient))};
}

// Calls check(a function from a Case to its Result).
template <typename Check>
void OnEveryDevice(Check check) {
  ForEachDevice(
      [&](const TestDevice& device) { check([&](const Case& c) { return Balance(device, c); }); });
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
  for (const float x : RandomFloats(1000 * c.experts, 1)) c.score.push_back(x * x / 8);
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
      // Fewer than 2000 roundings for a term, and those of the sum with 100.
      EXPECT_NEAR(got.loss, expected, 2100 * 0x1p-53 * expected + 2 * 0x1p-53 * 100);
      if (first.gradient.empty()) first = got;
      EXPECT_TRUE(SameBits(got.loss, first.loss));
      EXPECT_TRUE(SameBits(got.gradient, first.gradient));
    });
  }
}

// With two choices of three, and without, with counted and with given shares.
void ExpectBitsOfTheCpu(Case c) {
  const int64_t tokens = c.groups.back();
  c.score = PositiveScores(tokens, c.experts);
  c.k = 3;
  c.choices = 2;
  for (int64_t s = 0; s < 3 * tokens; ++s) {
    c.expert.push_back(static_cast<int32_t>(s * s % 31 % c.experts));
  }
  for (const ScoreFunction function : {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid}) {
    c.function = function;
    for (const bool given_share : {false, true}) {
      c.share.clear();
      for (const float x : RandomFloats(given_share ? c.experts : 0, 2)) {
        c.share.push_back(x);
      }
      const Result want = Balance(TestDevice(Device()), c);
      OnEveryDevice([&](auto loss) {
        const Result got = loss(c);
        EXPECT_TRUE(SameBits(got.loss, want.loss)) << c.experts;
        EXPECT_TRUE(SameBits(got.gradient, want.gradient)) << c.experts;
      });
    }
  }
}

// Groups of less than a block, of several, of exactly one; micro-batches with none, one and three
// groups.
TEST(LoadBalanceLoss, HasTheSameBitsForAnyWidthAndLayout) {
  ExpectBitsOfTheCpu({.experts = 19,
                      .groups = {0, 300, 556, 557, 570},
                      .micro_batch = {0, 1, 1, 4},
                      .in = kLayouts[0],
                      .out = kLayouts[3]});
  for (const int64_t experts : {1, 16, 70, 300}) {
    ExpectBitsOfTheCpu({.experts = experts,
                        .groups = {0, 5, 21},
                        .micro_batch = {0, 2},
                        .in = kLayouts[4],
                        .out = kLayouts[1],
                        .further = 3});
  }
  ExpectBitsOfTheCpu({.experts = 1024, .groups = {0, 7}, .micro_batch = {0, 1}});
}

// The other micro-batches of a rank do not change a micro-batch's loss or gradient.
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
    EXPECT_TRUE(SameBits(gradient, loss(all).gradient));
  });
}

TEST(LoadBalanceLoss, NoTokensAddNothing) {
  OnEveryDevice([](auto loss) {
    EXPECT_EQ(loss({.experts = 4, .groups = {0}, .micro_batch = {0, 0}}).loss, 0);
  });
}

TEST(LoadBalanceLoss, RefusesShapesThatDisagree) {
  const auto stream = MakeInlineStream();
  Workspace workspace;
  const std::vector<float> score(6, 0.25f);
  const std::vector<int64_t> slots = {0, 1, 2}, groups = {0, 2}, one = {0, 1}, three = {0, 3},
                             empty = {0, 2, 2};
  const std::vector<int32_t> expert = {0, 1};
  const RouterScores scores = {.score = {score.data(), 2, 3}};
  double loss = 0;
  const auto balance = [&](const LoadBalance& b, const LossGroups& g, MatrixView<float> d) {
    return AddLoadBalanceLoss(scores, b, g, &loss, d, workspace, *stream);
  };
  const LoadBalance good = {.slot_offset = slots, .expert = expert, .expert_share = {}, .coeff = 1};
  const LossGroups units = {.offsets = groups, .micro_batch = one};
  EXPECT_OK(balance(good, units, {}));
  const double added = loss;
  ExpectRefused(balance({.slot_offset = groups, .expert = expert, .expert_share = {}}, units, {}),
                "AddLoadBalanceLoss: slot_offset is [2], expected [3]");
  const std::vector<double> share(2);
  ExpectRefused(balance({.slot_offset = slots, .expert = expert, .expert_share = share}, units, {}),
                "AddLoadBalanceLoss: expert_share is [2], expected [3]");
  ExpectRefused(balance(good, {.offsets = three, .micro_batch = one}, {}),
                "AddLoadBalanceLoss: offsets run from 0 to 3, expected 0 to 2 rows");
  EXPECT_THAT(Message(balance(good, {.offsets = empty, .micro_batch = groups}, {})),
              ::testing::HasSubstr("token group 1 is empty"));
  ExpectRefused(balance(good, {.offsets = groups, .micro_batch = three}, {}),
                "AddLoadBalanceLoss: offsets run from 0 to 3, expected 0 to 1 rows");
  std::vector<float> d(4);
  ExpectRefused(balance(good, units, {d.data(), 2, 2}),
                "AddLoadBalanceLoss: d_logits is [2, 2] with stride 2, expected [2, 3]");
  EXPECT_EQ(loss, added);
}

// A block counts its experts in shared memory.
TEST(LoadBalanceLoss, BalanceOfMoreExpertsThanTheKernelIsCompiledForIsRefusedByName) {
  ForEachDevice([&](const TestDevice& device) {
    const auto score = device.Copy(std::vector<float>(1025, 0.0f));
    const auto slots = device.Copy<int64_t>({0, 1});
    const auto expert = device.Copy<int32_t>({1024});
    const auto loss = Loss(device);
    const std::vector<int64_t> one = {0, 1};
    Workspace workspace(device.memory());
    const std::string message = Message(AddLoadBalanceLoss(
        {.score = score.view(1, 1025, 1025)},
        {.slot_offset = slots.span(), .expert = expert.span(), .expert_share = {}},
        {.offsets = one, .micro_batch = one}, loss.span().data(), {}, workspace, device.stream()));
    EXPECT_EQ(message,
              device.is_cpu()
                  ? ""
                  : "AddLoadBalanceLoss: E (experts) is 1025, expected at most 1024 on CUDA");
  });
}

}  // namespace
}  // namespace moe::testing
