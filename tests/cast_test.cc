// kernels/cast: rounding, every length, any number of threads.
#include "kernels/cast/cast.h"

#include <bit>

#include "tests/op_test.h"

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

// Bit patterns from all over the range, against the scalar conversion.
TEST(CastTest, MatchesTheScalarConversionAtEveryLengthAndWritesNothingElse) {
  TestStream stream;
  for (int64_t n = 0; n <= 67; ++n) {
    std::vector<float> in(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) {
      in[i] = std::bit_cast<float>(Random4({.seed = 1, .item = uint64_t(n * 100 + i)})[0]);
    }
    std::vector<BFloat16> out(static_cast<size_t>(n) + 2, BFloat16(5.0f));
    const auto span = absl::MakeSpan(out).subspan(1, n);
    ASSERT_TRUE((Cast<float, BFloat16>(in, span, *stream)).ok());
    for (int64_t i = 0; i < n; ++i) EXPECT_EQ(span[i].bits, BFloat16(in[i]).bits) << in[i];
    EXPECT_EQ(out.front(), BFloat16(5.0f));
    EXPECT_EQ(out.back(), BFloat16(5.0f));

    std::vector<float> back(static_cast<size_t>(n) + 1, 5.0f);
    ASSERT_TRUE((Cast<BFloat16, float>(span, absl::MakeSpan(back).first(n), *stream)).ok());
    for (int64_t i = 0; i < n; ++i) {
      EXPECT_TRUE(SameBits(back[i], static_cast<float>(span[i]))) << in[i];
    }
    EXPECT_EQ(back.back(), 5.0f);
  }
}

TEST(CastTest, GivesTheSameBitsOnAnyNumberOfThreads) {
  const auto in = RandomFloats(100003, 2);
  TestStream one;
  std::vector<BFloat16> expected(in.size());
  ASSERT_TRUE((Cast<float, BFloat16>(in, absl::MakeSpan(expected), *one)).ok());
  for (const int threads : {2, 3}) {
    TestStream stream(threads);
    std::vector<BFloat16> out(in.size());
    ASSERT_TRUE((Cast<float, BFloat16>(in, absl::MakeSpan(out), *stream)).ok());
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
