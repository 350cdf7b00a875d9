// kernels/adamw: one step, bit for bit.
#include "kernels/adamw/adamw.h"

#include <cmath>
#include <string>

#include "tests/kernels/op_test.h"

namespace moe {
namespace {

using testing::RandomFloats;
using testing::SameBits;
using testing::TestStream;

struct State {
  std::vector<float> gradient, weight, m, v;

  explicit State(int64_t n)
      : gradient(RandomFloats(n, 1)),
        weight(RandomFloats(n, 2)),
        m(RandomFloats(n, 3, 0.1)),
        v(RandomFloats(n, 4, 0.1)) {
    for (float& x : v) x = x * x;
  }
  absl::Status Step(const AdamWOptions& options, TestStream& stream) {
    Workspace workspace;
    return AdamW(options, {gradient, 1}, absl::MakeSpan(weight), absl::MakeSpan(m),
                 absl::MakeSpan(v), workspace, *stream);
  }
};

// The equations of the header in float32, one rounding an operation.
void ReferenceStep(const AdamWOptions& o, State& s) {
  const auto correction1 = static_cast<float>(1 - std::pow(double{o.beta1}, double(o.step)));
  const auto correction2 = static_cast<float>(1 - std::pow(double{o.beta2}, double(o.step)));
  for (size_t i = 0; i < s.weight.size(); ++i) {
    const float g = o.gradient_scale * s.gradient[i];
    s.m[i] = o.beta1 * s.m[i] + (1.0f - o.beta1) * g;
    s.v[i] = o.beta2 * s.v[i] + (1.0f - o.beta2) * (g * g);
    const float direction = s.m[i] / correction1 / (std::sqrt(s.v[i] / correction2) + o.epsilon);
    s.weight[i] -= o.learning_rate * (direction + o.weight_decay * s.weight[i]);
  }
}

TEST(AdamWTest, TakesSumsOfGradientsAndTheirFactor) {
  constexpr int64_t kSize = 20011;
  TestStream stream(2);
  State scaled(kSize), exact(kSize);
  Workspace workspace;
  std::vector<int64_t> sum(kSize);
  int64_t non_finite = 0;
  ASSERT_TRUE(
      ExactAccumulate({}, scaled.gradient, absl::MakeSpan(sum), Write::kAdd, &non_finite, *stream)
          .ok());
  ASSERT_TRUE(ExactToFloat({}, sum, 0.3, absl::MakeSpan(scaled.gradient), *stream).ok());
  ASSERT_TRUE(scaled.Step({}, stream).ok());
  ASSERT_TRUE(AdamW({}, {sum, {}, 0.3}, absl::MakeSpan(exact.weight), absl::MakeSpan(exact.m),
                    absl::MakeSpan(exact.v), workspace, *stream)
                  .ok());
  EXPECT_EQ(exact.weight, scaled.weight);
  EXPECT_EQ(exact.m, scaled.m);
  EXPECT_EQ(exact.v, scaled.v);
}

// The first step from zero moments moves every weight by the learning rate against the gradient.
TEST(AdamWTest, FirstStepMovesByTheLearningRate) {
  TestStream stream;
  const std::vector<float> gradient = {3.0f, -0.5f, 0.0f};
  std::vector<float> weight = {1.0f, 1.0f, 1.0f}, m(3), v(3);
  const AdamWOptions options = {.learning_rate = 0.125f, .weight_decay = 0};
  Workspace workspace;
  ASSERT_TRUE(AdamW(options, {gradient, 1}, absl::MakeSpan(weight), absl::MakeSpan(m),
                    absl::MakeSpan(v), workspace, *stream)
                  .ok());
  EXPECT_NEAR(weight[0], 0.875, 1e-6);
  EXPECT_NEAR(weight[1], 1.125, 1e-6);
  EXPECT_EQ(weight[2], 1.0f);
  EXPECT_NEAR(m[0], 0.3, 1e-6);
  EXPECT_NEAR(v[0], 0.45, 1e-6);
}

TEST(AdamWTest, WeightDecayIsDecoupledFromTheGradient) {
  TestStream stream;
  State s(1);
  s.gradient = {0.0f};
  s.weight = {2.0f};
  s.m = s.v = {0.0f};
  ASSERT_TRUE(s.Step({.learning_rate = 0.5f, .weight_decay = 0.25f}, stream).ok());
  EXPECT_EQ(s.weight[0], 1.75f);  // 2 - 0.5 * 0.25 * 2
}

TEST(AdamWTest, HasTheBitsOfThePlainEquationsAtEveryLength) {
  TestStream stream;
  for (const int64_t n : {0, 1, 7, 8, 15, 16, 17, 31, 33, 100}) {
    State s(n), expected(n);
    for (const int64_t step : {1, 2, 1000}) {
      const AdamWOptions options = {.gradient_scale = 0.7f, .step = step};
      ASSERT_TRUE(s.Step(options, stream).ok());
      ReferenceStep(options, expected);
      EXPECT_TRUE(SameBits(s.weight, expected.weight)) << n << " " << step;
      EXPECT_TRUE(SameBits(s.m, expected.m));
      EXPECT_TRUE(SameBits(s.v, expected.v));
    }
  }
}

TEST(AdamWTest, GivesTheSameBitsOnAnyNumberOfThreads) {
  TestStream one;
  State expected(50001);
  ASSERT_TRUE(expected.Step({.step = 3}, one).ok());
  for (const int threads : {2, 3}) {
    TestStream stream(threads);
    State s(50001);
    ASSERT_TRUE(s.Step({.step = 3}, stream).ok());
    EXPECT_TRUE(SameBits(s.weight, expected.weight));
    EXPECT_TRUE(SameBits(s.m, expected.m));
    EXPECT_TRUE(SameBits(s.v, expected.v));
  }
}

TEST(AdamWTest, RefusesDifferentLengthsAndStepZero) {
  TestStream stream;
  State s(3);
  EXPECT_EQ(testing::Message(s.Step({.step = 0}, stream)), "AdamW: step is 0, expected >= 1");
  State m = s, v = s, weight = s;
  m.m.resize(2);
  EXPECT_EQ(testing::Message(m.Step({}, stream)), "AdamW: m is [2], expected [3]");
  v.v.resize(4);
  EXPECT_EQ(testing::Message(v.Step({}, stream)), "AdamW: v is [4], expected [3]");
  weight.weight.resize(4);
  EXPECT_EQ(testing::Message(weight.Step({}, stream)), "AdamW: weight is [4], expected [3]");
  EXPECT_TRUE(s.Step({}, stream).ok());
}

}  // namespace
}  // namespace moe
