// kernels/partial_sum: sums of two arrays, on every device.
#include "kernels/partial_sum/partial_sum.h"

#include <cstdint>
#include <vector>

#include "tests/kernels/device_memory.h"

namespace moe {
namespace {

using testing::ForEachDevice;
using testing::SameBits;
using testing::TestDevice;

template <typename T>
void ExpectSums(const TestDevice& device, const std::vector<T>& partial, const std::vector<T>& acc,
                const std::vector<T>& sums) {
  const auto from = device.Copy(partial), to = device.Copy(acc);
  ASSERT_TRUE(AddPartial<T>(from.span(), to.span(), device.stream()).ok());
  EXPECT_TRUE(SameBits(device.Read(to), sums));
}

TEST(PartialSumTest, AddsTheTermsAndIntegersWrapAround) {
  ForEachDevice([](const TestDevice& device) {
    ExpectSums<float>(device, {1, 0x1p-24f, -0.0f}, {2, 1, -0.0f}, {3, 1, -0.0f});
    ExpectSums<int64_t>(device, {-1, INT64_MAX}, {3, 1}, {2, INT64_MIN});
  });
}

// [begin, begin + count) of the arrays of a device.
struct Range {
  size_t begin_of_partial, begin_of_acc, count;
};

template <typename T>
void ExpectRangesAdded(const TestDevice& device, const std::vector<T>& partial,
                       const std::vector<T>& acc, const std::vector<Range>& ranges) {
  const auto from = device.Copy(partial), to = device.Copy(acc);
  std::vector<T> sums = acc;
  for (const auto& [p, a, n] : ranges) {
    EXPECT_TRUE(
        AddPartial<T>(from.span().subspan(p, n), to.span().subspan(a, n), device.stream()).ok());
    for (size_t i = 0; i < n; ++i) {
      if constexpr (std::is_integral_v<T>) {
        sums[a + i] = static_cast<T>(static_cast<uint64_t>(sums[a + i]) +
                                     static_cast<uint64_t>(partial[p + i]));
      } else {
        sums[a + i] += partial[p + i];
      }
    }
  }
  EXPECT_TRUE(SameBits(device.Read(to), sums));
}

// Every length from nothing to beyond two vectors, and some that several threads share; of two
// arrays both begin at a multiple of 16 bytes, one of them, or none.
TEST(PartialSumTest, AddsAnyLengthAtAnyAlignment) {
  constexpr size_t kElements = 70'001;
  std::vector<Range> ranges;
  for (size_t n = 0; n <= 33; ++n) ranges.push_back({n * (n + 1) / 2, n * (n + 1) / 2, n});
  for (const size_t n : {3, 4, 333, 2051}) {
    for (const size_t p : {0, 1, 8}) {
      for (const size_t a : {0, 1, 8}) ranges.push_back({p, a, n});
    }
  }
  ranges.push_back({595, 595, kElements - 595});
  const auto partial = testing::RandomFloats(kElements, 1);
  const auto acc = testing::RandomFloats(kElements, 2);
  std::vector<int64_t> integers(kElements), more(kElements);
  for (size_t i = 0; i < kElements; ++i) {  // large numbers: half of the sums wrap around
    integers[i] = static_cast<int64_t>((i + 1) * 0x9E3779B97F4A7C15U);
    more[i] = static_cast<int64_t>((i + 1) * 0xBF58476D1CE4E5B9U);
  }
  ForEachDevice([&](const TestDevice& device) {
    ExpectRangesAdded(device, partial, acc, ranges);
    ExpectRangesAdded(device, integers, more, ranges);
  });
}

TEST(PartialSumTest, DifferentLengthsAreRefused) {
  ForEachDevice([](const TestDevice& device) {
    const auto x = device.Random(3, 1), y = device.Random(2, 2);
    EXPECT_EQ(testing::Message(AddPartial<float>(x.span(), y.span(), device.stream())),
              "AddPartial: partial is [3], expected [2]");
  });
}

}  // namespace
}  // namespace moe
