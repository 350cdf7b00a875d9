#include "moe/io/bounded_json.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/moe/status_is.h"

namespace moe {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;
using enum absl::StatusCode;
using testing::StatusIs;

std::string ErrorOf(const std::string& document, const JsonLimits& limits = {}) {
  const auto parsed = ParseBoundedJson("f.json", document, limits);
  EXPECT_EQ(parsed.status().code(), kDataLoss) << document.substr(0, 100);
  return std::string(parsed.status().message());
}

TEST(BoundedJsonTest, GivesWhatTheLibraryGivesForAnyKindOfValueAndAnyNesting) {
  for (const char* const text :
       {R"( {"o": {"l": [1, -2, 2.5, "t", true, null, [], {}]}, "u": "\u00e9\n"} )",
        R"([[1,[2,[3]],{"a":[{"b":[]},{"b":{"c":0}}]}],"x",{"y":{"z":[1,2]}}])"}) {
    // As text: 1 and 1.0 would be equal.
    EXPECT_EQ(ParseBoundedJson("f.json", text).value().dump(), Json::parse(text).dump());
  }
}

TEST(BoundedJsonTest, NamesFilePlaceAndReason) {
  EXPECT_EQ(ErrorOf("{\n  \"a\": 1,\n  \"a\": 2}"),
            "f.json: key 'a' stands there twice (line 3, column 5)");
  EXPECT_THAT(ErrorOf("{\n \"a\": tru}"), HasSubstr("f.json: malformed JSON, "));
  EXPECT_THAT(ErrorOf("{\n \"a\": tru}"), HasSubstr("(line 2, column 10)"));
  EXPECT_THAT(ErrorOf(""), HasSubstr("(line 1, column 1)"));
}

// As a mapped file of 0 bytes is.
TEST(BoundedJsonTest, ADocumentWithoutMemoryIsMalformed) {
  EXPECT_THAT(ParseBoundedJson("f.json", absl::string_view()),
              StatusIs(kDataLoss, "(line 1, column 1)"));
}

TEST(BoundedJsonTest, KeysMayComeAgainInOtherObjects) {
  EXPECT_TRUE(ParseBoundedJson("f.json", R"([{"a":{"a":1}},{"a":2}])").ok());
}

TEST(BoundedJsonTest, MalformedDocumentsAreRefused) {
  for (const char* const text : {"{", "}", "[1,]", "{\"a\"}", "nul", "1 2", "\"\x80\"", "\"\x01\"",
                                 "\"\\ud800\"", "1e999", "{\"a\":1}x", "// no comments\n1"}) {
    EXPECT_THAT(ErrorOf(text), HasSubstr("malformed JSON")) << text;
  }
}

TEST(BoundedJsonTest, EveryLimitHoldsExactly) {
  EXPECT_TRUE(ParseBoundedJson("f", "[[[1]]]", {.max_depth = 3}).ok());
  EXPECT_THAT(ErrorOf("[[[1]]]", {.max_depth = 2}), HasSubstr("nested more than 2 deep"));
  EXPECT_TRUE(ParseBoundedJson("f", "[1,{\"a\":2}]", {.max_values = 4}).ok());
  EXPECT_THAT(ErrorOf("[1,{\"a\":2}]", {.max_values = 3}), HasSubstr("more than 3 values"));
  EXPECT_TRUE(ParseBoundedJson("f", "[1, 2]", {.max_bytes = 6}).ok());
  EXPECT_THAT(ErrorOf("[1, 2]", {.max_bytes = 5}), HasSubstr("6 bytes, expected at most 5"));
}

TEST(BoundedJsonTest, PythonsNonFiniteNumbersAreTextsWhereTheyAreAskedFor) {
  const JsonLimits limits = {.non_finite_as_text = true};
  const std::string text =
      R"({"a": [0.0, Infinity], "b":-Infinity, "NaN": NaN, "s": "-Infinity \" NaN"})";
  EXPECT_EQ(ParseBoundedJson("f", text, limits).value().dump(),
            R"({"NaN":"NaN","a":[0.0,"Infinity"],"b":"-Infinity","s":"-Infinity \" NaN"})");
  EXPECT_EQ(ParseBoundedJson("f", "NaN", limits).value(), "NaN");
  for (const char* const one : {"[NaN", "Infinit", "1NaN", "NaN1", "--Infinity", "1e-Infinity",
                                "NaNNaN", "+Infinity", "nan", "[NaN Infinity]"}) {
    EXPECT_THAT(ErrorOf(one, limits), HasSubstr("malformed JSON")) << one;
  }
  EXPECT_THAT(ErrorOf("[1,\n Infinity x]", limits), HasSubstr("(line 2, column 11)"));
  EXPECT_THAT(ErrorOf("[NaN]"), HasSubstr("malformed JSON"));
}

// Ten characters and the two quotes, and so on: the bound is on what the lexer must hold.
TEST(BoundedJsonTest, LongTokensAndGapsAreRefused) {
  const JsonLimits limits = {.max_token_bytes = 12};
  EXPECT_TRUE(ParseBoundedJson("f", "\"0123456789\"", limits).ok());
  EXPECT_THAT(ErrorOf("\"0123456789x\"", limits), HasSubstr("more than 12 bytes"));
  EXPECT_THAT(ErrorOf("\"\\\"\\\"\\\"\\\"\\\"\\\"\"", limits), HasSubstr("more than 12 bytes"));
  EXPECT_THAT(ErrorOf("1234567890123", limits), HasSubstr("more than 12 bytes"));
  EXPECT_THAT(ErrorOf("[[[[[[[[[[[[[", limits), HasSubstr("more than 12 bytes"));
  // Also after a whole document: what follows must not go unread.
  EXPECT_THAT(ErrorOf("{}              x", limits), HasSubstr("more than 12 bytes"));
  // Short ones may come as many times as they like.
  EXPECT_TRUE(ParseBoundedJson("f", R"(["a","b",1,2,3,4,5,6,7,8,-9,-1.5e3,"c","d"])", limits).ok());
}

TEST(BoundedJsonTest, DeepNestingEndsAtTheLimitAndNotInTheStack) {
  EXPECT_THAT(ErrorOf(std::string(1 << 20, '[')), HasSubstr("nested more than 32 deep"));
}

TEST(BoundedJsonTest, MessagesStayShortAndPrintable) {
  const std::string message = ErrorOf("{\"" + std::string(100000, 'k') + "\x1b[2J\":1}");
  EXPECT_LT(message.size(), 300u);
  EXPECT_EQ(message.find('\x1b'), std::string::npos);
  EXPECT_EQ(Shown("a\n\x7f\xc3", 3), "a\\x0a\\x7f...");
}

}  // namespace
}  // namespace moe
