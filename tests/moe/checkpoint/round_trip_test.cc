// What is saved is read, by any layout; what is damaged is named.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/time/clock.h>
#include <absl/time/time.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/local/local_world.h"
#include "moe/checkpoint/reader.h"
#include "moe/checkpoint/step_folders.h"
#include "moe/checkpoint/writer.h"
#include "moe/io/file.h"
#include "moe/io/safetensors.h"
#include "tests/comm/local_ranks.h"
#include "tests/moe/checkpoint/checkpoint_harness.h"
#include "tests/moe/checkpoint/checkpoint_test.h"
#include "tests/moe/status_is.h"

namespace moe {
namespace {

namespace fs = std::filesystem;
using testing::Cut;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::NewestWholeStep;
using testing::Save;
using enum absl::StatusCode;
using testing::StatusIs;

TEST_F(CheckpointTest, AnyLayoutWritesWhatAnyLayoutReads) {
  int64_t step = 0;
  for (const int ranks : {1, 2, 3, 5}) {
    for (const Cut cut : {Cut::kRows, Cut::kColumns, Cut::kBlocks, Cut::kFirstRankAlone}) {
      CheckpointOptions options = Options(step++);
      if (step % 2 == 0) options.max_box_bytes = 24;  // 3 doubles or 6 floats
      if (step % 2 == 0) options.max_shard_bytes = 100;
      ASSERT_TRUE(Save(options, ranks, cut, step).ok());
      auto reader = CheckpointReader::Open(Step(step)).value();
      for (const int64_t rows : {1, 2, 5}) {
        const absl::Status read = testing::CheckElements(reader, rows, 6 - rows);
        EXPECT_TRUE(read.ok()) << read;
      }
      EXPECT_TRUE(reader.Verify(2).ok());
      EXPECT_EQ(reader.manifest().step, step);
      EXPECT_EQ(reader.manifest().sections.trainer,
                absl::StrCat(R"({"seed":1234,"steps":[)", step, "]}"));
    }
  }
  EXPECT_EQ(NewestWholeStep(Folder()), step);
  EXPECT_EQ(Read(Folder() + "/latest"), StepFolderName(step) + "\n");
}

TEST_F(CheckpointTest, ShardsAreOrdinaryFilesOfAtMostTheirSize) {
  CheckpointOptions options = Options();
  options.max_box_bytes = 56;
  options.max_shard_bytes = 168;
  ASSERT_TRUE(Save(options, 2, Cut::kRows, 7).ok());
  const std::vector<std::string> names = Names(Step(7));
  EXPECT_THAT(
      names, ElementsAre("manifest.json", "shard-00000-of-00002.1.safetensors",
                         "shard-00000-of-00002.safetensors", "shard-00001-of-00002.1.safetensors",
                         "shard-00001-of-00002.2.safetensors", "shard-00001-of-00002.safetensors"));
  for (const std::string& name : names) {
    if (name == kManifestName) continue;
    const auto shard = SafetensorsFile::Open(Step(7) + "/" + name).value();
    int64_t bytes = 0;
    for (const SafetensorsTensor& tensor : shard.tensors()) {
      EXPECT_LE(tensor.size_bytes, 56);
      bytes += tensor.size_bytes;
    }
    EXPECT_LE(bytes, 168);
  }
  const auto shard = SafetensorsFile::Open(Step(7) + "/shard-00001-of-00002.1.safetensors");
  EXPECT_NE(shard->Find("weight|master|4,0"), nullptr);
}

TEST_F(CheckpointTest, StartWaitsForPublish) {
  auto writer = CheckpointWriter::Create({.folder = Folder()}, 0, 1);  // on the real disk
  ASSERT_TRUE(writer.ok()) << writer.status();
  const auto memory = testing::PartsOf(0, 1, Cut::kRows, 1);
  EXPECT_EQ((*writer)->phase(), WriterPhase::kIdle);
  ASSERT_TRUE((*writer)->Start(testing::StateOf(1), memory.parts).ok());
  EXPECT_EQ((*writer)->Start(testing::StateOf(2), memory.parts).code(), kFailedPrecondition);
  while ((*writer)->phase() == WriterPhase::kWriting) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ((*writer)->phase(), WriterPhase::kWritten);
  EXPECT_EQ(NewestWholeStep(Folder()), -1);  // not before Publish
  const auto world = MakeLocalWorld({.ranks = 1});
  const auto stream = MakeInlineStream();
  EXPECT_TRUE((*writer)->Publish(*world[0], *stream).ok());
  EXPECT_EQ(NewestWholeStep(Folder()), 1);
  EXPECT_EQ((*writer)->Publish(*world[0], *stream).code(), kFailedPrecondition);
}

// The error is that of the first rank that fails, on all ranks, and leaves nothing.
TEST_F(CheckpointTest, ARankThatFailsFailsAll) {
  const auto publish = [&](auto start) {
    std::vector<absl::Status> statuses(3);
    testing::RunLocalRanks(3, [&](std::unique_ptr<Communicator> world) {
      const int rank = world->rank();
      auto writer = CheckpointWriter::Create(Options(), rank, 3);
      EXPECT_TRUE(world->Barrier().ok());
      auto memory = testing::PartsOf(rank, 3, Cut::kRows, 5);
      start(**writer, rank, memory.parts);
      const auto stream = MakeInlineStream();
      statuses[rank] = (*writer)->Publish(*world, *stream);
      return absl::OkStatus();
    });
    EXPECT_EQ(statuses[1], statuses[0]);
    EXPECT_EQ(statuses[2], statuses[0]);
    EXPECT_FALSE(fs::exists(Step(5)));
    EXPECT_FALSE(fs::exists(Folder() + "/.tmp-" + StepFolderName(5)));
    return std::string(statuses[0].message());
  };
  using Parts = std::vector<StatePart>;
  EXPECT_EQ(publish([](CheckpointWriter& writer, int rank, Parts& parts) {
              if (rank == 1) parts.back().box.row_end += 1;
              (void)writer.Start(testing::StateOf(5), parts);
            }),
            "rank 1: part 'weight' v [1,4) x [0,7) of [2, 7], expected a part of [5, 7]");
  EXPECT_EQ(publish([](CheckpointWriter& writer, int rank, Parts& parts) {
              if (rank != 2) (void)writer.Start(testing::StateOf(5), parts);
            }),
            "rank 2: CheckpointWriter: nothing was started");
  EXPECT_EQ(publish([](CheckpointWriter& writer, int rank, Parts& parts) {
              (void)writer.Start(testing::StateOf(rank == 1 ? 6 : 5), parts);
            }),
            "rank 1: step 6, rank 0 is at 5");
  EXPECT_EQ(publish([](CheckpointWriter& writer, int rank, Parts& parts) {
              if (rank == 1) parts.pop_back();
              (void)writer.Start(testing::StateOf(5), parts);
            }),
            "CheckpointWriter: tensor 'weight' v: no box has [1,3) x [0,7)");
  EXPECT_THAT(publish([](CheckpointWriter& writer, int rank, Parts& parts) {
                const CanonicalTensor other = {.name = "weight", .rows = 6, .cols = 7};
                if (rank == 2) parts.back().tensor = &other;
                (void)writer.Start(testing::StateOf(5), parts);
              }),
              HasSubstr("parts of 'weight' have two shapes or types"));
  EXPECT_THAT(publish([](CheckpointWriter& writer, int rank, Parts& parts) {
                CheckpointState state = testing::StateOf(5);
                if (rank == 0) state.sections.hash = "none";
                (void)writer.Start(state, parts);
              }),
              HasSubstr("rank 0: hash: malformed JSON"));
}

// Rank 1's mount is lost and comes back: rank 0 does not publish what it cannot read, and removes
// nothing older.
TEST_F(CheckpointTest, WhatRankZeroCannotReadIsNotPublished) {
  fs::create_directories(Folder());
  fs::create_directories(Path("local"));
  const auto mount = [&](const std::string& target) {
    fs::remove(Path("mount"));
    fs::create_directory_symlink(target, Path("mount"));
  };
  mount(Folder());
  std::vector<absl::Status> statuses(2);
  testing::RunLocalRanks(2, [&](std::unique_ptr<Communicator> world) {
    const int rank = world->rank();
    CheckpointOptions options = Options();
    options.keep = 1;
    if (rank == 1) options.folder = Path("mount");
    auto writer = CheckpointWriter::Create(options, rank, 2).value();
    const auto save = [&](int64_t step) {
      return testing::SaveRows(*writer, *world, step);
    };
    EXPECT_TRUE(save(10).ok());
    if (rank == 0) mount(Path("local"));
    statuses[rank] = save(20);
    if (rank == 0) {
      EXPECT_EQ(NewestWholeStep(Folder()), 10);
    }
    if (rank == 0) mount(Folder());
    EXPECT_TRUE(save(30).ok());
    return absl::OkStatus();
  });
  EXPECT_THAT(statuses[0], StatusIs(kDataLoss,
                                    "rank 0 cannot open what the ranks have written, "
                                    "expected one folder that all of them see: "));
  EXPECT_THAT(statuses[0].message(), HasSubstr("shard-00001-of-00002.safetensors is missing"));
  EXPECT_EQ(FileFaultOf(statuses[0]), FileFault::kWrite);
  EXPECT_EQ(statuses[1], statuses[0]);
  EXPECT_EQ(NewestWholeStep(Folder()), 30);
  EXPECT_THAT(Names(Folder()), ElementsAre("latest", "step-00000030"));
  EXPECT_THAT(Names(Path("local")), ElementsAre());
}

TEST_F(CheckpointTest, AFolderOfAnotherStepIsNoCheckpoint) {
  ASSERT_TRUE(Save(Options(), 1, Cut::kRows, 10).ok());
  fs::rename(Step(10), Step(20));
  EXPECT_THAT(ErrorOfOpen(20), HasSubstr("step-00000020: the manifest says step 10"));
  EXPECT_EQ(CheckpointReader::Open(Step(20) + "/").status().code(), kDataLoss);
  fs::rename(Step(20), Folder() + "/best");  // a name without a step
  EXPECT_TRUE(CheckpointReader::Open(Folder() + "/best").ok());
}

TEST_F(CheckpointTest, EveryBitThatFlipsInAShardIsFound) {
  CheckpointOptions options = Options();
  options.max_box_bytes = 64;
  ASSERT_TRUE(Save(options, 1, Cut::kColumns, 3).ok());
  const std::string path = Step(3) + "/shard-00000-of-00001.safetensors";
  std::string bytes = Read(path);
  int64_t found_at_open = 0;
  // Written in place: a new file a flip would take most of the time.
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  for (size_t at = 0; at < bytes.size(); ++at) {
    const char flipped = static_cast<char>(bytes[at] ^ (1 << (at % 8)));
    file.seekp(static_cast<int64_t>(at)).write(&flipped, 1).flush();
    auto reader = CheckpointReader::Open(Step(3));
    const absl::Status status = reader.ok() ? reader->Verify(1) : reader.status();
    ASSERT_EQ(status.code(), kDataLoss) << at;
    found_at_open += reader.ok() ? 0 : 1;
    file.seekp(static_cast<int64_t>(at)).write(&bytes[at], 1).flush();
  }
  EXPECT_GT(found_at_open, 100);  // those of the header
  EXPECT_EQ(NewestWholeStep(Folder()), 3);
}

// A writer that hashes states, as training's does, does not publish them; where another one has,
// they are found.
TEST_F(CheckpointTest, ValuesThatAreNotFiniteAreNotPublishedOrAreFound) {
  const CanonicalTensor tensor = {.name = "weight", .rows = 1, .cols = 300};
  std::vector<float> values(300, 1.0f);
  values[299] = std::numeric_limits<float>::infinity();
  const StatePart part = {.tensor = &tensor,
                          .state = "v",
                          .box = {0, 1, 0, 300},
                          .data = MatrixView<const float>(values.data(), 1, 300)};
  const auto save = [&](bool hash_states) {
    CheckpointOptions options = Options();
    options.hash_states = hash_states;
    const auto writer = CheckpointWriter::Create(options, 0, 1).value();
    EXPECT_TRUE(writer->Start(testing::StateOf(3), {&part, 1}).ok());
    const auto world = MakeLocalWorld({.ranks = 1});
    return writer->Publish(*world[0], *MakeInlineStream());
  };
  const absl::Status refused = save(true);
  EXPECT_THAT(refused, StatusIs(kDataLoss, "'weight' v has 1 values that are not finite"));
  EXPECT_EQ(FileFaultOf(refused), FileFault::kNone);
  EXPECT_FALSE(fs::exists(Step(3)));
  ASSERT_TRUE(save(false).ok());
  auto reader = CheckpointReader::Open(Step(3)).value();
  EXPECT_THAT(reader.Verify(1), StatusIs(kDataLoss,
                                         "box 'weight' v [0,1) x [0,300) has 1 values "
                                         "that are not finite, expected none"));
}

TEST_F(CheckpointTest, ADamagedBoxIsNamedWhereItIsRead) {
  ASSERT_TRUE(Save(Options(), 2, Cut::kRows, 3).ok());
  const std::string path = Step(3) + "/shard-00001-of-00002.safetensors";
  std::string bytes = Read(path);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);  // the last byte of 'weight' v
  Rewrite(path, bytes);
  auto reader = CheckpointReader::Open(Step(3)).value();
  std::vector<float> row(7);
  EXPECT_TRUE(reader.ReadBox("weight", "v", {0, 1, 0, 7}, {row.data(), 1, 7}).ok());
  EXPECT_TRUE(reader.ReadBox("weight", "m", {4, 5, 0, 7}, {row.data(), 1, 7}).ok());
  // The whole box is hashed, not the row that is wanted.
  const absl::Status status = reader.ReadBox("weight", "v", {2, 3, 0, 7}, {row.data(), 1, 7});
  EXPECT_EQ(status.code(), kDataLoss);
  EXPECT_THAT(std::string(status.message()),
              ::testing::MatchesRegex(
                  "CheckpointReader: .*/step-00000003: shard-00001-of-00002.safetensors: box "
                  "'weight' v \\[2,5\\) x \\[0,7\\) has hash [0-9a-f]{16}, the manifest says "
                  "[0-9a-f]{16}"));
  EXPECT_EQ(reader.Verify(2), status);
}

TEST_F(CheckpointTest, WhatDoesNotFitIsRefused) {
  ASSERT_TRUE(Save(Options(), 1, Cut::kRows, 3).ok());
  auto reader = CheckpointReader::Open(Step(3)).value();
  std::vector<float> out(40);
  std::vector<double> doubles(4);
  const MatrixView<float> row(out.data(), 1, 7);
  EXPECT_EQ(reader.ReadBox("none", "m", {0, 1, 0, 7}, row).code(), kNotFound);
  EXPECT_EQ(reader.ReadBox("weight", "x", {0, 1, 0, 7}, row).code(), kNotFound);
  EXPECT_EQ(reader.ReadBox("weight", "m", {0, 2, 0, 7}, row).code(), kInvalidArgument);
  EXPECT_EQ(reader.ReadBox("weight", "m", {5, 6, 0, 7}, row).code(), kInvalidArgument);
  EXPECT_EQ(reader.ReadBox("weight", "m", {-1, 0, 0, 7}, row).code(), kInvalidArgument);
  EXPECT_EQ(reader.ReadBox("shares", "share", {0, 1, 0, 4}, {out.data(), 1, 4}).code(),
            kInvalidArgument);
  EXPECT_EQ(reader.ReadBox("norm", "m", {0, 1, 0, 4}, {doubles.data(), 1, 4}).code(),
            kInvalidArgument);
  EXPECT_TRUE(reader.ReadBox("shares", "share", {0, 1, 0, 4}, {doubles.data(), 1, 4}).ok());
  EXPECT_EQ(reader.Find("none"), nullptr);
  EXPECT_EQ(reader.Find("weight")->rows, 5);
}

TEST_F(CheckpointTest, ShardsOfAnotherPlaceAreFound) {
  ASSERT_TRUE(Save(Options(), 2, Cut::kColumns, 3).ok());
  ASSERT_TRUE(Save(Options(3), 2, Cut::kColumns, 4).ok());
  const std::string first = Step(4) + "/shard-00000-of-00002.safetensors";
  const std::string second = Step(4) + "/shard-00001-of-00002.safetensors";
  const std::string first_bytes = Read(first), second_bytes = Read(second);

  Rewrite(first, second_bytes);
  Rewrite(second, first_bytes);
  EXPECT_THAT(ErrorOfOpen(4), HasSubstr("shard-00000-of-00002.safetensors: "));
  Rewrite(second, second_bytes);
  // Sizes and headers are alike: the hashes of the boxes differ.
  Rewrite(first, Read(Step(3) + "/shard-00000-of-00002.safetensors"));
  auto reader = CheckpointReader::Open(Step(4)).value();
  EXPECT_THAT(std::string(reader.Verify(2).message()),
              HasSubstr("box 'norm' m [0,1) x [0,3) has hash"));
  Rewrite(first, first_bytes.substr(0, first_bytes.size() - 1));
  EXPECT_THAT(ErrorOfOpen(4), HasSubstr(" bytes, the manifest says "));
  fs::remove(first);
  EXPECT_THAT(ErrorOfOpen(4), HasSubstr("shard-00000-of-00002.safetensors is missing"));
  fs::create_directory(first);
  EXPECT_THAT(ErrorOfOpen(4), HasSubstr("is a folder, expected a file"));
  fs::remove(first);
  Rewrite(first, first_bytes);
  Rewrite(Step(4) + "/notes.txt", "files that the manifest does not name are not looked at");
  EXPECT_EQ(NewestWholeStep(Folder()), 4);
  fs::remove(Step(4) + "/manifest.json");
  EXPECT_THAT(ErrorOfOpen(4, kNotFound), HasSubstr("manifest.json"));
}

TEST_F(CheckpointTest, TheNewestThatIsWholeIsFound) {
  const auto none = FindCheckpoint(Folder()).value();
  EXPECT_EQ(none.path, "");
  for (int64_t step = 1; step <= 3; ++step) {
    ASSERT_TRUE(Save(Options(step - 1), 1, Cut::kRows, step).ok());
  }
  fs::resize_file(Step(3) + "/manifest.json", 100);
  fs::remove(Step(2) + "/shard-00000-of-00001.safetensors");
  fs::create_directories(Step(9));  // not even a manifest
  const auto found = FindCheckpoint(Folder()).value();
  EXPECT_EQ(found.path, Step(1));
  EXPECT_EQ(found.step, 1);
  EXPECT_THAT(found.warnings,
              ElementsAre(HasSubstr("step-00000009 is passed over: "),
                          HasSubstr("does not end with a checksum"),
                          HasSubstr("shard-00000-of-00001.safetensors is missing")));
}

}  // namespace
}  // namespace moe
