// How much memory hostile files make their readers take. A program of its own, since all of it
// counts what operator new hands out.
#include <cstdint>
#include <string>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "moe/io/bounded_json.h"
#include "moe/io/checkpoint.h"
#include "moe/io/safetensors.h"
#include "tests/counting_new.h"
#include "tests/moe/io/io_test.h"

namespace moe {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// The peak of reading a file with this header, which the contract bounds.
int64_t ReadHeader(const std::string& header, bool ok) {
  const std::string bytes = SafetensorsBytes(header, "");
  const int64_t peak = PeakBytesOf([&] {
    const auto file = SafetensorsFile::Parse("f", AsBytes(bytes));
    EXPECT_EQ(file.ok(), ok) << file.status();
  });
  EXPECT_LE(peak, static_cast<int64_t>(bytes.size()) + 64 * kMiB);
  return peak;
}

TEST(IoMemoryTest, TheCounterCounts) {
  const int64_t peak = PeakBytesOf([] { const std::string text(3 * kMiB, 'x'); });
  EXPECT_GE(peak, 3 * kMiB);
  EXPECT_LT(peak, 4 * kMiB);
}

// The largest table there can be: as many tensors as allowed, of the highest rank.
TEST(IoMemoryTest, TheLargestTableFits) {
  std::string header = R"({"__metadata__":{)";
  for (int64_t i = 0; i < kMaxSafetensorsMetadata; ++i) {
    absl::StrAppend(&header, i == 0 ? "\"" : ",\"", i, "\":\"", std::string(100, 'v'), "\"");
  }
  absl::StrAppend(&header, "}");
  for (int64_t i = 0; i < kMaxSafetensorsTensors; ++i) {
    absl::StrAppend(&header, ",\"a.name.too.long.for.the.string.itself.", i,
                    R"(":{"dtype":"U8","shape":[0,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1],)"
                    R"("data_offsets":[0,0]})");
  }
  // The test would say nothing of the bound if this took little.
  EXPECT_GT(ReadHeader(header + "}", /*ok=*/true), 25 * kMiB);
}

// A long token, gap or list costs what the lexer may hold, not what the file has: 12 * 2 MiB, and
// copies of the text that became a key.
TEST(IoMemoryTest, LongTokensAreNotHeld) {
  constexpr int64_t kLong = 99'000'000;
  for (const std::string& start :
       {std::string("{\""), std::string("{\"a\":\""), std::string(R"({"__metadata__":{"a":")")}) {
    EXPECT_LE(ReadHeader(start + std::string(kLong, 'x'), false), 32 * kMiB) << start;
  }
  EXPECT_LE(ReadHeader("{" + std::string(kLong, ' ') + "x", false), 32 * kMiB);
  EXPECT_LE(ReadHeader(R"({"a":{"shape":[)" + std::string(kLong, '1'), false), 32 * kMiB);
  EXPECT_LE(ReadHeader(std::string(kLong, '{'), false), 32 * kMiB);
  std::string list = R"({"a":{"shape":[)";
  while (static_cast<int64_t>(list.size()) < kLong / 4) list += "1,";
  EXPECT_LE(ReadHeader(list, false), 32 * kMiB);
}

// As many tensors as an index may have, in names that fit their strings and in names that do not.
TEST(IoMemoryTest, TheLargestIndexFits) {
  for (const std::string& prefix : {std::string("m"), std::string(20, 'n')}) {
    std::string index = R"({"weight_map":{)";
    for (int i = 0; i < (1 << 18) - 2; ++i) {
      absl::StrAppend(&index, i == 0 ? "\"" : ",\"", prefix, i, "\":\"", prefix, ".safetensors\"");
    }
    index += "}}";
    const int64_t peak = PeakBytesOf([&] { const auto map = ParseShardIndex("f", index).value(); });
    EXPECT_LE(peak, static_cast<int64_t>(index.size()) + 64 * kMiB);
    EXPECT_GT(peak, 16 * kMiB);  // it says something of the bound
  }
}

// A token just short of the limit, in an error: it is in both buffers and in the message.
TEST(IoMemoryTest, ATokenInAnErrorIsCopiedFewTimes) {
  const JsonLimits limits;
  const int64_t bound = kJsonReaderTokens * limits.max_token_bytes + (int64_t{64} << 10);
  for (const char fill : {'x', '\n'}) {
    // After 'x' the string ends in an unescaped control character; a gap of line ends, which the
    // message spells out, ends in a wrong one.
    std::string text = fill == 'x' ? "{\"" : "{";
    text.append(limits.max_token_bytes - 10, fill);
    text.push_back('\x01');
    const int64_t peak = PeakBytesOf([&] { EXPECT_FALSE(ParseBoundedJson("f", text).ok()); });
    EXPECT_LE(peak, bound) << "after " << static_cast<int>(fill);
    EXPECT_GE(peak, limits.max_token_bytes);
  }
}

}  // namespace
}  // namespace moe
