// Sums and losses on every device of this build.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/base/workspace.h"
#include "kernels/bias/bias.h"
#include "kernels/cross_entropy/cross_entropy.h"
#include "kernels/exact_sum/exact_sum.h"
#include "kernels/exact_sum/grad_accumulator.h"
#include "kernels/exact_sum/scaled_sum.h"
#include "kernels/partial_sum/partial_sum.h"
#include "tests/kernels/device_results.h"

namespace moe {
namespace {

using testing::ExpectSameBitsOnEveryDevice;
using testing::Random;
using testing::TestDevice;
using testing::TestDevices;

constexpr ExactGrid kGrid = {.unit_log2 = -34, .max_terms = 4};

// Two rounds, each with a NaN, an infinity and a value that the grid cannot hold.
TEST(DeviceSumsTest, ExactSums) {
  auto x = testing::RandomFloats(2051, 1);
  x[3] = testing::kNaN;
  x[1026] = -testing::kInfinity;
  x[2050] = 0x1p40f;
  ExpectSameBitsOnEveryDevice([&](const TestDevice& device) {
    const auto partial = device.Copy(x), out = Random(device, 2051, 2);
    const auto sum = device.Copy(std::vector<int64_t>(2051, 99));
    const auto non_finite = device.Copy<int64_t>({5});
    for (const Write write : {Write::kOverwrite, Write::kAdd}) {
      EXPECT_TRUE(ExactAccumulate(kGrid, partial.span(), sum.span(), write,
                                  non_finite.span().data(), device.stream())
                      .ok());
    }
    EXPECT_TRUE(ExactToFloat(kGrid, sum.span(), 1.0 / 3, out.span(), device.stream()).ok());
    EXPECT_EQ(device.Read(non_finite), std::vector<int64_t>{5 + 2 * 3});
    return std::tuple(device.Read(sum), device.Read(out));
  });
}

TEST(DeviceSumsTest, Scale) {
  ExpectSameBitsOnEveryDevice([&](const TestDevice& device) {
    const auto in = Random(device, 2051, 1), out = Random(device, 2051, 2);
    EXPECT_TRUE(Scale(in.span(), 0.3f, out.span(), Write::kOverwrite, device.stream()).ok());
    EXPECT_TRUE(Scale(in.span(), 0.7f, in.span(), Write::kOverwrite, device.stream()).ok());
    EXPECT_TRUE(Scale(in.span(), 1.1f, out.span(), Write::kAdd, device.stream()).ok());
    return std::tuple(device.Read(in), device.Read(out));
  });
}

// Every length from nothing to beyond two vectors, and one that several threads share; all but the
// first arrays begin off a multiple of 16 bytes.
template <typename T>
void ExpectPartialsAdded(const std::vector<T>& partial, const std::vector<T>& acc,
                         const std::vector<T>& sums) {
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    const auto from = device->Copy(partial), to = device->Copy(acc);
    size_t begin = 0;
    for (size_t n = 0; begin < acc.size(); ++n) {
      const size_t count = n <= 33 ? n : acc.size() - begin;
      EXPECT_TRUE(AddPartial<T>(from.span().subspan(begin, count), to.span().subspan(begin, count),
                                device->stream())
                      .ok());
      begin += count;
    }
    EXPECT_TRUE(testing::SameBits(device->Read(to), sums));
  }
}

TEST(DeviceSumsTest, PartialSums) {
  constexpr size_t kElements = 70'001;
  const auto partial = testing::RandomFloats(kElements, 1),
             acc = testing::RandomFloats(kElements, 2);
  std::vector<float> sums(kElements);
  std::vector<int64_t> integers(kElements), more(kElements), integer_sums(kElements);
  for (size_t i = 0; i < kElements; ++i) {
    sums[i] = partial[i] + acc[i];
    const uint64_t a = (i + 1) * 0x9E3779B97F4A7C15U, b = (i + 1) * 0xBF58476D1CE4E5B9U;
    integers[i] = static_cast<int64_t>(a);
    more[i] = static_cast<int64_t>(b);
    integer_sums[i] = static_cast<int64_t>(a + b);  // of large numbers: half of them wrap around
  }
  ExpectPartialsAdded(partial, acc, sums);
  ExpectPartialsAdded(integers, more, integer_sums);
}

TEST(DeviceSumsTest, PartialSumsOfDifferentLengthsAreRefused) {
  for (const auto& device : TestDevices()) {
    const auto x = Random(*device, 3, 1), y = Random(*device, 2, 2);
    EXPECT_EQ(testing::Message(AddPartial<float>(x.span(), y.span(), device->stream())),
              "AddPartial: partial is [3], expected [2]");
  }
}

// Without blocks, within one, and of 34 blocks with a tail.
TEST(DeviceSumsTest, SumOfSquares) {
  ExpectSameBitsOnEveryDevice([&](const TestDevice& device) {
    Workspace workspace(device.memory());
    const auto x = Random(device, 34 * 4096 + 5, 1);
    const auto result = device.Copy<double>({-1, -1, -1});
    int64_t next = 0;
    for (const int64_t n : {0, 1000, 34 * 4096 + 5}) {
      EXPECT_TRUE(SumOfSquares({x.span().subspan(0, static_cast<size_t>(n)), 1},
                               &result.span()[next++], workspace, device.stream())
                      .ok());
    }
    const auto sums = device.Read(result);
    EXPECT_EQ(sums[0], 0);
    EXPECT_NEAR(sums[2], 34 * 4096, 5000);  // 9 standard deviations
    return std::tuple(sums);
  });
}

TEST(DeviceSumsTest, NoElements) {
  ExpectSameBitsOnEveryDevice([&](const TestDevice& device) {
    const auto non_finite = device.Copy<int64_t>({5});
    EXPECT_TRUE(
        ExactAccumulate({}, {}, {}, Write::kAdd, non_finite.span().data(), device.stream()).ok());
    EXPECT_TRUE(ExactToFloat({}, {}, 1, {}, device.stream()).ok());
    EXPECT_TRUE(Scale({}, 2, {}, Write::kAdd, device.stream()).ok());
    return std::tuple(device.Read(non_finite));
  });
}

// Two partials of a bias, in both kinds of numerics, added to what is there and to nothing. The
// second takes the scratch of the first.
TEST(DeviceSumsTest, GradAccumulators) {
  const int64_t rows = 5, cols = 21;
  ExpectSameBitsOnEveryDevice([&](const TestDevice& device) {
    Workspace workspace(device.memory());
    const auto floats = Random(device, cols, 1);
    const auto exact = device.Copy(std::vector<int64_t>(cols, 3));
    const auto first_float = Random(device, cols, 4);
    const auto first_exact = device.Copy(std::vector<int64_t>(cols, 3));
    const auto cleared = device.Copy(std::vector<int64_t>(cols, 3));
    bool empty[] = {true, true, true};
    const auto non_finite = device.Copy<int64_t>({0});
    const GradAccumulator accumulators[] = {
        GradAccumulator(floats.span()),
        GradAccumulator(exact.span(), kGrid, non_finite.span().data()),
        GradAccumulator(first_float.span(), &empty[0]),
        GradAccumulator(first_exact.span(), kGrid, non_finite.span().data(), &empty[1]),
        GradAccumulator(cleared.span(), kGrid, non_finite.span().data(), &empty[2])};
    for (const uint64_t seed : {2, 3}) {
      const auto dy = Random(device, rows * cols, seed);
      for (const GradAccumulator& accumulator : absl::MakeSpan(accumulators, 4)) {
        const auto add = [&](absl::Span<float> out, Write write) {
          return BiasGradient<float>(dy.view(rows, cols, cols), out, write, device.stream());
        };
        EXPECT_TRUE(accumulator.Add(add, workspace, device.stream()).ok());
      }
      EXPECT_TRUE(device.stream().Synchronize().ok());  // dy goes
    }
    EXPECT_TRUE(accumulators[4].ClearIfEmpty(device.stream()).ok());
    EXPECT_EQ(workspace.used_bytes(), 0);
    EXPECT_EQ(device.Read(cleared), std::vector<int64_t>(cols));
    return std::tuple(device.Read(floats), device.Read(exact), device.Read(first_float),
                      device.Read(first_exact), device.Read(non_finite));
  });
}

// Losses and gradients of [3, 37] logits.
constexpr int64_t kTokens = 3, kVocabulary = 37, kStride = 40;
constexpr float kScale = 0.25f;

// |x - max| < 16. An exponential has up to 2 + 16 roundings, a sum of 37 of them 12 more at most.
// The loss is log(sum) - (x_target - max): 16 roundings for either term and 24 for their
// difference. A gradient is scale * (p - 1) or scale * p: p <= 1 has the roundings of its
// exponential, of the sum and 3, and 3 more follow.
TEST(DeviceLossTest, CrossEntropyIsWithinFloat32sRoundingsOfFloat64) {
  constexpr double kSum = 18 + 12;
  const auto x = testing::RandomFloats(kTokens * kStride, 1, 2);
  const std::vector<int32_t> target = {0, 36, 12};
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    const auto logits = device->Copy(x), gradient = Random(*device, kTokens * kStride, 2);
    const auto loss = Random(*device, kTokens, 3);
    const auto targets = device->Copy(target);
    ASSERT_TRUE(CrossEntropy<float>(logits.view(kTokens, kVocabulary, kStride), targets.span(),
                                    kScale, loss.span(),
                                    gradient.view(kTokens, kVocabulary, kStride), device->stream())
                    .ok());
    const auto losses = device->Read(loss), gradients = device->Read(gradient);
    for (int64_t t = 0; t < kTokens; ++t) {
      const float* const row = x.data() + t * kStride;
      const auto [min, max] = std::minmax_element(row, row + kVocabulary);
      ASSERT_LT(*max - *min, 16);
      double sum = 0;
      for (int64_t v = 0; v < kVocabulary; ++v) sum += std::exp(double{row[v]} - *max);
      EXPECT_NEAR(losses[t], std::log(sum) - (double{row[target[t]]} - *max),
                  (kSum + 16 + 16 + 24) * testing::kFloatRounding);
      for (int64_t v = 0; v < kVocabulary; ++v) {
        const double p = std::exp(double{row[v]} - *max) / sum;
        EXPECT_NEAR(gradients[t * kStride + v], kScale * (p - (v == target[t] ? 1 : 0)),
                    kScale * (p * (18 + kSum + 3) + 3) * testing::kFloatRounding);
      }
    }
  }
}

