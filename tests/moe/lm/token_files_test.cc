
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moe/lm/text_data.h"
#include "moe/lm/tokens.h"
#include "tests/moe/io/io_test.h"
#include "tests/moe/status_is.h"

namespace moe::lm {
namespace {

using ::testing::HasSubstr;
using enum absl::StatusCode;
using ::moe::testing::StatusIs;

template <typename V>
std::string Raw(const std::vector<V>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(V)};
}

// An index by its fields; by default of 5 ids of uint16 in two documents.
struct Index {
  std::string magic = std::string("MMIDIDX\0\0", 9);
  uint64_t version = 1;
  uint8_t type = 8;
  std::vector<int32_t> lengths = {2, 0, 3};
  std::vector<int64_t> pointers = {0, 4, 4};
  std::vector<int64_t> documents = {0, 1, 3};
  uint64_t sequence_count = 3, document_count = 3;

  std::string Bytes() const {
    return magic + Raw<uint64_t>({version}) + static_cast<char>(type) +
           Raw<uint64_t>({sequence_count, document_count}) + Raw(lengths) + Raw(pointers) +
           Raw(documents);
  }
};

// An index of int32 ids in one document.
Index OneDocument(size_t ids) {
  Index index = {
      .type = 4, .lengths = {static_cast<int32_t>(ids)}, .pointers = {0}, .documents = {0, 1}};
  index.sequence_count = 1;
  index.document_count = 2;
  return index;
}

absl::StatusOr<TokenType> Parse(const std::string& bytes, int64_t bin_bytes = 10) {
  return ParseTokenIndex("x.idx", {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()},
                         bin_bytes);
}

TEST(TokenIndexTest, SaysTheTypeOfItsIds) {
  EXPECT_EQ(Parse(Index().Bytes()).value(), TokenType::kU16);
}

TEST(TokenIndexTest, EveryOtherLengthIsRefused) {
  const std::string whole = Index().Bytes();
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_TRUE(absl::IsDataLoss(Parse(whole.substr(0, size)).status())) << size;
  }
  EXPECT_TRUE(absl::IsDataLoss(Parse(whole + '\0').status()));
}

TEST(TokenIndexTest, EveryFieldIsChecked) {
  constexpr uint64_t kHuge = std::numeric_limits<uint64_t>::max();
  const auto refused = [](const char* message, const std::function<void(Index&)>& change) {
    Index index;
    change(index);
    const absl::Status status = Parse(index.Bytes()).status();
    EXPECT_THAT(status, StatusIs(kDataLoss, message));
    EXPECT_THAT(std::string(status.message()), HasSubstr("x.idx: "));
  };
  refused("does not begin with MMIDIDX", [](Index& i) { i.magic[8] = 1; });
  refused("version 2, expected 1", [](Index& i) { i.version = 2; });
  refused("type 0 of an id, expected 1 to 8", [](Index& i) { i.type = 0; });
  refused("type 9 of an id", [](Index& i) { i.type = 9; });
  refused("ids of type float32, expected integers", [](Index& i) { i.type = 7; });
  refused("for 2 sequences", [](Index& i) { i.sequence_count = 2; });
  refused("expected more", [](Index& i) { i.sequence_count = kHuge; });
  refused("expected more", [](Index& i) { i.document_count = kHuge; });
  // The bytes of so many entries, modulo 2^64, are those of the file.
  refused("expected more", [](Index& i) { i.document_count += uint64_t{1} << 61; });
  refused("sequence 1 has -1 ids", [](Index& i) { i.lengths[1] = -1; });
  refused("sequence 2 begins at byte 5, expected 4", [](Index& i) { i.pointers[2] = 5; });
  refused("sequence 0 begins at byte -2", [](Index& i) { i.pointers[0] = -2; });
  refused("sequence 2 has 4 ids at byte 4, the .bin ends at byte 10",
          [](Index& i) { i.lengths[2] = 4; });
  refused("all sequences have 8 bytes, the .bin 10", [](Index& i) { i.lengths[2] = 2; });
  refused("document 0 begins with sequence 1", [](Index& i) { i.documents[0] = 1; });
  refused("document 2 begins with sequence 0", [](Index& i) { i.documents = {0, 1, 0}; });
  refused("document 2 begins with sequence 4", [](Index& i) { i.documents[2] = 4; });
  refused("end with sequence 2, expected 3", [](Index& i) { i.documents[2] = 2; });
  refused("end with sequence 0, expected 3", [](Index& i) {
    i.documents.clear();
    i.document_count = 0;
  });
}

