#include "moe/checkpoint/manifest.h"

#include <cstdint>
#include <string>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace moe {
namespace {

using ::testing::HasSubstr;

CheckpointManifest Small() {
  CheckpointManifest manifest = {
      .step = 120,
      .created = "2026-11-23T07:10:00Z",
      .sections = {},
      .tensors =
          {{.name = "a.weight", .rows = 4, .cols = 6, .states = {"m", "master"}},
           {.name = "shares", .type = SafetensorsType::kF64, .cols = 4, .states = {"share"}}},
      .files = {{.name = "shard-00000-of-00002.safetensors", .bytes = 900, .header_xxh3 = 7},
                {.name = "shard-00001-of-00002.safetensors", .bytes = 64, .header_xxh3 = 1}},
      .boxes = {}};
  manifest.sections.trainer = R"({ "seed" : 1234, "list": [1, {"x": null}] })";
  const auto add = [&](int32_t tensor, int32_t state, const TensorBox& box, int32_t file) {
    manifest.boxes.push_back({.tensor = tensor,
                              .state = state,
                              .file = file,
                              .box = box,
                              .xxh3 = uint64_t{0x0b3f} << (4 * manifest.boxes.size())});
  };
  add(0, 0, {0, 4, 0, 6}, 0);
  add(0, 1, {0, 3, 0, 2}, 0);
  add(0, 1, {0, 2, 2, 6}, 1);
  add(0, 1, {2, 4, 2, 6}, 0);
  add(0, 1, {3, 4, 0, 2}, 1);
  add(1, 0, {0, 1, 0, 4}, 1);
  return manifest;
}

std::string Document(const CheckpointManifest& manifest) {
  const auto document = SerializeManifest(manifest);
  EXPECT_TRUE(document.ok()) << document.status();
  return document.value_or("");
}

// The document with its checksum made right again.
std::string Sealed(const std::string& document) {
  const std::string body = document.substr(0, document.rfind(",\"checksum\""));
  const XXH128_hash_t hash = XXH3_128bits(body.data(), body.size());
  return absl::StrCat(body, ",\"checksum\":\"", HashHex(hash.high64), HashHex(hash.low64), "\"}\n");
}

std::string ErrorOf(const std::string& document) {
  const auto parsed = ParseManifest("manifest.json", document);
  EXPECT_EQ(parsed.status().code(), absl::StatusCode::kDataLoss) << document;
  EXPECT_TRUE(absl::StartsWith(parsed.status().message(), "manifest.json: ")) << parsed.status();
  return std::string(parsed.status().message());
}

std::string ErrorOfChange(const std::string& from, const std::string& to) {
  const std::string document = Document(Small());
  const size_t at = document.find(from);
  if (at == document.npos) {
    ADD_FAILURE() << "not there: " << from;
    return "";
  }
  std::string changed = document;
  return ErrorOf(Sealed(changed.replace(at, from.size(), to)));
}

std::string TilingOf(const CheckpointManifest& manifest) {
  const absl::Status status = CheckTiling("f", manifest);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  return std::string(status.message());
}

TEST(ManifestTest, WhatIsWrittenIsRead) {
  const CheckpointManifest manifest = Small();
  const std::string document = Document(manifest);
  const auto parsed = ParseManifest("manifest.json", document).value();
  EXPECT_EQ(parsed.step, 120);
  EXPECT_EQ(parsed.created, manifest.created);
  EXPECT_EQ(parsed.sections.trainer, R"({"seed":1234,"list":[1,{"x":null}]})");
  EXPECT_EQ(parsed.sections.hash, "{}");
  ASSERT_EQ(parsed.tensors.size(), 2u);
  EXPECT_EQ(parsed.tensors[0].states, manifest.tensors[0].states);
  EXPECT_EQ(parsed.tensors[1].type, SafetensorsType::kF64);
  ASSERT_EQ(parsed.boxes.size(), manifest.boxes.size());
  for (size_t i = 0; i < manifest.boxes.size(); ++i) {
    EXPECT_EQ(parsed.boxes[i].xxh3, manifest.boxes[i].xxh3);
    EXPECT_EQ(parsed.boxes[i].file, manifest.boxes[i].file);
    EXPECT_EQ(BoxText(parsed.boxes[i].box), BoxText(manifest.boxes[i].box));
  }
  EXPECT_EQ(Document(parsed), document);
  EXPECT_TRUE(CheckTiling("f", parsed).ok());
}

TEST(ManifestTest, AnEmptyTableIsAManifest) {
  const CheckpointManifest empty = {
      .created = "", .sections = {}, .tensors = {}, .files = {}, .boxes = {}};
  EXPECT_TRUE(ParseManifest("f", Document(empty)).ok());
  EXPECT_TRUE(CheckTiling("f", empty).ok());
}

TEST(ManifestTest, SortingBringsFilesAndBoxesIntoOrder) {
  CheckpointManifest manifest = Small();
  std::swap(manifest.files[0], manifest.files[1]);
  for (ManifestBox& box : manifest.boxes) box.file = 1 - box.file;
  std::reverse(manifest.boxes.begin(), manifest.boxes.end());
  SortManifest(manifest);
  EXPECT_EQ(Document(manifest), Document(Small()));
}

TEST(ManifestTest, EveryBitThatFlipsIsFound) {
  std::string document = Document(Small());
  for (char& byte : document) {
    for (int bit = 0; bit < 8; ++bit) {
      byte = static_cast<char>(byte ^ (1 << bit));
      ASSERT_EQ(ParseManifest("f", document).status().code(), absl::StatusCode::kDataLoss);
      byte = static_cast<char>(byte ^ (1 << bit));
    }
  }
}

TEST(ManifestTest, EveryCutIsFound) {
  const std::string document = Document(Small());
  for (size_t size = 0; size < document.size(); ++size) {
    EXPECT_THAT(ErrorOf(document.substr(0, size)), HasSubstr("does not end with a checksum"));
  }
  EXPECT_THAT(ErrorOf(document + " "), HasSubstr("does not end with a checksum"));
}

// A writer that means it: the checksum is right.
TEST(ManifestTest, WhatTheFormatDoesNotHaveIsNamed) {
  const struct {
    const char *from, *to, *message;
  } changes[] = {
      {"\"version\":1", "\"version\":2", "version 2, this program reads version 1"},
      {"moe-checkpoint", "zip", "format \"zip\""},
      {"\"step\":120", "\"step\":-1", "step: -1"},
      {"\"step\":120", "\"step\":1.5", "step: 1.5"},
      {"\"step\"", "\"stop\"", "key 'stop', expected 'step'"},
      {"\"model\":{}", "\"model\":[]", "expected an object"},
      {"\"model\":{}", "\"model\":{},\"model\":{}", "key 'model', expected 'optimizer'"},
      {"\"seed\":1234", "\"list\":1234", "'list' stands there twice"},
      {"\"dtype\":\"F32\"", "\"dtype\":\"I8\"", "dtype 'I8'"},
      {"[4,6]", "[4]", "expected 2 extents"},
      {"[4,6]", "[4,6,1]", "more than 2 extents"},
      {"[4,6]", "[4,0]", "shape: 0"},
      {"[4,6]", "[9223372036854775807,2]", "less than 2^63 bytes"},
      {"[\"m\",\"master\"]", "[]", "has no states"},
      {"[\"m\",\"master\"]", "[\"master\",\"m\"]", "state 'm' after 'master'"},
      {"\"shares\":{", "\"a.weight\":{", "expected each once"},
      {"\"a.weight\":{", "\"a|b\":{", "tensor 'a|b'"},
      {"[0,4,0,6]", "[0,5,0,6]", "box 'a.weight' m [0,5) x [0,6), expected a part of [4, 6]"},
      {"[0,4,0,6]", "[0,0,0,6]", "expected a part of"},
      {"[0,4,0,6]", "[0,4,0]", "expected 4 bounds"},
      {"[0,2,2,6]", "[0,2,0,2]", "stands too late"},
      {"\"file\":1", "\"file\":2", "file: 2"},
      {"{\"tensor\":\"a.weight\"", "{\"tensor\":\"b\"",
       "box of tensor 'b', which is none of 'tensors'"},
      {"\"state\":\"m\"", "\"state\":\"v\"", "none of its states"},
      {"0000000000000b3f", "0B3F", "16 hexadecimal digits"},
      {"\"file\":1,", "", "key 'xxh3', expected 'file'"},
      {",\"xxh3\":\"0000000000000b3f\"", "", "'xxh3' is missing"}};
  for (const auto& [from, to, message] : changes) {
    EXPECT_THAT(ErrorOfChange(from, to), HasSubstr(message)) << to;
  }
}

TEST(ManifestTest, NamesOfFilesStayInTheFolder) {
  for (const char* name : {"../s.safetensors", "/s.safetensors", "a/s.safetensors", ".safetensors",
                           "s.bin", "", "s\\u0000.safetensors", "s s.safetensors"}) {
    EXPECT_THAT(ErrorOfChange("shard-00000-of-00002.safetensors", name),
                HasSubstr("expected a *.safetensors beside the manifest"));
  }
  EXPECT_THAT(ErrorOfChange("shard-00001-of-00002", "shard-00000-of-00002"),
              HasSubstr("expected each once"));
}

TEST(ManifestTest, WhatCouldNotBeReadIsNotWritten) {
  CheckpointManifest manifest = Small();
  manifest.sections.data = "[1]";
  EXPECT_EQ(SerializeManifest(manifest).status().code(), absl::StatusCode::kInvalidArgument);
  manifest = Small();
  manifest.tensors[0].name = "a b";
  EXPECT_EQ(SerializeManifest(manifest).status().code(), absl::StatusCode::kInvalidArgument);
  manifest = Small();
  manifest.tensors[0].name = "\xff";
  EXPECT_EQ(SerializeManifest(manifest).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(TilingTest, WhatIsMissingIsNamed) {
  for (size_t i = 0; i < Small().boxes.size(); ++i) {
    CheckpointManifest manifest = Small();
    manifest.boxes.erase(manifest.boxes.begin() + static_cast<int64_t>(i));
    EXPECT_THAT(TilingOf(manifest), HasSubstr("no box has ")) << i;
  }
  CheckpointManifest manifest = Small();
  manifest.boxes.erase(manifest.boxes.begin() + 3);
  EXPECT_EQ(TilingOf(manifest), "f: tensor 'a.weight' master: no box has [2,3) x [2,6)");
}

TEST(TilingTest, WhatOverlapsIsNamed) {
  CheckpointManifest manifest = Small();
  manifest.boxes[1].box.col_end = 3;
  EXPECT_EQ(TilingOf(manifest),
            "f: tensor 'a.weight' master: boxes [0,3) x [0,3) and [0,2) x [2,6) overlap");
  manifest = Small();
  manifest.boxes[2].box.row_end = 3;
  EXPECT_EQ(TilingOf(manifest),
            "f: tensor 'a.weight' master: boxes [0,3) x [2,6) and [2,4) x [2,6) overlap");
}

}  // namespace
}  // namespace moe
