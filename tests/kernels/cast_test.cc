// kernels/cast: rounding, every length and alignment, on every device.
#include "kernels/cast/cast.h"

#include <bit>
#include <cmath>
#include <vector>

#include "tests/kernels/device_memory.h"

namespace moe {
namespace {

using testing::ForEachDevice;
using testing::kInfinity;
using testing::SameBits;
using testing::TestDevice;

// `in` in another type. The arrays begin `from` and `to` elements after an aligned address, and
// nothing around the result is written.
template <typename V, typename U>
std::vector<V> Converted(const TestDevice& device, const std::vector<U>& in, size_t from = 0,
                         size_t to = 0) {
  std::vector<U> shifted(from, U(5.0f));
  shifted.insert(shifted.end(), in.begin(), in.end());
  const auto source = device.Copy(shifted);
  const auto result = device.Copy(std::vector<V>(to + in.size() + 1, V(5.0f)));
  EXPECT_TRUE((
      Cast<U, V>(source.span().subspan(from), result.span().subspan(to, in.size()), device.stream())
          .ok()));
  std::vector<V> out = device.Read(result);
  if (out.empty()) return out;
  for (size_t i = 0; i < to; ++i) EXPECT_EQ(out[i], V(5.0f));
  EXPECT_EQ(out.back(), V(5.0f));
  return {out.begin() + static_cast<ptrdiff_t>(to), out.end() - 1};
}

TEST(CastTest, RoundsToNearestEven) {
  const std::vector<float> in = {1.0f,
                                 1.0f + 0x1p-8f,
                                 1.0f + 0x3p-8f,
                                 -1.5f,
                                 1.0f + 0x1.0002p-8f,
                                 0x1.fffffep127f,
                                 kInfinity,
                                 -kInfinity,
                                 0x1p-149f,
                                 -0.0f,
                                 std::bit_cast<float>(0x7f800001u)};
  const std::vector<uint16_t> expected = {0x3f80, 0x3f80, 0x3f82, 0xbfc0, 0x3f81, 0x7f80,
                                          0x7f80, 0xff80, 0x0000, 0x8000, 0x7fc0};
  ForEachDevice([&](const TestDevice& device) {
    const auto out = Converted<BFloat16>(device, in);
    ASSERT_EQ(out.size(), in.size());
    for (size_t i = 0; i < in.size(); ++i) EXPECT_EQ(out[i].bits, expected[i]) << i;
  });
}

template <typename T>
class CastTypesTest : public ::testing::Test {};
using Types = ::testing::Types<BFloat16, Float16>;
TYPED_TEST_SUITE(CastTypesTest, Types);

// NaNs of all payloads are among the values, so bits are compared.
template <typename T>
void ExpectTheScalarConversion(const TestDevice& device, const std::vector<float>& in, size_t wide,
                               size_t narrow) {
  std::vector<T> rounded;
  std::vector<float> back;
  for (const float x : in) {
    rounded.push_back(T(x));
    back.push_back(static_cast<float>(rounded.back()));
  }
  EXPECT_TRUE(SameBits(Converted<T>(device, in, wide, narrow), rounded)) << in.size();
  EXPECT_TRUE(SameBits(Converted<float>(device, rounded, narrow, wide), back)) << in.size();
  EXPECT_TRUE(SameBits(Converted<float>(device, in, wide, narrow), in)) << in.size();
}

// The middle between every two neighbours of T, what lies next to it on either side, and all of T.
TYPED_TEST(CastTypesTest, RoundsAsTheScalarConversionAroundEveryMiddle) {
  using T = TypeParam;
  std::vector<float> values;
  for (int bits = 0; bits < 0x10000; ++bits) {
    T low, high;
    low.bits = static_cast<uint16_t>(bits);
    high.bits = static_cast<uint16_t>(bits + 1);
    const auto value = static_cast<float>(low), next = static_cast<float>(high);
    const float middle = value + (next - value) / 2;
    for (const float v :
         {value, middle, std::nextafterf(middle, value), std::nextafterf(middle, next)}) {
      values.push_back(v);
    }
  }
  ForEachDevice(
      [&](const TestDevice& device) { ExpectTheScalarConversion<T>(device, values, 0, 0); });
}

// Bit patterns from all over the range, every third halfway between two of T; there and back.
TYPED_TEST(CastTypesTest, EqualsTheScalarConversionForAnyLengthAndAlignment) {
  using T = TypeParam;
  std::vector<float> in;
  for (int64_t i = 0; i < 4101; ++i) {
    uint32_t bits = Random4({.seed = 1, .item = static_cast<uint64_t>(i)})[0];
    if (i % 3 == 0) {
      constexpr int kCut = std::is_same_v<T, BFloat16> ? 16 : 13;  // bits that rounding takes
      bits = (bits >> kCut << kCut) | 1u << (kCut - 1);
    }
    in.push_back(std::bit_cast<float>(bits));
  }
  std::vector<int64_t> lengths = {333, 4101};
  for (int64_t n = 0; n <= 67; ++n) lengths.push_back(n);
  ForEachDevice([&](const TestDevice& device) {
    for (const int64_t n : lengths) {
      const std::vector<float> part(in.begin(), in.begin() + n);
      ExpectTheScalarConversion<T>(device, part, 0, 8);  // both aligned to 16 bytes
      ExpectTheScalarConversion<T>(device, part, 8, 1);
      ExpectTheScalarConversion<T>(device, part, 1, 0);
      ExpectTheScalarConversion<T>(device, part, 1, 3);
    }
  });
}

TEST(CastTest, RefusesDifferentLengths) {
  const auto stream = MakeInlineStream();
  const std::vector<float> in(3);
  std::vector<BFloat16> out(4);
  const auto status = Cast<float, BFloat16>(in, absl::MakeSpan(out), *stream);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(testing::Message(status), "Cast: out is [4], expected [3]");
}

}  // namespace
}  // namespace moe
