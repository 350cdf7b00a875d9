// kernels/attention: rotary positions.
#include <cmath>
#include <string>

#include "kernels/attention/attention.h"
#include "tests/kernels/op_test.h"

namespace moe {
namespace {

using testing::kFloatRounding;
using testing::Matrix;
using testing::SameBits;
using testing::TestStream;

using Offsets = std::vector<int64_t>;

template <typename T>
absl::Status Rotate(int heads, const Offsets& offsets, RotaryDirection direction, Matrix<T>& x,
                    TestStream& stream, float base = 10000.0f) {
  Workspace workspace;
  return ApplyRotary<T>({.heads = heads, .sequence_offsets = offsets}, base, direction, x.view(),
                        workspace, *stream);
}

TEST(ApplyRotaryTest, TurnsThePairByThePositionInItsSequence) {
  TestStream stream;
  Matrix<float> x(4, 2);
  for (int64_t t = 0; t < 4; ++t) x.at(t, 0) = 1;
  ASSERT_TRUE(Rotate(1, {0, 3, 4}, RotaryDirection::kForward, x, stream).ok());
  EXPECT_EQ(x(0, 0), 1);
  EXPECT_EQ(x(0, 1), 0);
  EXPECT_FLOAT_EQ(x.at(2, 0), std::cos(2.0f));
  EXPECT_FLOAT_EQ(x.at(2, 1), std::sin(2.0f));
  EXPECT_EQ(x(3, 0), 1);  // the next sequence starts at position 0
}

// cos, sin, two products and a sum: 4 roundings of |a| + |b|.
TEST(ApplyRotaryTest, MatchesFloat64AndItsInverse) {
  TestStream stream;
  const Offsets offsets = {0, 1, 1, 300, 350};
  for (const int64_t depth : {2, 6, 32, 64}) {
    for (const float base : {10000.0f, 500.0f}) {
      const auto x = Matrix<float>::Random(350, 3 * depth, 1);
      Matrix<float> y = x;
      ASSERT_TRUE(Rotate(3, offsets, RotaryDirection::kForward, y, stream, base).ok());
      EXPECT_TRUE(y.edges_intact());
      for (int64_t t = 0; t < 350; ++t) {
        const int64_t position = t < 1 ? 0 : t < 300 ? t - 1 : t - 300;
        for (int64_t head = 0; head < 3; ++head) {
          for (int64_t d = 0; d < depth / 2; ++d) {
            const int64_t first = head * depth + d, second = first + depth / 2;
            const double angle = static_cast<double>(position) *
                                 std::pow(base, -2.0 * static_cast<double>(d) / double(depth));
            const double a = x(t, first), b = x(t, second);
            const double tolerance = 4 * kFloatRounding * (std::abs(a) + std::abs(b));
            ASSERT_NEAR(y(t, first), a * std::cos(angle) - b * std::sin(angle), tolerance);
            ASSERT_NEAR(y(t, second), b * std::cos(angle) + a * std::sin(angle), tolerance);
          }
        }
      }
      ASSERT_TRUE(Rotate(3, offsets, RotaryDirection::kBackward, y, stream, base).ok());
      for (int64_t t = 0; t < 350; ++t) {
        for (int64_t c = 0; c < 3 * depth; ++c) {
          ASSERT_NEAR(y(t, c), x(t, c), 8 * kFloatRounding * 10);  // |a| + |b| < 10
        }
      }
    }
  }
}

TEST(ApplyRotaryTest, ARowHasTheSameBitsInAnyBatchAndOnAnyNumberOfThreads) {
  const Offsets offsets = {0, 120, 400};
  const auto x = Matrix<float>::Random(400, 72, 2);
  TestStream one;
  Matrix<float> expected = x;
  ASSERT_TRUE(Rotate(4, offsets, RotaryDirection::kForward, expected, one).ok());
  for (const int threads : {2, 3}) {
    TestStream stream(threads);
    Matrix<float> y = x;
    ASSERT_TRUE(Rotate(4, offsets, RotaryDirection::kForward, y, stream).ok());
    EXPECT_TRUE(SameBits(y, expected));
  }
  Matrix<float> second(280, 72);
  for (int64_t t = 0; t < 280; ++t) {
    for (int64_t c = 0; c < 72; ++c) second.at(t, c) = x.at(120 + t, c);
  }
  ASSERT_TRUE(Rotate(4, {0, 280}, RotaryDirection::kForward, second, one).ok());
  EXPECT_TRUE(SameBits(second, expected, 120));
}

TEST(ApplyRotaryTest, BFloat16IsTheFloat32ResultRoundedOnce) {
  TestStream stream;
  auto x = Matrix<BFloat16>::Random(30, 40, 3);
  auto x32 = x.As<float>();
  ASSERT_TRUE(Rotate(2, {0, 30}, RotaryDirection::kForward, x, stream).ok());
  ASSERT_TRUE(Rotate(2, {0, 30}, RotaryDirection::kForward, x32, stream).ok());
  EXPECT_TRUE(SameBits(x, x32.As<BFloat16>()));
}

TEST(ApplyRotaryTest, RefusesOddHeadsAndOffsetsThatMissRows) {
  TestStream stream;
  Matrix<float> x(3, 6), none(0, 6);
  EXPECT_EQ(testing::Message(Rotate(2, {0, 3}, RotaryDirection::kForward, x, stream)),
            "ApplyRotary: head size 3, base 10000, expected an even one and base > 0");
  EXPECT_EQ(Rotate(1, {0, 3}, RotaryDirection::kForward, x, stream, 0.0f).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Rotate(1, {0, 2}, RotaryDirection::kForward, x, stream).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Rotate(4, {0, 3}, RotaryDirection::kForward, x, stream).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(Rotate(1, {0, 0}, RotaryDirection::kForward, none, stream).ok());
  EXPECT_TRUE(Rotate(1, {0, 3}, RotaryDirection::kForward, x, stream).ok());
}

}  // namespace
}  // namespace moe