// The loss alone, gradients of BFloat16 and gradients in place have the bits of the others.
TEST(DeviceLossTest, CrossEntropyHasTheSameBitsForAllResults) {
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    const auto view = [](const auto& array) {
      return array.view(kTokens, kVocabulary, kStride);
    };
    const auto logits = Random(*device, kTokens * kStride, 1);
    const auto targets = device->Copy<int32_t>({0, 36, 12});
    const auto gradient = device->Copy(device->Read(logits));
    const auto narrow = device->Copy(std::vector<BFloat16>(kTokens * kStride));
    const auto loss = Random(*device, kTokens, 3);
    std::vector<std::vector<float>> losses;
    const auto compute = [&](auto d_logits) {
      using T = std::remove_cvref_t<decltype(*d_logits.data())>;
      EXPECT_TRUE(CrossEntropy<T>(view(logits), targets.span(), kScale, loss.span(), d_logits,
                                  device->stream())
                      .ok());
      losses.push_back(device->Read(loss));
    };
    compute(view(gradient));
    compute(view(narrow));
    compute(MatrixView<float>());
    compute(view(logits));
    for (const auto& other : losses) EXPECT_TRUE(testing::SameBits(other, losses[0]));
    const auto wide = device->Read(gradient);
    const auto rounded = device->Read(narrow);
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t i = t * kStride; i < t * kStride + kVocabulary; ++i) {
        EXPECT_TRUE(testing::SameBits(rounded[i], BFloat16(wide[i]))) << i;
      }
    }
    EXPECT_TRUE(testing::SameBits(device->Read(logits), wide));
  }
}

