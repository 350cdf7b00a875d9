// kernels/topk_gate: sigmoid scores.
#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/topk_gate/gate_rows.h"
#include "kernels/topk_gate/topk_gate.h"
#include "tests/kernels/op_test.h"

namespace moe {
namespace {

using testing::kFloatRounding;
using testing::kInfinity;
using testing::kNaN;
using testing::Matrix;
using testing::SameBits;
using testing::SimdTarget;
using testing::TestStream;

std::vector<float> Scores(std::vector<float> logits) {
  TestStream stream;
  std::vector<float> score(logits.size());
  const auto n = static_cast<int64_t>(logits.size());
  EXPECT_TRUE(SigmoidScores({logits.data(), 1, n}, {score.data(), 1, n}, {}, *stream).ok());
  return score;
}

// Distance from the exact value in its ulps; the spacing of denormals is 2^-149.
double ErrorInUlps(float value, double exact) {
  int exponent = 0;
  std::frexp(exact, &exponent);
  return std::abs(value - exact) / std::ldexp(1.0, std::max(exponent - 24, -149));
}

TEST(SigmoidScoresTest, HandMadeValues) {
  const auto s = Scores({0, std::log(3.0f), -std::log(3.0f), -0.0f, 17.4f, -100, 17.2f});
  EXPECT_EQ(s[0], 0.5f);
  EXPECT_FLOAT_EQ(s[1], 0.75f);
  EXPECT_FLOAT_EQ(s[2], 0.25f);
  EXPECT_EQ(s[3], 0.5f);
  EXPECT_EQ(s[4], 1.0f);
  EXPECT_NEAR(s[5], 3.72e-44, 2 * 0x1p-149);  // a denormal number, not 0
  EXPECT_EQ(s[6], 1 - 0x1p-24f);
}

TEST(SigmoidScoresTest, InfinitiesSaturateAndNaNStays) {
  const auto s = Scores({kInfinity, -kInfinity, kNaN, -kNaN, 3.4e38f, -3.4e38f, 1});
  EXPECT_EQ(s[0], 1.0f);
  EXPECT_TRUE(SameBits(s[1], 0.0f));
  EXPECT_TRUE(std::isnan(s[2]));
  EXPECT_TRUE(std::isnan(s[3]));
  EXPECT_EQ(s[4], 1.0f);
  EXPECT_TRUE(SameBits(s[5], 0.0f));
  EXPECT_FLOAT_EQ(s[6], 0.7310586f);  // its neighbours do not touch it
}

// Every kStride-th float, of either sign: 2.2 million on each target. (All of them: 1.97 ulp.)
TEST(SigmoidScoresTest, IsWithinTwoUlpsOfTheExactValueOnEveryTarget) {
  constexpr uint32_t kStride = 1949;
  const auto last = std::bit_cast<uint32_t>(kInfinity);
  std::vector<float> logits;
  for (uint32_t bits = 0; bits < last; bits += kStride) {
    logits.push_back(std::bit_cast<float>(bits));
    logits.push_back(-logits.back());
  }
  for (const std::string& target : gemm::SimdTargets()) {
    const SimdTarget use(target);
    const auto score = Scores(logits);
    double worst = 0;
    float worst_at = 0;
    for (size_t i = 0; i < logits.size(); ++i) {
      const double exact = 1 / (1 + std::exp(-double{logits[i]}));
      const double error = ErrorInUlps(score[i], exact);
      if (error <= worst) continue;
      worst = error;
      worst_at = logits[i];
    }
    EXPECT_LE(worst, 2) << target << " at " << worst_at;
  }
}

// Scores: 2 ulps of the exact value are at most 2 floats from the nearest. log_sum_exp: the bound
// of topk_gate_test for both.
TEST(SigmoidScoresTest, IsTheReferenceWithinRoundingForAnyNumberOfExperts) {
  TestStream stream;
  for (const int64_t experts : {1, 2, 7, 15, 16, 17, 31, 64, 65, 1000}) {
    SCOPED_TRACE(experts);
    const int64_t tokens = 6;
    const auto logits = Matrix<float>::Random(tokens, experts, 1, 4);
    Matrix<float> score(tokens, experts), expected(tokens, experts);
    std::vector<float> lse(tokens), expected_lse(tokens);
    ASSERT_TRUE(SigmoidScores(logits.view(), score.view(), absl::MakeSpan(lse), *stream).ok());
    SigmoidScoresReference(logits.view(), expected.view(), absl::MakeSpan(expected_lse), 0, tokens);
    EXPECT_TRUE(score.edges_intact());
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t e = 0; e < experts; ++e) {
        EXPECT_LE(std::abs(std::bit_cast<int32_t>(score.at(t, e)) -
                           std::bit_cast<int32_t>(expected.at(t, e))),
                  2);
      }
      const double rounding = 2 * 32 + 9 + static_cast<double>(experts) / 16;  // |x - max| < 32
      EXPECT_NEAR(lse[t], expected_lse[t],
                  2 * (rounding + std::abs(expected_lse[t])) * kFloatRounding);
    }
  }
}

