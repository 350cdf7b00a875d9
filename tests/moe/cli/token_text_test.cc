// Ids to text: what the package tokenizers decodes (tests/golden/generate_tokenizers.py).
#include "moe/cli/generate/token_text.h"

#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "moe/io/tokenizer_file.h"

namespace moe::cli {
namespace {

using ::testing::HasSubstr;
using Ids = std::vector<int32_t>;

// A tokenizer.json of these tokens, ids from 0 on; <s> has the last.
std::string Tokenizer(const std::vector<std::string>& tokens, const std::string& decoder) {
  nlohmann::json vocabulary = nlohmann::json::object();
  for (const std::string& token : tokens) vocabulary[token] = vocabulary.size();
  nlohmann::json special = {{"id", tokens.size()}, {"content", "<s>"}, {"special", true}};
  return absl::StrCat(R"({"added_tokens": [)", special.dump(), R"(], "decoder": )", decoder,
                      R"(, "model": {"type": "BPE", "vocab": )", vocabulary.dump(), "}}");
}

// The text that comes with each token, separated by bars; then the text at the end.
std::string Streamed(const TokenTable& table, const Ids& ids) {
  TokenText text(table);
  std::string streamed;
  for (const int32_t id : ids) streamed += text.Take(id) + "|";
  return streamed + text.End();
}

TEST(TokenTextTest, ByteLevelTokensAreBytes) {
  const TokenTable table =
      TokenTable::Parse("f", Tokenizer({"Ġa", "Ã", "©", "Ċ", "a b", "é€"},
                                       R"({"type": "ByteLevel", "add_prefix_space": true})"))
          .value();
  EXPECT_EQ(Streamed(table, {0, 1, 2, 3}), " a||é|\n|");
  EXPECT_EQ(Streamed(table, {1, 6, 2, 99, -1}), "||é|||");  // special, and no token
  EXPECT_EQ(Streamed(table, {1, 0, 1}), "|\xEF\xBF\xBD a||\xEF\xBF\xBD");
  EXPECT_EQ(Streamed(table, {4, 5}), "a b|é€|");  // characters that stand for no byte
}

TEST(TokenTextTest, FallbackBytesAndTheFirstSpace) {
  const std::vector<std::string> tokens = {"▁a", "<0xE2>", "<0x82>", "<0xAC>", "<0xZZ>", "▁"};
  const TokenTable table = TokenTable::Parse("f", Tokenizer(tokens,
                                                            R"({"type": "Sequence", "decoders": [
                        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                        {"type": "ByteFallback"}, {"type": "Fuse"},
                        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]})"))
                               .value();
  EXPECT_EQ(Streamed(table, {6, 0, 0, 1, 2, 3, 4}), "|a| a|||€|<0xZZ>|");
  EXPECT_EQ(Streamed(table, {5, 0}), "| a|");
  const TokenTable meta =
      TokenTable::Parse("f", Tokenizer({"▁▁a"}, R"({"type": "Metaspace", "replacement": "▁"})"))
          .value();
  EXPECT_EQ(Streamed(meta, {0, 0}), "a|  a|");
}

TEST(TokenTextTest, OtherFilesAreRefused) {
  const auto error = [](const std::string& document) {
    return std::string(TokenTable::Parse("f", document).status().message());
  };
  const std::string bytes = R"({"type": "ByteLevel"})";
  EXPECT_THAT(error("{"), HasSubstr("f: malformed JSON"));
  EXPECT_THAT(error("[]"), HasSubstr("f: there is no object 'model', expected a tokenizer.json"));
  EXPECT_THAT(error(R"({"model": {"type": "Unigram"}})"),
              HasSubstr("f: the model is 'Unigram', expected BPE"));
  EXPECT_THAT(error(R"({"model": {"type": "BPE", "vocab": {}}})"), HasSubstr("f: has no decoder"));
  EXPECT_THAT(error(Tokenizer({}, R"({"type": "WordPiece"})")),
              HasSubstr("f: the decoder has a step 'WordPiece', expected ByteLevel, Replace"));
  EXPECT_THAT(error(Tokenizer({}, R"({"type": "Strip", "content": " ", "start": 1})")),
              HasSubstr("strips more than the first space"));
  EXPECT_THAT(
      error(absl::StrCat(R"({"decoder": )", bytes,
                         R"(, "model": {"type": "BPE", "vocab": {"a": 1, "b": 2, "c": 1}}})")),
      HasSubstr("f: id 1 is of two tokens"));
  for (const char* const id : {"-1", "2147483648", "\"7\"", "0.5", "null"}) {
    EXPECT_THAT(error(absl::StrCat(R"({"decoder": )", bytes,
                                   R"(, "model": {"type": "BPE", "vocab": {"a": )", id, "}}}")),
                HasSubstr("f: token 'a' has the id "))
        << id;
  }
}

TEST(TokenTextTest, IsWhatTokenizersDecodes) {
  const char* const given = std::getenv("MOE_TOKENIZER_LINES");
  int64_t lines = 0;
  for (const char* const kind : {"byte_level", "byte_fallback", "metaspace"}) {
    const std::string folder = absl::StrCat(given ? given : MOE_GOLDEN_TOKENIZERS, "/", kind);
    const TokenTable table = TokenTable::Open(folder + "/tokenizer.json").value();
    std::ifstream file(folder + "/lines.jsonl");
    for (std::string line; std::getline(file, line); ++lines) {
      const auto expected = nlohmann::json::parse(line);
      TokenText text(table);
      std::string all;
      for (const int32_t id : expected["ids"].get<Ids>()) {
        const std::string piece = text.Take(id);
        // Pieces are whole characters: none begins within one.
        EXPECT_TRUE(piece.empty() || (piece[0] & 0xC0) != 0x80) << line;
        all += piece;
      }
      EXPECT_EQ(all + text.End(), expected["text"].get<std::string>()) << kind << ": " << line;
    }
  }
  EXPECT_GE(lines, 3 * 60);
}

}  // namespace
}  // namespace moe::cli
