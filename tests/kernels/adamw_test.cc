// kernels/adamw: one step, bit for bit, on every device.
#include "kernels/adamw/adamw.h"

#include <cmath>

#include "tests/kernels/device_memory.h"

namespace moe::testing {
namespace {

using Floats = Matrix<float>;

constexpr float kDecay = 0.1f;

// Arrays are matrices of one row. Gradients from 1e-37, whose squares are subnormal or 0, to 1e18.
struct State {
  Floats gradient, weight, m, v;

  explicit State(int64_t n, MatrixLayout in = {}, MatrixLayout out = {})
      : gradient(Floats::Random(1, n, in, 1)),
        weight(Floats::Random(1, n, out, 2)),
        m(Floats::Random(1, n, in, 3, 0.1)),
        v(Floats::Random(1, n, out, 4, 0.1)) {
    for (int64_t i = 0; i < n; ++i) {
      if (i % 3 == 0) gradient.at(0, i) *= std::ldexp(1.0f, static_cast<int>(i % 183) - 122);
      v.at(0, i) *= v.at(0, i);
    }
  }
  absl::Status Step(const AdamWOptions& options, const TestDevice& device,
                    float weight_decay = kDecay) {
    const auto from = device.Copy(gradient), w = device.Copy(weight);
    const auto first = device.Copy(m), second = device.Copy(v);
    Workspace workspace(device.memory());
    const AdamWSlice slice = {.first = 0,
                              .size = weight.cols(),
                              .weight = Row(w).data(),
                              .m = Row(first).data(),
                              .v = Row(second).data(),
                              .weight_decay = weight_decay};
    const absl::Status status =
        AdamW(options, {Row(from), 1}, {&slice, 1}, workspace, device.stream());
    weight = device.Read(w);
    m = device.Read(first);
    v = device.Read(second);
    return status;
  }
  static absl::Span<float> Row(const DeviceMatrix<float>& row) {
    return {row.view().data(), static_cast<size_t>(row.cols)};
  }
};

void ExpectSame(const State& got, const State& want) {
  EXPECT_TRUE(SameBits(got.weight, want.weight));
  EXPECT_TRUE(SameBits(got.m, want.m));
  EXPECT_TRUE(SameBits(got.v, want.v));
}

// The equations of the header in float32, one rounding an operation.
struct Range {
  int64_t begin, end;
};
void ReferenceStep(const AdamWOptions& o, State& s, Range range, float weight_decay = kDecay) {
  const auto correction1 = static_cast<float>(1 - std::pow(double{o.beta1}, double(o.step)));
  const auto correction2 = static_cast<float>(1 - std::pow(double{o.beta2}, double(o.step)));
  for (int64_t i = range.begin; i < range.end; ++i) {
    const float g = o.gradient_scale * s.gradient.at(0, i);
    float &m = s.m.at(0, i), &v = s.v.at(0, i), &weight = s.weight.at(0, i);
    m = o.beta1 * m + (1.0f - o.beta1) * g;
    v = o.beta2 * v + (1.0f - o.beta2) * (g * g);
    const float direction = m / correction1 / (std::sqrt(v / correction2) + o.epsilon);
    weight -= o.learning_rate * (direction + weight_decay * weight);
  }
}

// The first step from zero moments moves every weight by the learning rate against the gradient.
TEST(AdamWTest, FirstStepMovesByTheLearningRate) {
  ForEachDevice([](const TestDevice& device) {
    State s(3);
    s.gradient = Floats::Of(1, 3, {3, -0.5f, 0});
    s.weight = Floats(1, 3, 1.0f);
    s.m = s.v = Floats(1, 3);
    ASSERT_OK(s.Step({.learning_rate = 0.125f}, device, 0));
    EXPECT_NEAR(s.weight(0, 0), 0.875, 1e-6);
    EXPECT_NEAR(s.weight(0, 1), 1.125, 1e-6);
    EXPECT_EQ(s.weight(0, 2), 1);
    EXPECT_NEAR(s.m(0, 0), 0.3, 1e-6);
    EXPECT_NEAR(s.v(0, 0), 0.45, 1e-6);
  });
}

TEST(AdamWTest, HasTheBitsOfThePlainEquationsForAnyLengthAndLayout) {
  const auto check = [](const TestDevice& device, int64_t n, MatrixLayout in, MatrixLayout out) {
    State got(n, in, out), want(n, in, out);
    for (const int64_t step : {1, 2, 1000}) {
      SCOPED_TRACE(::testing::Message() << n << " elements, step " << step);
      const AdamWOptions options = {.gradient_scale = 0.7f, .step = step};
      ASSERT_OK(got.Step(options, device));
      ReferenceStep(options, want, {0, n});
      ExpectSame(got, want);
    }
  };
  ForEachDevice(Simd::kAll, [&](const TestDevice& device) {
    for (const int64_t n : {0, 1, 4, 7, 8, 15, 16, 17, 31, 33, 100, 333, 2051}) {
      for (const auto& [in, out] : kLayoutPairs) check(device, n, in, out);
    }
    check(device, 50001, {}, {});  // several threads
  });
}

TEST(AdamWTest, ANaNShowsInItsOwnElementAlone) {
  ForEachDevice([](const TestDevice& device) {
    State got(9), want(9);
    got.gradient.at(0, 5) = kNaN;
    ASSERT_OK(got.Step({}, device));
    ReferenceStep({}, want, {0, 9});
    for (Floats State::*member : {&State::weight, &State::m, &State::v}) {
      EXPECT_TRUE(std::isnan((got.*member)(0, 5)));
      (got.*member).at(0, 5) = (want.*member).at(0, 5);
    }
    ExpectSame(got, want);
  });
}

// Elements of vectors and of the tail, in every thread block: a weight or v that overflows float32,
// and 0 / 0 with an epsilon of 0. Zeros after the last element do not count.
TEST(AdamWTest, CountsElementsThatAreNotFinite) {
  const auto count_of = [](const TestDevice& device, State& s, AdamWOptions options) {
    const auto count = device.Copy(std::vector<int64_t>{5});
    options.non_finite = count.span().data();
    EXPECT_TRUE(s.Step(options, device).ok());
    return device.Read(count)[0] - 5;
  };
  ForEachDevice(Simd::kAll, [&](const TestDevice& device) {
    for (const int64_t n : {1, 7, 17, 333, 50001}) {
      SCOPED_TRACE(n);
      State s(n);
      EXPECT_EQ(count_of(device, s, {}), 0);
      s = State(n);
      s.weight.at(0, n - 1) = -std::numeric_limits<float>::max();
      s.gradient.at(0, n - 1) = 1;
      s.m.at(0, n - 1) = s.v.at(0, n - 1) = 0;  // the weight moves by -lr
      s.v.at(0, n / 2) = kInfinity;             // the weight stays finite
      EXPECT_EQ(count_of(device, s, {.learning_rate = 1e33f}), n == 1 ? 1 : 2);
      s = State(n);
      s.m.at(0, 0) = kInfinity;
      EXPECT_EQ(count_of(device, s, {.learning_rate = 0}), 1);
      s = State(n);
      for (Floats* const values : {&s.gradient, &s.m, &s.v}) *values = Floats(1, n);
      s.gradient.at(0, 0) = 1;
      EXPECT_EQ(count_of(device, s, {.epsilon = 0}), n - 1);
    }
  });
}

// Slices of every length, adjacent and apart, some empty, some with several thread blocks, of sums
// of both types; elements between slices stay unchanged.
TEST(AdamWTest, ManySlicesHaveTheBitsOfOneAfterTheOther) {
  constexpr int64_t kSize = 30000, kGap = 5;
  std::vector<AdamWSlice> slices;
  int64_t first = 3;
  for (const int64_t size : {1, 0, 4, 8190, 7, 16, 0, 9000, 129, 8192, 64, 3}) {
    const float decay = slices.size() % 2 == 0 ? kDecay : 0.0f;
    slices.push_back({first, size, nullptr, nullptr, nullptr, decay});
    first += size + (size % 2 == 0 ? kGap : 0);
  }
  ASSERT_LE(first, kSize);
  std::vector<int64_t> exact(kSize);
  for (int64_t i = 0; i < kSize; ++i) exact[i] = (i * 7919 - 100003) << i % 30;
  ForEachDevice([&](const TestDevice& device) {
    const State start(kSize);
    const auto floats = device.Copy(start.gradient);
    const auto integers = device.Copy(exact);
    Workspace workspace(device.memory());
    for (const ScaledSum& sum :
         {ScaledSum(State::Row(floats), 0.7), ScaledSum(integers.span(), {}, 0.3)}) {
      State got = start, want = start;
      const auto w = device.Copy(start.weight), m = device.Copy(start.m), v = device.Copy(start.v);
      std::vector<AdamWSlice> placed = slices;
      for (AdamWSlice& slice : placed) {
        slice.weight = State::Row(w).data() + slice.first;
        slice.m = State::Row(m).data() + slice.first;
        slice.v = State::Row(v).data() + slice.first;
        const auto part = device.Copy(std::vector<float>(size_t(slice.size)));
        ASSERT_OK(sum.Part(slice.first, slice.size).ToFloat(part.span(), device.stream()));
        const std::vector<float> gradient = device.Read(part);
        for (int64_t i = 0; i < slice.size; ++i) {
          want.gradient.at(0, slice.first + i) = gradient[i];
        }
        ReferenceStep({}, want, {slice.first, slice.first + slice.size}, slice.weight_decay);
      }
      ASSERT_OK(AdamW({}, sum, placed, workspace, device.stream()));
      got.weight = device.Read(w);
      got.m = device.Read(m);
      got.v = device.Read(v);
      ExpectSame(got, want);
    }
  });
}

TEST(AdamWTest, RefusesSlicesOutOfOrderOrOfNoGradientAndStepZero) {
  ForEachDevice([](const TestDevice& device) {
    State s(3);
    ExpectRefused(s.Step({.step = 0}, device), "AdamW: step is 0, expected >= 1");
    s.weight = Floats(1, 4);
    ExpectRefused(s.Step({}, device), "AdamW: a slice of gradients [0, 4), expected one in [0, 3)");
    const auto gradient = device.Random(9, 1);
    const auto refused = [&](const std::vector<AdamWSlice>& slices) {
      Workspace workspace(device.memory());
      return Message(AdamW({}, {gradient.span(), 1}, slices, workspace, device.stream()));
    };
    EXPECT_EQ(refused({{4, 2, nullptr, nullptr, nullptr, 0}, {5, 1, nullptr, nullptr, nullptr, 0}}),
              "AdamW: a slice of gradients [5, 6), expected one in [6, 9)");
    EXPECT_EQ(refused({{4, -1, nullptr, nullptr, nullptr, 0}}),
              "AdamW: a slice of gradients [4, 3), expected one in [0, 9)");
    EXPECT_EQ(refused({}), "");
  });
}

}  // namespace
}  // namespace moe::testing