TEST(SigmoidScoresTest, LogSumExpHasTheBitsOfTopKGateAlsoWhereItIsNotFinite) {
  const int64_t tokens = 8, experts = 37;
  auto logits = Matrix<float>::Random(tokens, experts, 2, 3);
  logits.at(1, 5) = kInfinity;
  logits.at(2, 5) = kNaN;
  logits.at(3, 5) = -kInfinity;
  for (int64_t e = 0; e < experts; ++e) logits.at(4, e) = -kInfinity;
  Matrix<float> score(tokens, experts), probs(tokens, experts), value(tokens, 1);
  std::vector<float> lse(tokens), gate_lse(tokens);
  std::vector<int32_t> expert(tokens);
  std::vector<int64_t> count(experts);
  TestStream stream;
  ASSERT_TRUE(SigmoidScores(logits.view(), score.view(), absl::MakeSpan(lse), *stream).ok());
  ASSERT_TRUE(TopKGate(logits.view(),
                       {.probs = probs.view(),
                        .expert = {expert.data(), tokens, 1},
                        .value = value.view(),
                        .log_sum_exp = absl::MakeSpan(gate_lse),
                        .count = absl::MakeSpan(count)},
                       *stream)
                  .ok());
  for (int64_t t = 0; t < tokens; ++t) {
    EXPECT_EQ(std::isnan(lse[t]), t == 1 || t == 2 || t == 4) << t;
    if (std::isnan(lse[t])) {
      EXPECT_TRUE(std::isnan(gate_lse[t])) << t;
      continue;
    }
    EXPECT_TRUE(SameBits(lse[t], gate_lse[t])) << t;
  }
  EXPECT_EQ(score(1, 5), 1);
  EXPECT_EQ(score(4, 5), 0);
}

TEST(SigmoidScoresTest, SameBitsForAnyNumberOfRowsAndThreadsInBodyAndTail) {
  const int64_t tokens = 700, experts = 37;  // more rows than one task takes
  const auto logits = Matrix<float>::Random(tokens, experts, 3, 6);
  TestStream one, three(3);
  Matrix<float> score(tokens, experts), threaded(tokens, experts);
  std::vector<float> lse(tokens), threaded_lse(tokens);
  ASSERT_TRUE(SigmoidScores(logits.view(), score.view(), absl::MakeSpan(lse), *one).ok());
  ASSERT_TRUE(
      SigmoidScores(logits.view(), threaded.view(), absl::MakeSpan(threaded_lse), *three).ok());
  EXPECT_TRUE(SameBits(score, threaded));
  EXPECT_TRUE(SameBits(lse, threaded_lse));
  for (const int64_t t : {int64_t{0}, int64_t{255}, int64_t{256}, tokens - 1}) {
    Matrix<float> alone(1, experts);
    float alone_lse = 0;
    ASSERT_TRUE(
        SigmoidScores(logits.view(t, t + 1), alone.view(), absl::MakeSpan(&alone_lse, 1), *one)
            .ok());
    EXPECT_TRUE(SameBits(alone, score, t));
    EXPECT_TRUE(SameBits(alone_lse, lse[static_cast<size_t>(t)]));
  }
  for (const int64_t c : {1, 20, 29, 36}) {  // what was in the body of a row is now in its tail
    Matrix<float> part(tokens, experts);
    ASSERT_TRUE(SigmoidScores(ColumnRange(logits.view(), c, experts),
                              ColumnRange(part.view(), c, experts), {}, *one)
                    .ok());
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t e = c; e < experts; ++e) {
        ASSERT_TRUE(SameBits(part.at(t, e), score.at(t, e))) << t << " " << e;
      }
      ASSERT_EQ(part.at(t, 0), 0.0f);
    }
  }
}

TEST(SigmoidScoresTest, RefusesShapesThatDisagreeAndTakesNoTokens) {
  TestStream stream;
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
