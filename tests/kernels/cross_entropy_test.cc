// kernels/cross_entropy: losses and their gradients.
#include "kernels/cross_entropy/cross_entropy.h"

#include <cmath>
#include <string>

#include "tests/kernels/gradcheck.h"
#include "tests/kernels/op_test.h"

namespace moe {
namespace {

using testing::kFloatRounding;
using testing::Matrix;
using testing::SameBits;
using testing::TestStream;

double ReferenceLoss(const double* logits, int64_t n, int64_t target) {
  double max = -HUGE_VAL, sum = 0;
  for (int64_t v = 0; v < n; ++v) max = std::max(max, logits[v]);
  for (int64_t v = 0; v < n; ++v) sum += std::exp(logits[v] - max);
  return max + std::log(sum) - logits[target];
}

std::vector<int32_t> Targets(int64_t tokens, int64_t vocabulary) {
  std::vector<int32_t> target;
  for (int64_t t = 0; t < tokens; ++t) target.push_back(static_cast<int32_t>(t * 7 % vocabulary));
  return target;
}

template <typename T = float>
absl::Status Compute(const Matrix<float>& logits, const std::vector<int32_t>& target, float scale,
                     std::vector<float>& loss, Matrix<T>& d_logits, TestStream& stream) {
  return CrossEntropy<T>(logits.view(), target, scale, absl::MakeSpan(loss), d_logits.view(),
                         *stream);
}

TEST(CrossEntropyTest, EqualLogitsByHand) {
  TestStream stream;
  const Matrix<float> logits(1, 4, 3.0f);
  Matrix<float> d_logits(1, 4);
  std::vector<float> loss(1);
  ASSERT_TRUE(Compute(logits, {2}, 0.5f, loss, d_logits, stream).ok());
  EXPECT_FLOAT_EQ(loss[0], std::log(4.0f));
  EXPECT_EQ(d_logits.values(), (std::vector<double>{0.125, 0.125, -0.375, 0.125}));
}

// The loss is log(sum) - (x_target - max). The sum has 2 roundings for each exp, up to 16 for the
// difference in its exponent (|x - max| < 16), and n / 16 + 4 for the additions; both terms of the
// loss are below 16.
TEST(CrossEntropyTest, LossMatchesFloat64) {
  TestStream stream;
  for (const int64_t n : {1, 2, 15, 16, 17, 40, 257}) {
    const auto logits = Matrix<float>::Random(6, n, 1, 2);
    const auto target = Targets(6, n);
    std::vector<float> loss(6);
    Matrix<float> d_logits(6, n);
    ASSERT_TRUE(Compute(logits, target, 1.0f, loss, d_logits, stream).ok());
    EXPECT_TRUE(d_logits.edges_intact());
    const auto x = logits.values();
    const double roundings = 18 + static_cast<double>(n) / 16 + 4 + 3 * 16;
    for (int64_t t = 0; t < 6; ++t) {
      EXPECT_NEAR(loss[t], ReferenceLoss(x.data() + t * n, n, target[t]),
                  roundings * kFloatRounding);
    }
    // Without gradients: the same losses.
    std::vector<float> alone(6);
    ASSERT_TRUE(
        CrossEntropy<float>(logits.view(), target, 1.0f, absl::MakeSpan(alone), {}, *stream).ok());
    EXPECT_TRUE(SameBits(alone, loss));
  }
}

// Probabilities have a relative error below 18 + 18 + n / 16 + 8 roundings (see above); p - 1 is
// below 1.
TEST(CrossEntropyTest, GradientMatchesFiniteDifferences) {
  TestStream stream;
  const int64_t n = 37;
  const float scale = 0.25f;
  const auto logits = Matrix<float>::Random(3, n, 2, 2);
  const auto target = Targets(3, n);
  std::vector<float> loss(3);
  Matrix<float> d_logits(3, n);
  ASSERT_TRUE(Compute(logits, target, scale, loss, d_logits, stream).ok());
  const auto total = [&](const std::vector<double>& x) {
    double sum = 0;
    for (int64_t t = 0; t < 3; ++t) sum += ReferenceLoss(x.data() + t * n, n, target[t]);
    return double{scale} * sum;
  };
  testing::ExpectGradient(total, logits.values(), d_logits.values(),
                          double{scale} * 48 * kFloatRounding, "d_logits");
}

TEST(CrossEntropyTest, ARowHasTheSameBitsInAnyBatchInPlaceAndOnAnyNumberOfThreads) {
  const int64_t rows = 200, n = 101;
  const auto logits = Matrix<float>::Random(rows, n, 3, 4);
  const auto target = Targets(rows, n);
  std::vector<float> loss(static_cast<size_t>(rows));
  Matrix<float> d_logits(rows, n);
  TestStream one;
  ASSERT_TRUE(Compute(logits, target, 0.01f, loss, d_logits, one).ok());
  for (const int threads : {1, 2, 3}) {
    TestStream stream(threads);
    Matrix<float> in_place = logits;
    std::vector<float> loss2(static_cast<size_t>(rows));
    ASSERT_TRUE(Compute(in_place, target, 0.01f, loss2, in_place, stream).ok());
    EXPECT_TRUE(SameBits(in_place, d_logits));
    EXPECT_TRUE(SameBits(loss2, loss));
  }
  Matrix<float> row(1, n);
  std::vector<float> row_loss(1);
  ASSERT_TRUE(CrossEntropy<float>(logits.view(77, 78), {target[77]}, 0.01f,
                                  absl::MakeSpan(row_loss), row.view(), *one)
                  .ok());
  EXPECT_TRUE(SameBits(row, d_logits, 77));
  EXPECT_TRUE(SameBits(row_loss[0], loss[77]));
}

TEST(CrossEntropyTest, BFloat16GradientIsTheFloat32OneRoundedOnce) {
  TestStream stream;
  const auto logits = Matrix<float>::Random(4, 35, 4, 2);
  std::vector<float> loss(4), loss16(4);
  Matrix<float> d_logits(4, 35);
  Matrix<BFloat16> d_logits16(4, 35);
  ASSERT_TRUE(Compute(logits, Targets(4, 35), 0.25f, loss, d_logits, stream).ok());
  ASSERT_TRUE(Compute(logits, Targets(4, 35), 0.25f, loss16, d_logits16, stream).ok());
  EXPECT_TRUE(SameBits(d_logits16, d_logits.As<BFloat16>()));
  EXPECT_TRUE(SameBits(loss16, loss));
}

TEST(CrossEntropyTest, LargeLogitsDoNotOverflowAndNonFiniteOnesShow) {
  TestStream stream;
  for (const int64_t at : {0, 16, 18}) {  // body and tail
    Matrix<float> logits(1, 19), d_logits(1, 19);
    std::vector<float> loss(1);
    logits.at(0, at) = 1e30f;
    ASSERT_TRUE(Compute(logits, {1}, 1.0f, loss, d_logits, stream).ok());
    EXPECT_EQ(loss[0], 1e30f);
    EXPECT_EQ(d_logits(0, at), 1);
    EXPECT_EQ(d_logits(0, 1), -1);
    for (const float bad : {testing::kNaN, testing::kInfinity}) {
      logits.at(0, at) = bad;
      ASSERT_TRUE(Compute(logits, {1}, 1.0f, loss, d_logits, stream).ok());
      EXPECT_FALSE(std::isfinite(loss[0])) << bad;
      EXPECT_TRUE(std::isnan(d_logits(0, 1))) << bad;
    }
  }
}

TEST(CrossEntropyTest, RefusesTargetsOutOfRangeAndOtherShapes) {
  TestStream stream;
  const Matrix<float> logits(2, 5);
  Matrix<float> d_logits(2, 5), wrong(3, 5);
  std::vector<float> loss(2), short_loss(1);
  EXPECT_EQ(testing::Message(Compute(logits, {0, 5}, 1, loss, d_logits, stream)),
            "CrossEntropy: target[1] is 5, expected 0 to 4");
  EXPECT_EQ(testing::Message(Compute(logits, {-1, 0}, 1, loss, d_logits, stream)),
            "CrossEntropy: target[0] is -1, expected 0 to 4");
  EXPECT_EQ(testing::Message(Compute(logits, {0}, 1, loss, d_logits, stream)),
            "CrossEntropy: target is [1], expected [2]");
  EXPECT_EQ(testing::Message(Compute(logits, {0, 1}, 1, short_loss, d_logits, stream)),
            "CrossEntropy: loss is [1], expected [2]");
  EXPECT_EQ(Compute(logits, {0, 1}, 1, loss, wrong, stream).code(),
            absl::StatusCode::kInvalidArgument);
  Matrix<float> none(0, 5);
  std::vector<float> no_loss;
  EXPECT_TRUE(Compute(none, {}, 1, no_loss, none, stream).ok());
}

}  // namespace
}  // namespace moe
