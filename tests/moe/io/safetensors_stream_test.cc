#include "moe/io/safetensors_stream.h"

#include <csignal>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "moe/io/safetensors.h"
#include "tests/moe/io/io_test.h"
#include "tests/moe/status_is.h"

namespace moe {
namespace {

namespace fs = std::filesystem;
using enum absl::StatusCode;
using testing::StatusIs;

class SafetensorsStreamTest : public IoTest {};

SafetensorsSource Source(const std::string& name, SafetensorsType type,
                         const std::vector<int64_t>& shape, absl::string_view bytes) {
  return {.name = name, .type = type, .shape = shape, .bytes = AsBytes(bytes)};
}

TEST_F(SafetensorsStreamTest, WritesTheBytesOfTheFormat) {
  const std::vector<SafetensorsSource> tensors = {
      Source("z", SafetensorsType::kU8, {3}, "abc"),
      Source("a\"b", SafetensorsType::kI32, {1, 1}, "1234")};
  ASSERT_TRUE(WriteSafetensors(Path("m"), tensors, {{"k", "v"}}).ok());
  std::string header = R"({"__metadata__":{"k":"v"},)"
                       R"("z":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
                       R"("a\"b":{"dtype":"I32","shape":[1,1],"data_offsets":[3,7]}})";
  while (header.size() % 8 != 0) header += ' ';
  EXPECT_EQ(Read(Path("m")), SafetensorsBytes(header, "abc1234"));
  EXPECT_EQ(NumFiles(), 1);
}

TEST_F(SafetensorsStreamTest, WhatIsWrittenIsRead) {
  const std::vector<float> weights = {1.5f, -0.0f, std::numeric_limits<float>::infinity(), 1e-45f};
  const std::vector<int32_t> ids = {-1, 7};
  const std::vector<int64_t> counts = {int64_t{1} << 60};
  const SafetensorsMetadata metadata = {{"format", "pt"}, {"\xc3\xa9\n\"", std::string("\0", 1)}};
  const std::vector<SafetensorsSource> tensors = {
      {"counts", SafetensorsType::kI64, {}, BytesOf(absl::MakeConstSpan(counts))},
      {"", SafetensorsType::kF32, {0, 5}, {}},
      {"ids", SafetensorsType::kI32, {2}, BytesOf(absl::MakeConstSpan(ids))},
      {"w", SafetensorsType::kF32, {2, 2}, BytesOf(absl::MakeConstSpan(weights))}};
  ASSERT_TRUE(WriteSafetensors(Path("m"), tensors, metadata).ok());
  const auto file = SafetensorsFile::Open(Path("m")).value();
  EXPECT_EQ(file.metadata(), metadata);
  ASSERT_EQ(file.tensors().size(), tensors.size());
  for (const SafetensorsSource& source : tensors) {
    const SafetensorsTensor* const tensor = file.Find(source.name);
    ASSERT_NE(tensor, nullptr) << source.name;
    EXPECT_EQ(tensor->type, source.type);
    EXPECT_EQ(tensor->shape, source.shape);
    EXPECT_EQ(file.Data(*tensor), source.bytes) << source.name;
  }
}

TEST_F(SafetensorsStreamTest, WhatCouldNotBeReadIsNotWritten) {
  const auto refused = [&](const std::vector<SafetensorsSource>& tensors,
                           const SafetensorsMetadata& metadata, absl::string_view reason) {
    EXPECT_THAT(WriteSafetensors(Path("m"), tensors, metadata),
                StatusIs(kInvalidArgument, std::string(reason)));
    EXPECT_EQ(NumFiles(), 0);
  };
  const SafetensorsSource one = Source("x", SafetensorsType::kU8, {1}, "1");
  refused({one, one}, {}, "tensor 'x': stands there twice");
  refused({Source("x", SafetensorsType::kF32, {2}, "1234")}, {},
          "tensor 'x': data of 4 bytes, expected 2 elements of 32 bits (F32 [2])");
  refused({Source("x", SafetensorsType::kU8, {-1}, "1")}, {}, "tensor 'x': shape with -1");
  refused({Source("__metadata__", SafetensorsType::kU8, {1}, "1")}, {},
          "a tensor named '__metadata__'");
  refused({Source("\xff", SafetensorsType::kU8, {1}, "1")}, {}, "'\\xff' is no text");
  refused({}, {{"k", "\xc3"}}, "'\\xc3' is no text");
}

