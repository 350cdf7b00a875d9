#include "moe/io/checkpoint.h"

#include <filesystem>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/moe/io/io_test.h"
#include "tests/moe/status_is.h"

namespace moe {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using enum absl::StatusCode;
using testing::StatusIs;

// A file with one-byte tensors: the byte is the tensor's place, then a tag of the file.
std::string Shard(const std::vector<std::string>& names, char tag) {
  std::string header = "{", data;
  for (const std::string& name : names) {
    const size_t at = data.size();
    data += {static_cast<char>('0' + at / 2), tag};
    absl::StrAppend(&header, at == 0 ? "\"" : ",\"", name,
                    R"(":{"dtype":"U8","shape":[2],"data_offsets":[)", at, ",", at + 2, "]}");
  }
  return SafetensorsBytes(header + "}", data);
}

constexpr char kIndex[] = R"({"metadata":{"total_size":6},"weight_map":{)"
                          R"("w.a":"s-1.safetensors","w.b":"s-2.safetensors",)"
                          R"("w.c":"s-1.safetensors"}})";

class CheckpointTest : public IoTest {
 protected:
  // The tensor's bytes as text, or the error.
  static std::string DataOf(Checkpoint& checkpoint, const std::string& name) {
    const auto found = checkpoint.Find(name);
    if (!found.ok()) return std::string(found.status().message());
    const auto data = found->file->Data(*found->tensor);
    return {data.begin(), data.end()};
  }
  std::string WriteSharded() const {
    Write("s-1.safetensors", Shard({"w.a", "w.c", "unlisted"}, 'x'));
    Write("s-2.safetensors", Shard({"w.b"}, 'y'));
    return Write("model.safetensors.index.json", kIndex);
  }
};

TEST_F(CheckpointTest, ReadsOneFile) {
  Write("model.safetensors", Shard({"w.a", "w.b"}, 'm'));
  for (const std::string& path : {Path("model.safetensors"), root_.string()}) {
    auto checkpoint = Checkpoint::Open(path).value();
    EXPECT_EQ(checkpoint.path(), Path("model.safetensors"));
    EXPECT_THAT(checkpoint.Names(), ElementsAre("w.a", "w.b"));
    EXPECT_TRUE(checkpoint.Contains("w.b"));
    EXPECT_FALSE(checkpoint.Contains("w.c"));
    EXPECT_EQ(DataOf(checkpoint, "w.b"), "1m");
    EXPECT_EQ(checkpoint.Find("w.c").status().code(), kNotFound);
    EXPECT_THAT(DataOf(checkpoint, "w.c"), HasSubstr("model.safetensors: no tensor 'w.c'"));
  }
}

TEST_F(CheckpointTest, ReadsShards) {
  const std::string index = WriteSharded();
  for (const std::string& path : {index, root_.string(), root_.string() + "/"}) {
    auto checkpoint = Checkpoint::Open(path).value();
    EXPECT_THAT(checkpoint.Names(), ElementsAre("w.a", "w.b", "w.c"));
    EXPECT_EQ(DataOf(checkpoint, "w.c"), "1x");
    EXPECT_EQ(DataOf(checkpoint, "w.b"), "0y");
    EXPECT_EQ(DataOf(checkpoint, "w.a"), "0x");
    // What the map does not list is not in the checkpoint.
    EXPECT_EQ(checkpoint.Find("unlisted").status().code(), kNotFound);
  }
}

TEST_F(CheckpointTest, AnIndexWithoutFolderInItsPathIsOfThisFolder) {
  WriteSharded();
  const fs::path before = fs::current_path();
  fs::current_path(root_);
  auto checkpoint = Checkpoint::Open("model.safetensors.index.json");
  const std::string data = checkpoint.ok() ? DataOf(*checkpoint, "w.b") : "";
  fs::current_path(before);
  EXPECT_EQ(data, "0y") << checkpoint.status();
}

TEST_F(CheckpointTest, ShardsAreOpenedWhenNeeded) {
  WriteSharded();
  fs::remove(Path("s-2.safetensors"));
  auto checkpoint = Checkpoint::Open(root_.string()).value();
  EXPECT_EQ(DataOf(checkpoint, "w.a"), "0x");
  EXPECT_EQ(checkpoint.Find("w.b").status().code(), kDataLoss);
  EXPECT_THAT(DataOf(checkpoint, "w.b"),
              HasSubstr("index.json: tensor 'w.b': is in 's-2.safetensors', which is not there"));
  // And once: the first stays open though its name goes.
  fs::remove(Path("s-1.safetensors"));
  EXPECT_EQ(DataOf(checkpoint, "w.c"), "1x");
}

TEST_F(CheckpointTest, PointersOutliveAMove) {
  WriteSharded();
  auto checkpoint = Checkpoint::Open(root_.string()).value();
  const auto found = checkpoint.Find("w.a").value();
  const Checkpoint moved = std::move(checkpoint);
  EXPECT_THAT(found.file->Data(*found.tensor), ElementsAre('0', 'x'));
}

TEST_F(CheckpointTest, AShardThatLacksATensorOfTheMapIsRefused) {
  WriteSharded();
  Write("s-1.safetensors", Shard({"w.a"}, 'x'));
  auto checkpoint = Checkpoint::Open(root_.string()).value();
  // Also when another of its tensors is asked for.
  EXPECT_EQ(checkpoint.Find("w.a").status().code(), kDataLoss);
  EXPECT_THAT(DataOf(checkpoint, "w.a"), HasSubstr("tensor 'w.c': is not in 's-1.safetensors'"));
}

TEST_F(CheckpointTest, AMalformedShardIsNamed) {
  WriteSharded();
  Write("s-2.safetensors", "12345678");
  auto checkpoint = Checkpoint::Open(root_.string()).value();
  EXPECT_EQ(checkpoint.Find("w.b").status().code(), kDataLoss);
  EXPECT_THAT(DataOf(checkpoint, "w.b"), HasSubstr("s-2.safetensors: a header of"));
}

TEST_F(CheckpointTest, AbsentPathsAreNotFound) {
  EXPECT_EQ(Checkpoint::Open(Path("no")).status().code(), kNotFound);
  EXPECT_EQ(Checkpoint::Open(Path("no.json")).status().code(), kNotFound);
  EXPECT_THAT(Checkpoint::Open(root_.string()),
              StatusIs(kNotFound, "has neither model.safetensors nor"));
}

TEST(ShardIndexTest, NamesMustBePlain) {
  for (const char* const name : {"../x.safetensors", "/x.safetensors", "a/x.safetensors", ".", "..",
                                 "", ".x.safetensors", "x", "x.bin", "x\\u0000.safetensors"}) {
    const auto map =
        ParseShardIndex("i.json", absl::StrCat(R"({"weight_map":{"t":")", name, "\"}}"));
    EXPECT_THAT(map, StatusIs(kDataLoss, "i.json: tensor 't': is in \"")) << name;
  }
  const auto map = ParseShardIndex("i.json", R"({"weight_map":{"t":"a..b.safetensors"}})").value();
  EXPECT_EQ(map.at("t"), "a..b.safetensors");
}

TEST(ShardIndexTest, MalformedIndexesAreRefused) {
  for (const char* const text :
       {"", "[]", "1", "{}", R"({"weight_map":[]})", R"({"weight_map":{}})",
        R"({"weight_map":{"t":1}})", R"({"weight_map":{"t":["a.safetensors"]}})",
        R"({"weight_map":{"t":"a.safetensors","t":"b.safetensors"}})",
        R"({"weight_map":{"t":"a.safetensors"},"weight_map":{"u":"a.safetensors"}})",
        R"({"metadata":{"weight_map":{"t":"a.safetensors"}}})", R"([{"weight_map":{"t":"a"}}])",
        R"({"weight_map":{"t":{"u":"a.safetensors"}}})",
        R"({"weight_map":{"t":"a.safetensors"})"}) {
    EXPECT_THAT(ParseShardIndex("i.json", text), StatusIs(kDataLoss, "i.json: ")) << text;
  }
}

}  // namespace
}  // namespace moe