TEST(DeviceLossTest, TargetsOutOfRangeAreRefusedOrNaN) {
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    const auto logits = Random(*device, kTokens * kStride, 1);
    const auto gradient = Random(*device, kTokens * kStride, 2), loss = Random(*device, kTokens, 3);
    const auto targets = device->Copy<int32_t>({-1, 37, 12});
    const absl::Status status = CrossEntropy<float>(
        logits.view(kTokens, kVocabulary, kStride), targets.span(), kScale, loss.span(),
        gradient.view(kTokens, kVocabulary, kStride), device->stream());
    if (device->stream().device().kind == DeviceKind::kCpu) {
      EXPECT_EQ(testing::Message(status), "CrossEntropy: target[0] is -1, expected 0 to 36");
      continue;
    }
    EXPECT_TRUE(status.ok());
    const auto losses = device->Read(loss), gradients = device->Read(gradient);
    for (int64_t t = 0; t < kTokens; ++t) {
      EXPECT_EQ(std::isnan(losses[t]), t < 2) << t;
      EXPECT_EQ(std::isnan(gradients[t * kStride + 5]), t < 2) << t;
    }
  }
}

TEST(DeviceLossTest, TakesNoRows) {
  for (const auto& device : TestDevices()) {
    SCOPED_TRACE(device->name());
    EXPECT_TRUE(
        CrossEntropy<float>({nullptr, 0, 5}, {}, 1, {}, {nullptr, 0, 5}, device->stream()).ok());
    EXPECT_TRUE(device->stream().Synchronize().ok());
  }
}

}  // namespace
}  // namespace moe
