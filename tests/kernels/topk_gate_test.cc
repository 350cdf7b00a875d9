// kernels/topk_gate: softmax and sigmoid scores, log_sum_exp, and gradients with respect to logits,
// on every device. select_experts_test.cc has the selection.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include <gmock/gmock.h>

#include "kernels/topk_gate/gate_backward.h"
#include "tests/kernels/gate_run.h"

namespace moe::testing {
namespace {

using ::testing::ElementsAre;

constexpr GateRule kSoftmax = {}, kSigmoid = {.score = ScoreFunction::kSigmoid};

std::vector<float> SigmoidOf(const TestDevice& device, const std::vector<float>& logits) {
  const auto n = static_cast<int64_t>(logits.size());
  const auto score = RunGate(device, kSigmoid, Matrix<float>::Of(1, n, logits), 1).score;
  return {score.view().row(0), score.view().row(0) + n};
}

TEST(SoftmaxScores, HandMadeRow) {
  // exp: 1, 2, 2, 4 (sum 9); second row is uniform.
  const float ln2 = std::log(2.0f);
  const auto logits = Matrix<float>::Of(2, 4, {0, ln2, ln2, 2 * ln2, 5, 5, 5, 5});
  ForEachDevice([&](const TestDevice& device) {
    const GateResult r = RunGate(device, kSoftmax, logits, 2);
    EXPECT_THAT(r.Ids(0), ElementsAre(3, 1));  // 1 and 2 tie: the lowest id
    EXPECT_THAT(r.Ids(1), ElementsAre(0, 1));
    EXPECT_THAT(r.count, ElementsAre(1, 2, 0, 1));
    EXPECT_FLOAT_EQ(r.weight.at(0, 0), 4.0f / 9);
    EXPECT_FLOAT_EQ(r.weight.at(0, 1), 2.0f / 9);
    EXPECT_FLOAT_EQ(r.score.at(0, 0), 1.0f / 9);
    EXPECT_FLOAT_EQ(r.score.at(1, 3), 0.25f);
    EXPECT_FLOAT_EQ(r.log_sum_exp[0], std::log(9.0f));
    EXPECT_FLOAT_EQ(r.log_sum_exp[1], 5 + std::log(4.0f));
  });
}

TEST(SoftmaxScores, ANaNMakesItsRowNaNAndMinusInfinityHasProbabilityZero) {
  const auto logits = Matrix<float>::Of(
      3, 4, {kNaN, -kInfinity, kNaN, 1, 2, 1, 0, -1, -kInfinity, 3, -kInfinity, 3});
  ForEachDevice([&](const TestDevice& device) {
    const GateResult r = RunGate(device, kSoftmax, logits, 3);
    for (int64_t e = 0; e < 4; ++e) EXPECT_TRUE(std::isnan(r.score(0, e))) << e;
    // no influence of the other row
    for (int64_t e = 0; e < 4; ++e) EXPECT_GT(r.score(1, e), 0) << e;
    EXPECT_THAT(r.Ids(2), ElementsAre(1, 3, 0));
    for (int64_t e = 0; e < 4; ++e) EXPECT_EQ(r.score(2, e), e % 2 == 0 ? 0 : 0.5) << e;
  });
}

TEST(SoftmaxScores, SelectionIsByLogitsWhereProbabilitiesUnderflow) {
  const auto logits = Matrix<float>::Of(1, 5, {-300, 0, -200, 1e30f, -1e30f});
  ForEachDevice([&](const TestDevice& device) {
    const GateResult r = RunGate(device, kSoftmax, logits, 4);
    EXPECT_THAT(r.Ids(0), ElementsAre(3, 1, 2, 0));
    EXPECT_THAT(r.score.values(), ElementsAre(0, 0, 0, 1, 0));
    EXPECT_EQ(r.log_sum_exp[0], 1e30f);
  });
}

// With u = 2^-24: x - m has an error of |x - m| u, exp of 1 ulp = 2u, on a GPU of 2, each of the at
// most E/16 + 4 additions of u, the division of u; the sum inherits the worst term's error.
// Sigmoids are at most 2 floats from the rounded exact value.
TEST(GateScores, AreWithinTheirErrorOfFloat64ForAnyWidthAndLayout) {
  ForEachDevice([](const TestDevice& device) {
    const auto check = [&](int64_t experts, MatrixLayout in, MatrixLayout out) {
      if (!device.is_cpu() && experts > 1024) return;
      SCOPED_TRACE(experts);
      const auto logits = Matrix<float>::Random(13, experts, in, 1, 2);
      const int64_t k = std::min<int64_t>(experts, 9);
      const GateResult softmax = RunGate(device, kSoftmax, logits, k, {}, out);
      const GateResult sigmoid = RunGate(device, kSigmoid, logits, 1, {}, out);
      EXPECT_TRUE(softmax.score.edges_intact() && sigmoid.score.edges_intact());
      for (int64_t t = 0; t < 13; ++t) {
        double max = logits(t, 0), min = max, sum = 0;
        for (int64_t e = 0; e < experts; ++e) {
          max = std::max(max, logits(t, e));
          min = std::min(min, logits(t, e));
        }
        for (int64_t e = 0; e < experts; ++e) sum += std::exp(logits(t, e) - max);
        const double exponentials = device.has_host_math() ? 4 : 8;
        const double error =
            (2 * (max - min) + exponentials + static_cast<double>(experts) / 16 + 5) *
            kFloatRounding;
        for (int64_t e = 0; e < experts; ++e) {
          const double p = std::exp(logits(t, e) - max) / sum;
          ASSERT_NEAR(softmax.score(t, e), p, p * error) << t << " " << e;
          const auto s = static_cast<float>(1 / (1 + std::exp(-logits(t, e))));
          ASSERT_LE(
              std::abs(std::bit_cast<int32_t>(sigmoid.score.at(t, e)) - std::bit_cast<int32_t>(s)),
              2);
        }
        const double lse = max + std::log(sum);
        ASSERT_NEAR(softmax.log_sum_exp[t], lse, error + std::abs(lse) * kFloatRounding);
        for (int64_t j = 0; j < k; ++j) {
          ASSERT_EQ(softmax.weight(t, j), softmax.score(t, softmax.expert.at(t, j)));
        }
      }
    };
    for (const int64_t experts : {1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 64, 65, 100, 257, 1100}) {
      check(experts, {}, {});
    }
    for (const auto& [in, out] : kLayoutPairs) check(40, in, out);
  });
}

// The order of the contract. A simulated device has the host's exponential, and its bits.
TEST(SoftmaxScores, HaveTheBitsOfThePlainLoopsOnASimulatedDevice) {
  ForEachDevice([](const TestDevice& device) {
    if (device.is_cpu() || !device.has_host_math()) return;
    for (const int64_t experts : {1, 7, 16, 17, 33, 64, 129, 257, 1000, 1024}) {
      for (const auto& logits :
           {WithTies(11, experts, {}, 2), Matrix<float>::Random(11, experts, {}, 3, 3)}) {
        const GateResult got = RunGate(device, kSoftmax, logits, 1);
        Matrix<float> want(11, experts, MatrixLayout{});
        std::vector<float> log_sum_exp;
        for (int64_t t = 0; t < 11; ++t) {
          float max = -kInfinity, partial[16] = {};
          for (int64_t e = 0; e < experts; ++e) {
            max = logits.at(t, e) > max ? logits.at(t, e) : max;
          }
          for (int64_t e = 0; e < experts; ++e) {
            want.at(t, e) = std::exp(logits.at(t, e) - max);
            partial[e % 16] += want.at(t, e);
          }
          for (int half = 8; half > 0; half /= 2) {
            for (int j = 0; j < half; ++j) partial[j] += partial[j + half];
          }
          for (int64_t e = 0; e < experts; ++e) want.at(t, e) /= partial[0];
          log_sum_exp.push_back(
              static_cast<float>(double{max} + std::log(static_cast<double>(partial[0]))));
        }
        EXPECT_TRUE(SameNumbers(got.score, want)) << experts;
        EXPECT_TRUE(SameNumbers(got.log_sum_exp, log_sum_exp)) << experts;
      }
    }
  });
}

TEST(SigmoidScores, InfinitiesSaturateAndNaNStays) {
  ForEachDevice([](const TestDevice& device) {
    const auto s = SigmoidOf(device, {kInfinity, -kInfinity, kNaN, -kNaN, 3.4e38f, -3.4e38f, 1});
    EXPECT_EQ(s[0], 1.0f);
    EXPECT_TRUE(SameBits(s[1], 0.0f));
    EXPECT_TRUE(std::isnan(s[2]));
    EXPECT_TRUE(std::isnan(s[3]));
    EXPECT_EQ(s[4], 1.0f);
    EXPECT_TRUE(SameBits(s[5], 0.0f));
    EXPECT_FLOAT_EQ(s[6], 0.7310586f);  // not affected by its neighbours
  });
}

// Distance from the exact value in its ulps; the spacing of denormals is 2^-149.
double ErrorInUlps(float value, double exact) {
  int exponent = 0;
  std::frexp(exact, &exponent);
  return std::abs(value - exact) / std::ldexp(1.0, std::max(exponent - 24, -149));
}

// Every 1949th float, of either sign: 2.2 million on each target. (All of them: 1.97 ulp.) On a
// simulated device every 500,009th.
TEST(SigmoidScores, AreWithinTwoUlpsOfTheExactValueOnEveryTarget) {
  ForEachDevice(Simd::kAll, [](const TestDevice& device) {
    const uint32_t step = device.is_cpu() && !kSanitized ? 1949 : 500'009;
    std::vector<float> logits;
    for (uint32_t bits = 0; bits < std::bit_cast<uint32_t>(kInfinity); bits += step) {
      logits.push_back(std::bit_cast<float>(bits));
      logits.push_back(-logits.back());
    }
    logits.resize(logits.size() / 512 * 512);
    const auto rows = static_cast<int64_t>(logits.size()) / 512;
    const auto score = RunGate(device, kSigmoid, Matrix<float>::Of(rows, 512, logits), 1).score;
    double worst = 0;
    float worst_at = 0;
    for (size_t i = 0; i < logits.size(); ++i) {
      const double exact = 1 / (1 + std::exp(-double{logits[i]}));
      const auto at = static_cast<int64_t>(i);
      const double error = ErrorInUlps(score.at(at / 512, at % 512), exact);
      if (error <= worst) continue;
      worst = error;
      worst_at = logits[i];
    }
    EXPECT_LE(worst, 2) << "at " << worst_at;
  });
}

TEST(SigmoidScores, LogSumExpHasTheBitsOfASoftmaxAlsoWhereItIsNotFinite) {
  const int64_t tokens = 8, experts = 37;
  auto logits = Matrix<float>::Random(tokens, experts, 2, 3);
  logits.at(1, 5) = kInfinity;
  logits.at(2, 5) = kNaN;
  logits.at(3, 5) = -kInfinity;
  for (int64_t e = 0; e < experts; ++e) logits.at(4, e) = -kInfinity;
  ForEachDevice([&](const TestDevice& device) {
    const GateResult got = RunGate(device, kSigmoid, logits, 1);
    EXPECT_TRUE(SameNumbers(got.log_sum_exp, RunGate(device, kSoftmax, logits, 1).log_sum_exp));
    for (int64_t t = 0; t < tokens; ++t) {
      EXPECT_EQ(std::isnan(got.log_sum_exp[t]), t == 1 || t == 2 || t == 4) << t;
    }
    EXPECT_EQ(got.score(1, 5), 1);
    EXPECT_EQ(got.score(4, 5), 0);
  });
}

TEST(GateScores, ARowHasTheSameBitsAloneAndOnAnyNumberOfThreads) {
  const int64_t tokens = 700, experts = 37, k = 5;  // more rows than one task takes
  const auto logits = Matrix<float>::Random(tokens, experts, 4, 2);
  for (const GateRule& rule : {kSoftmax, kSigmoid}) {
    ForEachDevice([&](const TestDevice& device) {
      const GateResult all = RunGate(device, rule, logits, k);
      if (device.is_cpu()) {
        const GateResult serial = RunGate(TestDevice(Device()), rule, logits, k);
        EXPECT_TRUE(SameBits(all.score, serial.score));
        EXPECT_TRUE(SameBits(all.log_sum_exp, serial.log_sum_exp));
        EXPECT_TRUE(SameBits(all.expert, serial.expert));
        EXPECT_EQ(all.count, serial.count);
      }
      for (const int64_t t : {int64_t{0}, int64_t{255}, int64_t{256}, tokens - 1}) {
        const GateResult alone = RunGate(device, rule, logits.Rows(t, t + 1), k);
        EXPECT_TRUE(SameBits(alone.score, all.score, t));
        EXPECT_TRUE(SameBits(alone.expert, all.expert, t));
        EXPECT_TRUE(SameBits(alone.log_sum_exp[0], all.log_sum_exp[static_cast<size_t>(t)]));
      }
    });
  }
}

// Elements of a row's body are now in its tail.
TEST(SigmoidScores, SameBitsInBodyAndTail) {
  const int64_t tokens = 3, experts = 37;
  const auto logits = Matrix<float>::Random(tokens, experts, 3, 6);
  ForEachDevice([&](const TestDevice& device) {
    const GateResult all = RunGate(device, kSigmoid, logits, 1);
    for (const int64_t c : {1, 20, 29, 36}) {
      const GateResult got = RunGate(device, kSigmoid, logits.Cols(c, experts), 1);
      EXPECT_TRUE(SameBits(got.score, all.score.Cols(c, experts))) << c;
    }
  });
}

// Tokens with 0 to K slots; every third slot is dropped, with a d_weight of NaN.
struct Slots {
  Slots(int64_t tokens, int64_t experts, int32_t k) : top_k(k) {
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t slots = t == 0 ? k : t * 5 % (k + 1);
      for (int64_t j = 0; j < slots; ++j) {
        expert.push_back(static_cast<int32_t>((7 * t + 3 * j) % experts));
      }
      offset.push_back(static_cast<int64_t>(expert.size()));
    }
    d_weight = RandomFloats(static_cast<int64_t>(expert.size()), 2);
    for (size_t s = 0; s < expert.size(); ++s) {
      dropped.push_back(s % 3 == 2 ? 1 : 0);
      if (dropped[s] != 0) d_weight[s] = kNaN;
    }
  }

