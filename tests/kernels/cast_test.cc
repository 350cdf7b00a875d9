// kernels/cast: rounding, every length, any number of threads.
#include "kernels/cast/cast.h"

#include <bit>
#include <cmath>

#include "tests/kernels/op_test.h"

namespace moe {
namespace {

using testing::kInfinity;
using testing::RandomFloats;
using testing::SameBits;
using testing::TestStream;

TEST(CastTest, RoundsToNearestEven) {
  TestStream stream;
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
  std::vector<BFloat16> out(in.size());
  ASSERT_TRUE((Cast<float, BFloat16>(in, absl::MakeSpan(out), *stream)).ok());
  for (size_t i = 0; i < in.size(); ++i) EXPECT_EQ(out[i].bits, expected[i]) << i;
}

template <typename T>
class CastTypesTest : public ::testing::Test {};
using Types = ::testing::Types<BFloat16, Float16>;
TYPED_TEST_SUITE(CastTypesTest, Types);

// The middle between every two neighbours of T, what lies next to it on either side, and all of T.
template <typename T>
std::vector<float> Middles() {
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
  return values;
}

TYPED_TEST(CastTypesTest, LanesRoundAsTheScalarConversionAroundEveryMiddle) {
  using T = TypeParam;
  TestStream stream;
  const std::vector<float> in = Middles<T>();
  std::vector<T> out(in.size());
  std::vector<float> back(in.size());
  ASSERT_TRUE((Cast<float, T>(in, absl::MakeSpan(out), *stream)).ok());
  ASSERT_TRUE((Cast<T, float>(out, absl::MakeSpan(back), *stream)).ok());
  for (size_t i = 0; i < in.size(); ++i) {
    ASSERT_EQ(out[i].bits, T(in[i]).bits) << in[i];
    ASSERT_TRUE(SameBits(back[i], static_cast<float>(out[i]))) << in[i];
  }
}

// Bit patterns from all over the range, against the scalar conversion.
TYPED_TEST(CastTypesTest, MatchesTheScalarConversionAtEveryLengthAndWritesNothingElse) {
  using T = TypeParam;
  TestStream stream;
  for (int64_t n = 0; n <= 67; ++n) {
    std::vector<float> in(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) {
      in[i] = std::bit_cast<float>(Random4({.seed = 1, .item = uint64_t(n * 100 + i)})[0]);
    }
    std::vector<T> out(static_cast<size_t>(n) + 2, T(5.0f));
    const auto span = absl::MakeSpan(out).subspan(1, n);
    ASSERT_TRUE((Cast<float, T>(in, span, *stream)).ok());
    for (int64_t i = 0; i < n; ++i) EXPECT_EQ(span[i].bits, T(in[i]).bits) << in[i];
    EXPECT_EQ(out.front(), T(5.0f));
    EXPECT_EQ(out.back(), T(5.0f));

    std::vector<float> back(static_cast<size_t>(n) + 1, 5.0f);
    ASSERT_TRUE((Cast<T, float>(span, absl::MakeSpan(back).first(n), *stream)).ok());
    for (int64_t i = 0; i < n; ++i) {
      EXPECT_TRUE(SameBits(back[i], static_cast<float>(span[i]))) << in[i];
    }
    EXPECT_EQ(back.back(), 5.0f);
  }
}

TYPED_TEST(CastTypesTest, GivesTheSameBitsOnAnyNumberOfThreads) {
  using T = TypeParam;
  const auto in = RandomFloats(100003, 2);
  TestStream one;
  std::vector<T> expected(in.size());
  ASSERT_TRUE((Cast<float, T>(in, absl::MakeSpan(expected), *one)).ok());
  for (const int threads : {2, 3}) {
    TestStream stream(threads);
    std::vector<T> out(in.size());
    ASSERT_TRUE((Cast<float, T>(in, absl::MakeSpan(out), *stream)).ok());
    EXPECT_EQ(out, expected);
    std::vector<float> copy(in.size());
    ASSERT_TRUE((Cast<float, float>(in, absl::MakeSpan(copy), *stream)).ok());
    EXPECT_EQ(copy, in);
  }
}

TEST(CastTest, RefusesDifferentLengths) {
  TestStream stream;
  const std::vector<float> in(3);
  std::vector<BFloat16> out(4);
  const auto status = Cast<float, BFloat16>(in, absl::MakeSpan(out), *stream);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(testing::Message(status), "Cast: out is [4], expected [3]");
}

}  // namespace
}  // namespace moe