// Who has the earlier file open goes on reading the earlier file.
TEST_F(SafetensorsStreamTest, AnEarlierFileIsReplacedAndKeepsItsBytesWhileItIsOpen) {
  ASSERT_TRUE(WriteSafetensors(Path("m"), {Source("x", SafetensorsType::kU8, {2}, "ab")}).ok());
  const auto before = SafetensorsFile::Open(Path("m")).value();
  ASSERT_TRUE(WriteSafetensors(Path("m"), {Source("x", SafetensorsType::kU8, {1}, "c")}).ok());
  EXPECT_THAT(before.Data(*before.Find("x")), ::testing::ElementsAre('a', 'b'));
  const auto now = SafetensorsFile::Open(Path("m")).value();
  EXPECT_THAT(now.Data(*now.Find("x")), ::testing::ElementsAre('c'));
  EXPECT_EQ(NumFiles(), 1);
}

TEST_F(SafetensorsStreamTest, AFileWithoutTensorsHasTheUsualPermissions) {
  const mode_t mask = umask(027);
  ASSERT_TRUE(WriteSafetensors(Path("m"), {}).ok());
  umask(mask);
  EXPECT_TRUE(SafetensorsFile::Open(Path("m"))->tensors().empty());
  EXPECT_EQ(fs::status(Path("m")).permissions(), fs::perms(0640));
}

TEST_F(SafetensorsStreamTest, FoldersAreNamed) {
  EXPECT_THAT(WriteSafetensors(Path("no/m"), {}),
              StatusIs(kNotFound, "no/m': its folder is not there"));
  const absl::Status folder = WriteSafetensors(root_.string(), {});
  EXPECT_EQ(folder.code(), kInvalidArgument) << folder;
}

TEST_F(SafetensorsStreamTest, AFullDeviceIsUnavailable) {
  EXPECT_THAT(WriteSafetensors("/dev/full", {}),
              StatusIs(kUnavailable, "cannot write '/dev/full': No space"));
  EXPECT_TRUE(fs::is_character_file("/dev/full"));  // it was not replaced
}

// The system ends a write at the limit on file size just as at the end of a full disk.
TEST_F(SafetensorsStreamTest, AFullDiskLeavesWhatWasThere) {
  Write("m", "before");
  const std::string data(4096, 'x');
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 1000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status status =
      WriteSafetensors(Path("m"), {Source("x", SafetensorsType::kU8, {4096}, data)});
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_THAT(status, StatusIs(kUnavailable, Path("m")));
  EXPECT_EQ(Read(Path("m")), "before");
  EXPECT_EQ(NumFiles(), 1);  // no temporary file stays
}

TEST_F(SafetensorsStreamTest, DataComesInAnyPieces) {
  ASSERT_TRUE(WriteSafetensors(Path("whole"), {Source("x", SafetensorsType::kU8, {2}, "ab"),
                                               Source("y", SafetensorsType::kU8, {3}, "cde")})
                  .ok());
  auto stream = SafetensorsStream::Create(
                    Path("pieces"),
                    {{.name = "x", .type = SafetensorsType::kU8, .shape = {2}, .size_bytes = 2},
                     {.name = "y", .type = SafetensorsType::kU8, .shape = {3}, .size_bytes = 3}})
                    .value();
  for (const char* piece : {"a", "", "bcd"}) ASSERT_TRUE(stream.Append(AsBytes(piece)).ok());
  EXPECT_THAT(stream.Commit(),
              StatusIs(kFailedPrecondition, "the last 1 bytes of data are missing"));
  EXPECT_THAT(stream.Append(AsBytes("ef")),
              StatusIs(kInvalidArgument, "2 bytes of data, expected at most 1 more"));
  ASSERT_TRUE(stream.Append(AsBytes("e")).ok());
  ASSERT_TRUE(stream.Commit().ok());
  EXPECT_EQ(Read(Path("pieces")), Read(Path("whole")));
  EXPECT_EQ(Read(Path("whole")), stream.header() + "abcde");
}

}  // namespace
}  // namespace moe
