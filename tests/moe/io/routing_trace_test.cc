#include "moe/io/routing_trace.h"

#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include "tests/sanitizers.h"

namespace moe {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Two ranks, three experts, written by hand.
constexpr char kHeader[] =
    R"({"schema":"moe.routing/1","ranks":2,"expert_parallel_size":2,"num_experts":3,"topk":2,)"
    R"("hidden_size":64,"dtype":"bf16","moe_layers":2})"
    "\n";
constexpr char kFirst[] = R"({"step":7,"layer":0,"tokens":[4,5],"slots":[[4,3,1],[0,5,5]]})"
                          "\n";
constexpr char kSecond[] = R"({"step":7,"layer":1,"tokens":[4,5],"slots":[[0,0,0],[1,2,3]]})"
                           "\n";

std::string ErrorOf(const std::string& text) {
  const auto parsed = ParseRoutingTrace("t.jsonl", text);
  EXPECT_EQ(parsed.status().code(), absl::StatusCode::kDataLoss) << text.substr(0, 200);
  return std::string(parsed.status().message());
}

TEST(RoutingTraceTest, ReadsWhatIsWrittenByHand) {
  const auto trace = ParseRoutingTrace("t.jsonl", absl::StrCat(kHeader, kFirst, kSecond)).value();
  EXPECT_EQ(trace.header.ranks, 2);
  EXPECT_EQ(trace.header.expert_parallel_size, 2);
  EXPECT_EQ(trace.header.num_experts, 3);
  EXPECT_EQ(trace.header.top_k, 2);
  EXPECT_EQ(trace.header.hidden_size, 64);
  EXPECT_EQ(trace.header.dtype, DType::kBFloat16);
  EXPECT_EQ(trace.header.moe_layers, 2);
  ASSERT_EQ(trace.records.size(), 2u);
  EXPECT_EQ(trace.records[1].step, 7);
  EXPECT_EQ(trace.records[1].layer, 1);
  EXPECT_THAT(trace.records[0].tokens, ElementsAre(4, 5));
  EXPECT_THAT(trace.records[0].of_rank(0, 3), ElementsAre(4, 3, 1));
  EXPECT_THAT(trace.records[0].of_rank(1, 3), ElementsAre(0, 5, 5));
}

TEST(RoutingTraceTest, WritesTheSameBytes) {
  const auto trace = ParseRoutingTrace("t.jsonl", absl::StrCat(kHeader, kFirst, kSecond)).value();
  EXPECT_EQ(HeaderLine(trace.header), kHeader);
  EXPECT_EQ(RecordLine(trace.records[0]), kFirst);
  EXPECT_EQ(RecordLine(trace.records[1]), kSecond);
}

TEST(RoutingTraceTest, LastLineNeedsNoEnd) {
  const std::string text = absl::StrCat(kHeader, kFirst);
  EXPECT_TRUE(ParseRoutingTrace("t", absl::string_view(text).substr(0, text.size() - 1)).ok());
}

TEST(RoutingTraceTest, NamesFileLineAndReason) {
  EXPECT_EQ(ErrorOf(""), "t.jsonl:1: an empty file");
  EXPECT_EQ(ErrorOf(kHeader), "t.jsonl:2: no records after the header");
  EXPECT_THAT(ErrorOf("{\"loss\":1}\n"), HasSubstr("t.jsonl:1: no recorded routing, expected"));
  EXPECT_THAT(ErrorOf(absl::StrCat(kHeader, "{\"step\":7,\n")), HasSubstr("t.jsonl:2: JSON: "));
  EXPECT_THAT(ErrorOf(absl::StrCat(kHeader, kFirst, "\n", kSecond)), HasSubstr("t.jsonl:3: "));
  EXPECT_EQ(ErrorOf(absl::StrCat(kHeader, kSecond, kFirst)),
            "t.jsonl:3: step 7, layer 0 after step 7, layer 1, expected steps and their layers in "
            "ascending order");
  EXPECT_THAT(ErrorOf(absl::StrCat(kHeader, kFirst, kFirst)), HasSubstr("t.jsonl:3: step 7"));
}

TEST(RoutingTraceTest, HeadersThatDoNotFitAreRefused) {
  const std::pair<const char*, const char*> changes[] = {
      {"\"ranks\":2", "\"ranks\":0"},
      {"\"ranks\":2", "\"ranks\":-2"},
      {"\"ranks\":2", "\"ranks\":2.0"},
      {"\"ranks\":2", "\"ranks\":\"2\""},
      {"\"ranks\":2", "\"ranks\":18446744073709551615"},
      {"\"ranks\":2", "\"ranks\":4097"},
      {"\"ranks\":2", "\"ranks\":3"},              // EP 2 does not divide it
      {"parallel_size\":2", "parallel_size\":4"},  // more than the ranks
      {"\"num_experts\":3", "\"num_experts\":16385"},
      {"\"topk\":2", "\"topk\":4"},
      {"\"hidden_size\":64", "\"hidden_size\":65537"},
      {"bf16", "f64"},
      {"\"bf16\"", "2"},
      {"\"moe_layers\":2", "\"moe_layers\":0"},
      {"\"topk\"", "\"top_k\""},
      {"\"topk\":2", "\"topk\":2,\"more\":1"},
      {"\"topk\":2", "\"topk\":2,\"topk\":2"},
      {"routing/1", "routing/2"}};
  for (const auto& [from, to] : changes) {
    const std::string header = absl::StrReplaceAll(kHeader, {{from, to}});
    ASSERT_NE(header, kHeader) << from;
    EXPECT_THAT(ErrorOf(absl::StrCat(header, kFirst)), HasSubstr("t.jsonl:1: ")) << to;
  }
}

TEST(RoutingTraceTest, RecordsThatDoNotFitAreRefused) {
  const std::pair<const char*, const char*> changes[] = {
      {"\"step\":7", "\"step\":-1"},
      {"\"layer\":0", "\"layer\":2"},
      {"[4,5]", "[4]"},
      {"[4,5]", "[4,5,6]"},
      {"[4,5]", "[4,-5]"},
      {"[4,5]", "[4,4]"},          // fewer tokens than slots for one expert
      {"[4,5]", "[4,536870909]"},  // one past 2^29 in all
      {"[4,3,1]", "[4,3]"},
      {"[4,3,1]", "[4,3,1,0]"},
      {"[4,3,1]", "[4,3,-1]"},
      {"[4,3,1]", "[4,3,1.5]"},
      {"[4,3,1]", "[4,3,null]"},
      {"[4,3,1]", "[5,3,1]"},
      {"[4,3,1]", "[[4],3,1]"},
      {"[4,3,1]", "[[[4]],3,1]"},  // too deep
      {"[4,3,1]", "{}"},
      {"\"slots\"", "\"slot\""},
      {"\"step\":7", "\"step\":7,\"time\":1"}};
  for (const auto& [from, to] : changes) {
    const std::string record = absl::StrReplaceAll(kFirst, {{from, to}});
    ASSERT_NE(record, kFirst) << from;
    EXPECT_THAT(ErrorOf(absl::StrCat(kHeader, record)), HasSubstr("t.jsonl:2: ")) << to;
  }
  EXPECT_TRUE(
      ParseRoutingTrace(
          "t", absl::StrCat(kHeader, absl::StrReplaceAll(kFirst, {{"[4,5]", "[4,536870908]"}})))
          .ok());
}

TEST(RoutingTraceTest, EveryCutOfAFileIsAnErrorOrWhole) {
  const std::string text = absl::StrCat(kHeader, kFirst, kSecond);
  const size_t one = std::string(kHeader).size() + std::string(kFirst).size();
  for (size_t length = 0; length < text.size(); ++length) {
    const bool whole = length + 1 >= text.size() || length == one || length + 1 == one;
    EXPECT_EQ(ParseRoutingTrace("t", absl::string_view(text).substr(0, length)).ok(), whole)
        << length;
  }
}

// Without a look at the bytes, which may be those of a sparse file of any size.
TEST(RoutingTraceTest, LongFilesAndLinesAreRefusedUnread) {
  constexpr size_t kBytes = size_t{1} << 38;  // none of which can be read
  void* const none =
      ::mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(none, MAP_FAILED);
  EXPECT_EQ(ParseRoutingTrace("t", {static_cast<const char*>(none), kBytes}).status().message(),
            "t: 274877906944 bytes, expected at most 268435456: keep a part of the steps");
  ::munmap(none, kBytes);
  const std::string line((int64_t{1} << 25) + 1, ' ');
  EXPECT_THAT(ErrorOf(absl::StrCat(line, "\n", kHeader)),
              HasSubstr("t.jsonl:1: JSON: JSON of 33554433 bytes, expected at most 33554432"));
}

TEST(RoutingTraceTest, CountsOfAllRecordsTogetherAreBounded) {
  if (testing::kSanitized) GTEST_SKIP() << "a matter of size";
  // 2^10 ranks x 2^10 experts are the most of one record, of which 8 with their tokens are too
  // many.
  RoutingTraceHeader header{.ranks = 1 << 10, .num_experts = 1 << 10, .top_k = 1, .moe_layers = 64};
  RoutingTraceRecord record{.tokens = std::vector<int64_t>(1 << 10, 0),
                            .slots = std::vector<int64_t>(1 << 20, 0)};
  std::string text = HeaderLine(header);
  for (record.layer = 0; record.layer < 8; ++record.layer) text += RecordLine(record);
  EXPECT_EQ(ErrorOf(text),
            "t.jsonl:9: more than 8388608 counts in all, expected fewer: keep a part of the "
            "steps");
}

TEST(RoutingTraceTest, RunsWhoseFileCouldNotBeReadDoNotFit) {
  const RoutingTraceHeader header{.ranks = 1 << 6, .num_experts = 127, .hidden_size = 1 << 16};
  const auto fits = [](const RoutingTraceHeader& h, int64_t steps, int64_t tokens) {
    return CheckRoutingTraceFits(h, steps, tokens);
  };
  EXPECT_TRUE(fits(header, 1 << 10, kTraceMostTokens).ok());  // 2^10 x 2^6 x 128 = 2^23 counts
  EXPECT_EQ(
      fits(header, (1 << 10) + 1, 1).message(),
      "8396800 counts in all, records x ranks x (experts + 1), is more than can be read back, "
      "expected at most 8388608");
  EXPECT_THAT(fits(header, 1, kTraceMostTokens + 1).message(), HasSubstr("tokens a step"));
  const auto message = [&](auto change) {
    RoutingTraceHeader other = header;
    change(other);
    return std::string(fits(other, 1, 1).message());
  };
  EXPECT_THAT(message([](auto& h) { ++h.hidden_size; }), HasSubstr("65537 columns of a row"));
  EXPECT_THAT(message([](auto& h) { h.ranks = 4097; }), HasSubstr("4097 ranks"));
  EXPECT_THAT(message([](auto& h) { h.num_experts = 16385; }), HasSubstr("16385 experts"));
  EXPECT_THAT(message([](auto& h) { h.ranks = 1 << 10, h.num_experts = 1025; }),
              HasSubstr("1049600 counts a record"));
  EXPECT_THAT(message([](auto& h) { h.moe_layers = 1 << 21; }), HasSubstr("2097152 records"));
}

TEST(RoutingTraceTest, RecordsAreBoundedHoweverSmall) {
  if (testing::kSanitized) GTEST_SKIP() << "a matter of size";
  RoutingTraceHeader header{.top_k = 1};
  RoutingTraceRecord record{.tokens = {0}, .slots = {0}};
  std::string text = HeaderLine(header);
  for (; record.step < kTraceMostRecords; ++record.step) text += RecordLine(record);
  text += "{}\n";
  EXPECT_EQ(ErrorOf(text),
            "t.jsonl:1048578: more than 1048576 records, expected fewer: keep a part of the steps");
}

}  // namespace
}  // namespace moe
