// kernels/topk_gate: sigmoid scores, on every device.
#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/topk_gate/gate_rows.h"
#include "kernels/topk_gate/topk_gate.h"
#include "tests/kernels/device_memory.h"

namespace moe {
namespace {

using testing::ForEachDevice;
using testing::kFloatRounding;
using testing::kInfinity;
using testing::kNaN;
using testing::Matrix;
using testing::MatrixLayout;
using testing::SameBits;
using testing::Simd;
using testing::TestDevice;

struct Result {
  Matrix<float> score;
  std::vector<float> log_sum_exp;
};

Result Sigmoid(const TestDevice& device, const Matrix<float>& logits, MatrixLayout out = {}) {
  const auto in = device.Copy(logits);
  const auto score = device.Copy(Matrix<float>(logits.rows(), logits.cols(), out));
  const auto lse = device.Copy(std::vector<float>(size_t(logits.rows())));
  EXPECT_TRUE(SigmoidScores(in.view(), score.view(), lse.span(), device.stream()).ok());
  return {device.Read(score), device.Read(lse)};
}

std::vector<float> Scores(const TestDevice& device, const std::vector<float>& logits) {
  const auto n = static_cast<int64_t>(logits.size());
  const Matrix<float> score = Sigmoid(device, Matrix<float>::Of(1, n, logits)).score;
  return {score.view().row(0), score.view().row(0) + n};
}

// Distance from the exact value in its ulps; the spacing of denormals is 2^-149.
double ErrorInUlps(float value, double exact) {
  int exponent = 0;
  std::frexp(exact, &exponent);
  return std::abs(value - exact) / std::ldexp(1.0, std::max(exponent - 24, -149));
}

TEST(SigmoidScoresTest, HandMadeValues) {
  ForEachDevice([](const TestDevice& device) {
    const auto s = Scores(device, {0, std::log(3.0f), -std::log(3.0f), -0.0f, 17.4f, -100, 17.2f});
    EXPECT_EQ(s[0], 0.5f);
    EXPECT_FLOAT_EQ(s[1], 0.75f);
    EXPECT_FLOAT_EQ(s[2], 0.25f);
    EXPECT_EQ(s[3], 0.5f);
    EXPECT_EQ(s[4], 1.0f);
    EXPECT_NEAR(s[5], 3.72e-44, 2 * 0x1p-149);  // a denormal number, not 0
    EXPECT_EQ(s[6], 1 - 0x1p-24f);
  });
}

TEST(SigmoidScoresTest, InfinitiesSaturateAndNaNStays) {
  ForEachDevice([](const TestDevice& device) {
    const auto s = Scores(device, {kInfinity, -kInfinity, kNaN, -kNaN, 3.4e38f, -3.4e38f, 1});
    EXPECT_EQ(s[0], 1.0f);
    EXPECT_TRUE(SameBits(s[1], 0.0f));
    EXPECT_TRUE(std::isnan(s[2]));
    EXPECT_TRUE(std::isnan(s[3]));
    EXPECT_EQ(s[4], 1.0f);
    EXPECT_TRUE(SameBits(s[5], 0.0f));
    EXPECT_FLOAT_EQ(s[6], 0.7310586f);  // its neighbours do not touch it
  });
}

// Every 1949th float, of either sign: 2.2 million on each target. (All of them: 1.97 ulp.) Of a
// simulated device every 500,009th.
TEST(SigmoidScoresTest, IsWithinTwoUlpsOfTheExactValueOnEveryTarget) {
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
        const Matrix<float> score = Sigmoid(device, Matrix<float>::Of(rows, 512, logits)).score;
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
      Simd::kAll);
}

// Scores: 2 ulps of the exact value are at most 2 floats from the nearest. log_sum_exp: the bound
// of topk_gate_test for both.
TEST(SigmoidScoresTest, IsTheReferenceWithinRoundingForAnyNumberOfExpertsAndLayout) {
  ForEachDevice([](const TestDevice& device) {
    const auto check = [&](int64_t experts, MatrixLayout in, MatrixLayout out) {
      SCOPED_TRACE(experts);
      const int64_t tokens = 6;
      const auto logits = Matrix<float>::Random(tokens, experts, in, 1, 4);
      const Result got = Sigmoid(device, logits, out);
      Matrix<float> expected(tokens, experts);
      std::vector<float> lse(tokens);
      SigmoidScoresReference(logits.view(), expected.view(), absl::MakeSpan(lse), 0, tokens);
      EXPECT_TRUE(got.score.edges_intact());
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t e = 0; e < experts; ++e) {
          EXPECT_LE(std::abs(std::bit_cast<int32_t>(got.score.at(t, e)) -
                             std::bit_cast<int32_t>(expected.at(t, e))),
                    2);
        }
        const double rounding = 2 * 32 + 9 + static_cast<double>(experts) / 16;  // |x - max| < 32
        EXPECT_NEAR(got.log_sum_exp[t], lse[t], 2 * (rounding + std::abs(lse[t])) * kFloatRounding);
      }
    };
    for (const int64_t experts : {1, 2, 7, 15, 16, 17, 31, 64, 65, 257, 1000}) {
      check(experts, {}, {});
    }
    for (const auto& [in, out] : testing::kLayoutPairs) check(40, in, out);
  });
}

