// kernels/topk_gate: softmax and sigmoid scores and log_sum_exp, on every device.
#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include <gmock/gmock.h>

#include "tests/kernels/gate_run.h"

namespace moe {
namespace {

using ::testing::ElementsAre;
using testing::ForEachDevice;
using testing::GateResult;
using testing::kFloatRounding;
using testing::kInfinity;
using testing::kNaN;
using testing::Matrix;
using testing::MatrixLayout;
using testing::RunGate;
using testing::SameBits;
using testing::SameNumbers;
using testing::TestDevice;

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
    for (int64_t e = 0; e < 4; ++e) EXPECT_GT(r.score(1, e), 0) << e;  // not touched by it
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

// With u = 2^-24: x - m errs by |x - m| u, exp by 1 ulp = 2u, on a GPU by 2, each of the at most
// E/16 + 4 additions by u, the division by u; the sum inherits the worst term's error. Sigmoids are
// at most 2 floats from the exact value's nearest.
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
    for (const auto& [in, out] : testing::kLayoutPairs) check(40, in, out);
  });
}

// The order of the contract. A simulated device has the host's exponential, and its bits.
TEST(SoftmaxScores, HaveTheBitsOfThePlainLoopsOnASimulatedDevice) {
  ForEachDevice([](const TestDevice& device) {
    if (device.is_cpu() || !device.has_host_math()) return;
    for (const int64_t experts : {1, 7, 16, 17, 33, 64, 129, 257, 1000, 1024}) {
      for (const auto& logits :
           {testing::WithTies(11, experts, {}, 2), Matrix<float>::Random(11, experts, {}, 3, 3)}) {
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

TEST(SigmoidScores, HandMadeValues) {
  ForEachDevice([](const TestDevice& device) {
    const auto s =
        SigmoidOf(device, {0, std::log(3.0f), -std::log(3.0f), -0.0f, 17.4f, -100, 17.2f});
    EXPECT_EQ(s[0], 0.5f);
    EXPECT_FLOAT_EQ(s[1], 0.75f);
    EXPECT_FLOAT_EQ(s[2], 0.25f);
    EXPECT_EQ(s[3], 0.5f);
    EXPECT_EQ(s[4], 1.0f);
    EXPECT_NEAR(s[5], 3.72e-44, 2 * 0x1p-149);  // a denormal number, not 0
    EXPECT_EQ(s[6], 1 - 0x1p-24f);
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
    EXPECT_FLOAT_EQ(s[6], 0.7310586f);  // its neighbours do not touch it
  });
}

// Distance from the exact value in its ulps; the spacing of denormals is 2^-149.
double ErrorInUlps(float value, double exact) {
  int exponent = 0;
  std::frexp(exact, &exponent);
  return std::abs(value - exact) / std::ldexp(1.0, std::max(exponent - 24, -149));
}

// Every 1949th float, of either sign: 2.2 million on each target. (All of them: 1.97 ulp.) Of a
// simulated device every 500,009th.
TEST(SigmoidScores, AreWithinTwoUlpsOfTheExactValueOnEveryTarget) {
  ForEachDevice(
      [](const TestDevice& device) {
        const uint32_t step = device.is_cpu() && !testing::kSanitized ? 1949 : 500'009;
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
      },
      testing::Simd::kAll);
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
        Matrix<float> row(1, experts);
        std::copy_n(logits.view().row(t), experts, row.view().row(0));
        const GateResult alone = RunGate(device, rule, row, k);
        EXPECT_TRUE(SameBits(alone.score, all.score, t));
        EXPECT_TRUE(SameBits(alone.expert, all.expert, t));
        EXPECT_TRUE(SameBits(alone.log_sum_exp[0], all.log_sum_exp[static_cast<size_t>(t)]));
      }
    });
  }
}

// What was in the body of a row is now in its tail.
TEST(SigmoidScores, SameBitsInBodyAndTail) {
  const int64_t tokens = 3, experts = 37;
  const auto logits = Matrix<float>::Random(tokens, experts, 3, 6);
  ForEachDevice([&](const TestDevice& device) {
    const GateResult all = RunGate(device, kSigmoid, logits, 1);
    for (const int64_t c : {1, 20, 29, 36}) {
      Matrix<float> part(tokens, experts - c);
      for (int64_t t = 0; t < tokens; ++t) {
        std::copy_n(logits.view().row(t) + c, experts - c, part.view().row(t));
      }
      const GateResult got = RunGate(device, kSigmoid, part, 1);
      for (int64_t i = 0; i < tokens * (experts - c); ++i) {
        const int64_t t = i / (experts - c), e = i % (experts - c);
        ASSERT_TRUE(SameBits(got.score.at(t, e), all.score.at(t, c + e))) << t << " " << e;
      }
    }
  });
}

}  // namespace
}  // namespace moe
