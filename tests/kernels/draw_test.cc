// kernels/draw: the numbers of kernels/base/rng.h on every device.
#include "kernels/draw/draw.h"

#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "tests/kernels/device_memory.h"

namespace moe::testing {
namespace {

constexpr RandomKey kKey = {.seed = 7, .purpose = RandomPurpose::kData, .layer = 3, .step = 5};

RandomKey KeyOf(int64_t item) {
  RandomKey key = kKey;
  key.item = static_cast<uint64_t>(item);
  return key;
}

template <typename T>
class DrawTest : public ::testing::Test {};
using Types = ::testing::Types<float, BFloat16, Float16>;
TYPED_TEST_SUITE(DrawTest, Types);

// Sizes around a block of four numbers; in the last one begins in the middle of the array.
TYPED_TEST(DrawTest, UniformValuesAreFourOfEveryFourthItem) {
  using T = TypeParam;
  ForEachDevice([](const TestDevice& device) {
    for (const int64_t count : {0, 1, 4, 7, 1000}) {
      const DeviceArray<T> values = device.Copy(std::vector<T>(count, T(9.0f)));
      ASSERT_OK(DrawUniform(kKey, values.span(), device.stream()));
      const std::vector<T> got = device.Read(values);
      ASSERT_EQ(got.size(), static_cast<size_t>(count));
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t number = Random4(KeyOf(i / 4 * 4))[i % 4];
        EXPECT_TRUE(SameBits(got[i], T(static_cast<float>(number) / 2147483648.0f - 1.0f))) << i;
      }
    }
  });
}

// Without the host's mathematics within an ulp of T: float64's last bit may change the rounding.
TYPED_TEST(DrawTest, NormalValuesAreThoseOfTheirItem) {
  using T = TypeParam;
  constexpr float kUlp = std::is_same_v<T, float> ? 0x1p-23f : 0x1p-7f;
  ForEachDevice([](const TestDevice& device) {
    const DeviceArray<T> values = device.Copy(std::vector<T>(1000, T(9.0f)));
    ASSERT_OK(DrawNormal(kKey, values.span(), device.stream()));
    const std::vector<T> got = device.Read(values);
    ASSERT_EQ(got.size(), 1000u);
    for (int64_t i = 0; i < 1000; ++i) {
      const auto wanted = T(static_cast<float>(Normal(KeyOf(i))));
      if (device.has_host_math()) {
        EXPECT_TRUE(SameBits(got[i], wanted)) << i;
      } else {
        const auto exact = static_cast<float>(wanted);
        EXPECT_NEAR(static_cast<float>(got[i]), exact, std::abs(exact) * kUlp) << i;
      }
    }
  });
}

}  // namespace
}  // namespace moe::testing