absl::StatusOr<TokenFile> Open(const std::string& path, TokenType plain,
                               int64_t vocab_size = 65536) {
  return OpenTokenFile(path, plain, vocab_size);
}

class TokenFilesTest : public IoTest {};

TEST_F(TokenFilesTest, APairIsFoundByAnyOfItsNames) {
  Write("x.idx", Index().Bytes());
  Write("x.bin", Raw<uint16_t>({1, 2, 3, 4, 65535}));
  for (const char* name : {"x", "x.bin", "x.idx"}) {
    const auto file = Open(Path(name), TokenType::kU32).value();
    EXPECT_EQ(file.path, Path("x.bin"));
    EXPECT_EQ(file.type, TokenType::kU16);
  }
  Write("x.bin", Raw<uint16_t>({1, 2, 3, 4}));
  EXPECT_TRUE(absl::IsDataLoss(Open(Path("x"), TokenType::kU16).status()));
  std::filesystem::remove(Path("x.bin"));
  EXPECT_TRUE(absl::IsNotFound(Open(Path("x"), TokenType::kU16).status()));
}

TEST_F(TokenFilesTest, PlainArraysAreWholeAndNotEmpty) {
  const auto file = Open(Write("a.bin", Raw<uint32_t>({7, 70000})), TokenType::kU32).value();
  EXPECT_EQ(file.type, TokenType::kU32);
  EXPECT_THAT(Open(Write("b", "abc"), TokenType::kU16),
              StatusIs(kDataLoss, "3 bytes, expected a multiple of 2"));
  EXPECT_TRUE(absl::IsInvalidArgument(Open(Write("c", ""), TokenType::kU16).status()));
  EXPECT_TRUE(absl::IsNotFound(Open(Path("d"), TokenType::kU16).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(Open(root_.string(), TokenType::kU16).status()));
}

// The first bytes that each format's own writers write.
TEST_F(TokenFilesTest, OtherFormatsAreRefusedByNameWithWhatToDo) {
  const std::string ids = Raw(std::vector<uint16_t>(100, 7));
  std::vector<int32_t> header(256);
  header[0] = 20240520;
  std::vector<int32_t> wide_header = header;
  wide_header[0] = 20240801;
  const std::string json = R"({"x":{"dtype":"U8","shape":[200],"data_offsets":[0,200]}})";
  const struct {
    const char* name;
    std::string bytes;
    const char* says;
  } files[] = {
      {"npy", "\x93NUMPY" + std::string("\1\0", 2) + ids, "is numpy's .npy, which has a header"},
      {"npy of odd size", "\x93NUMPY\1", "tofile(IDS), then --tokens IDS --tokens-dtype uint32"},
      {"llm.c", Raw(header) + ids,
       "tail -c +1025 FILE > IDS, then --tokens IDS --tokens-dtype uint16"},
      {"llm.c of Llama", Raw(wide_header) + ids,
       "FILE > IDS, then --tokens IDS --tokens-dtype uint32"},
      {"safetensors", SafetensorsBytes(json, ids), "is a safetensors file"},
      {"index", Index().Bytes(), "is a Megatron index, expected a bare array"},
      {"zip", "PK\3\4" + ids, "is a zip archive"},
      {"zstd", "\x28\xb5\x2f\xfd" + ids, "is compressed by zstd, expected a bare array"},
      {"text", std::string(63, 'a') + "\n", "is text, expected a bare array of ids: --data reads"},
      {"UTF-8", std::string(70, 'a') + "\xc3\xa9", "is text"},
  };
  for (const auto& [name, bytes, says] : files) {
    for (const TokenType type : {TokenType::kU16, TokenType::kU32, TokenType::kI64}) {
      EXPECT_THAT(Open(Write(name, bytes), type), StatusIs(kDataLoss, says));
    }
  }
  // The end and the middle of a long file are looked at, too.
  std::string text(size_t{1} << 20, 'a');
  EXPECT_THAT(Open(Write("long", text), TokenType::kU16), StatusIs(kDataLoss, "is text"));
  for (const size_t at : {size_t{0}, text.size() / 2, text.size() - 1}) {
    std::string mixed = text;
    mixed[at] = '\1';
    EXPECT_TRUE(Open(Write("mixed", mixed), TokenType::kU16).ok()) << at;
  }
  EXPECT_TRUE(Open(Write("short", text.substr(0, 62)), TokenType::kU16).ok());
}

TEST_F(TokenFilesTest, HalvesOfWiderIdsAreRefusedWithTheTypeThatReadsThem) {
  std::vector<int64_t> ids(300);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(1 + i * 211);  // to 63,090
  const std::string u16 = Write("u16", Raw<uint16_t>({ids.begin(), ids.end()}));
  const std::string u32 = Write("u32", Raw<uint32_t>({ids.begin(), ids.end()}));
  const std::string i64 = Write("i64", Raw(ids));
  const std::string wide = "every second id is 0, which makes the others lower halves, expected ";
  EXPECT_THAT(Open(u32, TokenType::kU16),
              StatusIs(kInvalidArgument, "'" + u32 + "': " + wide + "--tokens-dtype uint32"));
  EXPECT_THAT(Open(i64, TokenType::kU16),
              StatusIs(kInvalidArgument, wide + "--tokens-dtype int64"));
  EXPECT_THAT(Open(i64, TokenType::kU32),
              StatusIs(kInvalidArgument, wide + "--tokens-dtype int64"));
  EXPECT_TRUE(Open(u16, TokenType::kU16).ok());
  EXPECT_TRUE(Open(u32, TokenType::kU32).ok());
  EXPECT_TRUE(Open(i64, TokenType::kI64).ok());
  // Upper halves of a larger vocabulary's ids have few values, but not all are 0.
  for (int64_t& id : ids) id += 65000;
  const std::string large = Write("large", Raw<uint32_t>({ids.begin(), ids.end()}));
  EXPECT_THAT(Open(large, TokenType::kU16, 128256),
              StatusIs(kInvalidArgument, "every second id is at most 1, which"));
  EXPECT_TRUE(Open(large, TokenType::kU32, 128256).ok());
  // Zeros alone, and few ids, prove nothing.
  EXPECT_TRUE(
      Open(Write("zeros", Raw<uint16_t>(std::vector<uint16_t>(400))), TokenType::kU16).ok());
  EXPECT_TRUE(Open(Write("few", Raw<uint32_t>({1, 2, 3})), TokenType::kU16).ok());
}

TEST_F(TokenFilesTest, TheFirstIdOutsideTheVocabularyIsNamed) {
  const std::string path = Write("a", Raw<uint16_t>({1, 2, 300, 400}));
  const absl::Status status = ReadTokenFiles({.paths = {path}, .vocab_size = 300}, 1).status();
  EXPECT_THAT(status,
              StatusIs(kInvalidArgument, "'" + path + "': token 2 is 300, expected 0 to 299"));
  Write("x.bin", Raw<int32_t>({0, -1}));
  Write("x.idx", OneDocument(2).Bytes());
  EXPECT_THAT(
      std::string(ReadTokenFiles({.paths = {Path("x")}, .vocab_size = 300}, 1).status().message()),
      HasSubstr("token 1 is -1, expected 0 to 299"));
}

// Files of several types are one text, split as bytes are.
TEST_F(TokenFilesTest, AreSplitAsText) {
  std::vector<uint8_t> bytes(2 * kHeldOutBlock + 77);
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<uint8_t>(1 + (i * 7 + i / 1000) % 251);
  }
  const size_t cut = kHeldOutBlock + 5;
  const std::string narrow = Write("narrow", Raw<uint16_t>({bytes.begin(), bytes.begin() + cut}));
  const std::string wide = Write("wide.bin", Raw<int32_t>({bytes.begin() + cut, bytes.end()}));
  Write("wide.idx", OneDocument(bytes.size() - cut).Bytes());
  const auto text = ReadCorpus({Write("text", Raw(bytes))}, 16);
  const auto tokens = ReadTokenFiles({.paths = {narrow, wide}, .vocab_size = 256}, 16);
  ASSERT_TRUE(text.ok() && tokens.ok()) << text.status() << tokens.status();
  for (const auto part : {&Corpus::train, &Corpus::held_out}) {
    const Tokens& expected = (*text).*part;
    const Tokens& got = (*tokens).*part;
    ASSERT_EQ(got.size(), expected.size());
    std::vector<int32_t> expected_ids(expected.size()), ids(got.size());
    expected.Copy(0, absl::MakeSpan(expected_ids));
    got.Copy(0, absl::MakeSpan(ids));
    EXPECT_EQ(ids, expected_ids);
  }
  std::vector<int32_t> few(3);
  tokens->held_out.Copy(4, absl::MakeSpan(few));  // across the files
  EXPECT_THAT(few, ::testing::ElementsAre(bytes[cut - 1], bytes[cut], bytes[cut + 1]));
}

}  // namespace
}  // namespace moe::lm