TEST(SigmoidScoresTest, LogSumExpHasTheBitsOfTopKGateAlsoWhereItIsNotFinite) {
  const int64_t tokens = 8, experts = 37;
  auto logits = Matrix<float>::Random(tokens, experts, 2, 3);
  logits.at(1, 5) = kInfinity;
  logits.at(2, 5) = kNaN;
  logits.at(3, 5) = -kInfinity;
  for (int64_t e = 0; e < experts; ++e) logits.at(4, e) = -kInfinity;
  ForEachDevice([&](const TestDevice& device) {
    const auto in = device.Copy(logits), probs = device.Copy(Matrix<float>(tokens, experts));
    const auto value = device.Copy(Matrix<float>(tokens, 1));
    const auto expert = device.Copy(Matrix<int32_t>(tokens, 1));
    const auto lse = device.Copy(std::vector<float>(tokens));
    const auto count = device.Copy(std::vector<int64_t>(experts));
    ASSERT_TRUE(TopKGate(in.view(),
                         {.probs = probs.view(),
                          .expert = expert.view(),
                          .value = value.view(),
                          .log_sum_exp = lse.span(),
                          .count = count.span()},
                         device.stream())
                    .ok());
    const Result got = Sigmoid(device, logits);
    EXPECT_TRUE(testing::SameNumbers(got.log_sum_exp, device.Read(lse)));
    for (int64_t t = 0; t < tokens; ++t) {
      EXPECT_EQ(std::isnan(got.log_sum_exp[t]), t == 1 || t == 2 || t == 4) << t;
    }
    EXPECT_EQ(got.score(1, 5), 1);
    EXPECT_EQ(got.score(4, 5), 0);
  });
}

TEST(SigmoidScoresTest, SameBitsForAnyNumberOfRowsAndThreadsInBodyAndTail) {
  const int64_t tokens = 700, experts = 37;  // more rows than one task takes
  const auto logits = Matrix<float>::Random(tokens, experts, 3, 6);
  ForEachDevice([&](const TestDevice& device) {
    const Result all = Sigmoid(device, logits);
    if (device.is_cpu()) {
      const Result serial = Sigmoid(TestDevice(Device()), logits);
      EXPECT_TRUE(SameBits(all.score, serial.score));
      EXPECT_TRUE(SameBits(all.log_sum_exp, serial.log_sum_exp));
    }
    for (const int64_t t : {int64_t{0}, int64_t{255}, int64_t{256}, tokens - 1}) {
      Matrix<float> row(1, experts);
      std::copy_n(logits.view().row(t), experts, row.view().row(0));
      const Result alone = Sigmoid(device, row);
      EXPECT_TRUE(SameBits(alone.score, all.score, t));
      EXPECT_TRUE(SameBits(alone.log_sum_exp[0], all.log_sum_exp[static_cast<size_t>(t)]));
    }
    const auto in = device.Copy(logits);
    for (const int64_t c : {1, 20, 29, 36}) {  // what was in the body of a row is now in its tail
      const auto part = device.Copy(Matrix<float>(tokens, experts));
      ASSERT_TRUE(SigmoidScores(ColumnRange(MatrixView<const float>(in.view()), c, experts),
                                ColumnRange(part.view(), c, experts), {}, device.stream())
                      .ok());
      const Matrix<float> got = device.Read(part);
      for (int64_t i = 0; i < tokens * experts; ++i) {
        const int64_t t = i / experts, e = i % experts;
        ASSERT_TRUE(SameBits(got.at(t, e), e < c ? 0.0f : all.score.at(t, e))) << t << " " << e;
      }
    }
  });
}

TEST(SigmoidScoresTest, RefusesShapesThatDisagreeAndTakesNoTokens) {
  testing::TestStream stream;
  Matrix<float> logits(2, 3), none(0, 3);
  std::vector<float> out(8);
  const auto message = [&](MatrixView<const float> in, MatrixView<float> score, size_t sums) {
    const absl::Status status = SigmoidScores(in, score, absl::MakeSpan(out).first(sums), *stream);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return testing::Message(status);
  };
  EXPECT_EQ(message({nullptr, 2, 0}, {out.data(), 2, 0}, 0),
            "SigmoidScores: logits are [2, 0], expected at least one expert");
  EXPECT_EQ(message(logits.view(), {out.data(), 2, 2}, 0),
            "SigmoidScores: score is [2, 2] with stride 2, expected [2, 3]");
  EXPECT_EQ(message(logits.view(), {out.data(), 2, 3}, 1),
            "SigmoidScores: log_sum_exp is [1], expected [2]");
  EXPECT_EQ(message({out.data(), 2, 3, 1}, logits.view(), 0),
            "SigmoidScores: logits is [2, 3] with stride 1, expected [2, 3]");
  EXPECT_TRUE(SigmoidScores(none.view(), none.view(), {}, *stream).ok());
  EXPECT_TRUE(none.edges_intact());
}

}  // namespace
}  // namespace moe