  int32_t top_k;
  std::vector<int64_t> offset = {0};
  std::vector<int32_t> expert;
  std::vector<uint8_t> dropped;
  std::vector<float> d_weight;
};

Matrix<float> Gradient(const TestDevice& device, const GateRule& rule, const Matrix<float>& score,
                       const Slots& slots, MatrixLayout out = {}) {
  const auto scores = device.Copy(score);
  const auto d_logits = device.Copy(Matrix<float>(score.rows(), score.cols(), out));
  const auto offset = device.Copy(slots.offset);
  const auto expert = device.Copy(slots.expert);
  const auto dropped = device.Copy(slots.dropped);
  const auto d_weight = device.Copy(slots.d_weight);
  EXPECT_OK(GateBackward(rule,
                         {.score = scores.view(),
                          .slot_offset = offset.span(),
                          .expert = expert.span(),
                          .dropped = dropped.span(),
                          .d_weight = d_weight.span(),
                          .top_k = slots.top_k},
                         d_logits.view(), device.stream()));
  return device.Read(d_logits);
}

TEST(GateBackwardTest, HandMadeGradients) {
  const auto score = Matrix<float>::Of(1, 3, {0.5f, 0.25f, 0.25f});
  Slots slots(0, 3, 2);
  slots.offset = {0, 2};
  slots.expert = {0, 2};
  slots.dropped = {0, 0};
  slots.d_weight = {1, 0};
  ForEachDevice([&](const TestDevice& device) {
    // d_p = (2, 0, 0), its mean 1.
    EXPECT_EQ(Gradient(device, {.scale = 2}, score, slots).values(),
              (std::vector<double>{0.5, -0.25, -0.25}));
    const GateRule sigmoid = {.score = ScoreFunction::kSigmoid, .scale = 2};
    EXPECT_EQ(Gradient(device, sigmoid, score, slots).values(), (std::vector<double>{0.5, 0, 0}));
    // S = 3/4, w = (2/3, 1/3): d_p = (4/9, 0, -8/9), its mean 0.
    const auto normalised = Gradient(device, {.weights = GateWeights::kNormalised}, score, slots);
    EXPECT_FLOAT_EQ(normalised.at(0, 0), 2.0f / 9);
    EXPECT_NEAR(normalised(0, 1), 0, 0x1p-53);  // the roundings of d_p remain
    EXPECT_FLOAT_EQ(normalised.at(0, 2), -2.0f / 9);
  });
}

// Scores are positive; those of token 1 have underflowed.
TEST(GateBackwardTest, HasTheBitsOfOneThreadForAnyWidthAndLayout) {
  const TestDevice one{Device()};
  const auto check = [&](const TestDevice& device, int64_t tokens, int64_t experts, int32_t k,
                         MatrixLayout in, MatrixLayout out) {
    const Slots slots(tokens, experts, k);
    auto score = Matrix<float>::Random(tokens, experts, in, 1);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t e = 0; e < experts; ++e) {
        score.at(t, e) = t == 1 ? 0.0f : score.at(t, e) * score.at(t, e) / 8;
      }
    }
    for (const ScoreFunction function : {ScoreFunction::kSoftmax, ScoreFunction::kSigmoid}) {
      for (const GateWeights weights : {GateWeights::kScores, GateWeights::kNormalised}) {
        const GateRule rule = {
            .score = function, .weights = weights, .scale = 2.5f, .epsilon = 0.25f};
        EXPECT_TRUE(
            SameBits(Gradient(device, rule, score, slots, out), Gradient(one, rule, score, slots)))
            << "E=" << experts << " K=" << k << " sigmoid " << (function == ScoreFunction::kSigmoid)
            << " normalised " << (weights == GateWeights::kNormalised);
      }
    }
  };
  ForEachDevice([&](const TestDevice& device) {
    for (const int64_t experts : {1, 7, 32, 130, 1030}) {
      // More tokens than a block's warps.
      check(device, 11, experts, static_cast<int32_t>(std::min<int64_t>(experts, 8)), kLayouts[0],
            kLayouts[1]);
    }
    for (const auto& [in, out] : kLayoutPairs) check(device, 11, 40, 3, in, out);
    check(device, 11, 64, 32, kLayouts[0], kLayouts[0]);
    check(device, 300, 16, 2, {}, {});
    check(device, 0, 5, 2, {}, {});
  });
}

}  // namespace
}  // namespace moe::testing
