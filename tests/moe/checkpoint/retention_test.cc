// What goes in the folder of a run, what stays, and what is refused.
#include "moe/checkpoint/retention.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/time/clock.h>
#include <absl/time/time.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include "comm/local/local_world.h"
#include "kernels/base/log.h"
#include "moe/checkpoint/step_folders.h"
#include "moe/checkpoint/writer.h"
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

using RetentionTest = CheckpointTest;

TEST_F(RetentionTest, TheNewestAndEveryNthStay) {
  CheckpointOptions options = Options();
  options.keep = 2;
  options.keep_every = 4;
  const std::string foreign[] = {"notes.txt", "step-1", "step-00000001.old", ".tmp-mine"};
  fs::create_directories(Folder());
  for (const std::string& name : foreign) Rewrite(Folder() + "/" + name, name);
  for (int64_t step = 1; step <= 10; ++step) {
    options.first_step = step - 1;
    ASSERT_TRUE(Save(options, 1, Cut::kRows, step).ok());
  }
  EXPECT_THAT(Names(Folder()),
              ::testing::UnorderedElementsAre("latest", "notes.txt", "step-00000001.old",
                                              "step-00000004", "step-00000008", "step-00000009",
                                              "step-00000010", "step-1", ".tmp-mine"));
  for (const std::string& name : foreign) EXPECT_EQ(Read(Folder() + "/" + name), name);
}

TEST_F(RetentionTest, TheOldestThatNothingKeepsGo) {
  const std::vector<int64_t> steps = {0, 10, 15, 20, 25};
  int64_t before = 0;
  CheckpointOptions options = Options();
  options.keep = 99;
  for (const int64_t step : steps) {
    options.first_step = std::exchange(before, step);
    ASSERT_TRUE(Save(options, 1, Cut::kRows, step).ok());
  }
  const auto removed = [&](absl::Span<const int64_t> among, const RetentionOptions& of) {
    return PlanRetention(Folder(), among, of).removed;
  };
  EXPECT_THAT(removed(steps, {.keep = 2, .run = "", .damaged_steps = {}}), ElementsAre(0, 10, 15));
  EXPECT_THAT(removed(steps, {.keep = 1, .keep_every = 10, .run = "", .damaged_steps = {}}),
              ElementsAre(15));
  EXPECT_THAT(removed(steps, {.keep = 5, .run = "", .damaged_steps = {}}), ElementsAre());
  EXPECT_THAT(removed({}, {.keep = 1, .run = "", .damaged_steps = {}}), ElementsAre());
  // Checkpoints that are known or found to be damaged do not count, and stay while they are newer
  // than those that count.
  EXPECT_THAT(removed(steps, {.keep = 2, .run = "", .damaged_steps = {20}}), ElementsAre(0, 10));
  fs::remove(Step(25) + "/shard-00000-of-00001.safetensors");
  EXPECT_THAT(removed(steps, {.keep = 2, .run = "", .damaged_steps = {}}), ElementsAre(0, 10));
  EXPECT_THAT(removed(steps, {.keep = 1, .run = "another", .damaged_steps = {}}), ElementsAre());
}

TEST_F(RetentionTest, RetentionRemovesWhatIsTheRunsAlone) {
  static std::vector<std::string>& warnings = *new std::vector<std::string>;
  warnings.clear();
  SetLogCallback([](LogLevel, absl::string_view message) { warnings.emplace_back(message); });
  CheckpointOptions options = Options();
  options.keep = 99;
  for (int64_t step = 1; step <= 9; ++step) {
    options.first_step = step - 1;
    ASSERT_TRUE(Save(options, 1, Cut::kRows, step, step == 5 ? "another" : "ours").ok());
  }
  fs::remove_all(Step(1));
  fs::create_directories(Step(1));
  Rewrite(Step(1) + "/thesis.txt", "mine");
  fs::remove_all(Step(2));
  Rewrite(Step(2), "notes");
  fs::remove_all(Step(3));
  fs::create_directory_symlink(Step(9), Step(3));
  fs::remove_all(Step(4));
  fs::copy(Step(9), Step(4));
  fs::create_directories(Step(6) + "/sub");
  Rewrite(Step(6) + "/sub/thesis.txt", "mine");
  Rewrite(Step(7) + "/manifest.json", "{}");
  fs::remove(Step(8) + "/shard-00000-of-00001.safetensors");  // damaged, but the run's
  const auto tree = [&] {
    std::vector<std::string> paths;
    for (const auto& entry : fs::recursive_directory_iterator(Folder())) {
      const std::string path = entry.path().string().substr(Folder().size() + 1);
      if (path < "step-00000008") paths.push_back(path);
    }
    std::sort(paths.begin(), paths.end());
    return paths;
  };
  const auto before = tree();
  warnings.clear();
  options.keep = 1;
  options.first_step = 9;
  ASSERT_TRUE(Save(options, 2, Cut::kRows, 10, "ours").ok());
  EXPECT_EQ(tree(), before);
  EXPECT_EQ(Read(Step(6) + "/sub/thesis.txt"), "mine");
  EXPECT_THAT(ListSteps(Folder()).value(), ElementsAre(1, 2, 3, 4, 5, 6, 7, 10));
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_EQ(warnings[0],
            absl::StrCat(
                "CheckpointWriter: not removed, since not of this run: '",
                absl::StrJoin(
                    {Step(1) + "' holds 'thesis.txt'", Step(2) + "' is a file, expected a folder",
                     Step(3) + "' is a link, expected a folder",
                     Step(4) + "' has a manifest of step 9", Step(5) + "' is of another run",
                     Step(6) + "' holds 'sub'", Step(7) + "' has a damaged manifest"},
                    "; '")));
  SetLogCallback(nullptr);
}

// Refused before the first step where it is there by then, else when its step comes.
TEST_F(RetentionTest, WhatIsNoCheckpointsUnderTheNameOfAStepStays) {
  ASSERT_TRUE(Save(Options(), 1, Cut::kRows, 10).ok());
  const std::function<void()> puts[] = {
      [&] { Rewrite(Step(20), "notes"); },
      [&] { fs::create_directory_symlink(Step(10), Step(20)); },
      [&] {
        fs::copy(Step(10), Step(20));
        Rewrite(Step(20) + "/manifest.json", "{}");
        Rewrite(Step(20) + "/thesis.txt", "mine");
      },
  };
  const char* const names[] = {"' is a file, expected a folder", "' is a link, expected a folder",
                               "' holds 'thesis.txt'"};
  for (int i = 0; i < 3; ++i) {
    puts[i]();
    EXPECT_THAT(CheckpointWriter::Create(Options(10), 0, 1),
                StatusIs(kFailedPrecondition, Step(20) + names[i]));
    EXPECT_TRUE(CheckpointWriter::Create(Options(20), 0, 1).ok()) << "it is in nobody's way";
    fs::rename(Step(20), Path("apart"));
    auto writer = CheckpointWriter::Create(Options(10), 0, 1).value();
    fs::rename(Path("apart"), Step(20));
    EXPECT_THAT(testing::SaveRows(*writer, *MakeLocalWorld({.ranks = 1})[0], 20),
                StatusIs(kFailedPrecondition, Step(20) + names[i]));
    EXPECT_THAT(Names(Folder()), ElementsAre("latest", "step-00000010", "step-00000020"));
    fs::rename(Step(20), Path("apart"));
    fs::remove_all(Path("apart"));
  }
}

// A process that may open no further file.
class NoMoreFiles {
 public:
  NoMoreFiles() {
    getrlimit(RLIMIT_NOFILE, &before_);
    const rlimit none = {.rlim_cur = 0, .rlim_max = before_.rlim_max};
    setrlimit(RLIMIT_NOFILE, &none);
  }
  ~NoMoreFiles() { setrlimit(RLIMIT_NOFILE, &before_); }
  NoMoreFiles(const NoMoreFiles&) = delete;
  NoMoreFiles& operator=(const NoMoreFiles&) = delete;

 private:
  rlimit before_ = {};
};

// Opens no further file from the first look at the folder `runs_out_at` on.
class FilesThatRunOut final : public testing::FaultyFiles {
 public:
  std::error_code List(const std::string& path, std::vector<std::string>& names) override {
    const std::error_code error = FaultyFiles::List(path, names);
    if (path == runs_out_at) none_.emplace();
    return error;
  }
  void Return() { none_.reset(); }
  std::string runs_out_at;

 private:
  std::optional<NoMoreFiles> none_;
};

TEST_F(RetentionTest, WhatCannotBeReadIsNotTakenForDamaged) {
  ASSERT_TRUE(Save(Options(), 1, Cut::kRows, 20).ok());
  fs::rename(Step(20), Path("apart"));
  FilesThatRunOut files;
  CheckpointOptions options = Options(10);
  options.files = &files;
  auto writer = CheckpointWriter::Create(options, 0, 1).value();
  fs::rename(Path("apart"), Step(20));
  const auto memory = testing::PartsOf(0, 1, Cut::kRows, 20);
  ASSERT_TRUE(writer->Start(testing::StateOf(20), memory.parts).ok());
  while (writer->phase() == WriterPhase::kWriting) absl::SleepFor(absl::Milliseconds(1));
  files.runs_out_at = Folder();
  const absl::Status published =
      writer->Publish(*MakeLocalWorld({.ranks = 1})[0], *MakeInlineStream());
  files.Return();
  const std::string reason = Step(20) + "/manifest.json': Too many open files";
  EXPECT_THAT(published, StatusIs(kUnavailable, reason));
  const absl::Status created = CheckpointWriter::Create(options, 0, 1).status();
  const RetentionPlan plan =
      PlanRetention(Folder(), {20}, {.keep = 1, .run = "", .damaged_steps = {}}, files);
  files.Return();
  EXPECT_THAT(created, StatusIs(kUnavailable, reason));
  EXPECT_THAT(plan.removed, ElementsAre());
  EXPECT_THAT(plan.not_counted, ElementsAre(HasSubstr(reason)));
  EXPECT_EQ(NewestWholeStep(Folder()), 20);
}

// One warning in a run, whatever the reason.
TEST_F(RetentionTest, WhatDoesNotCountIsNamed) {
  static std::vector<std::string>& warnings = *new std::vector<std::string>;
  warnings.clear();
  CheckpointOptions options = Options();
  options.keep = 9;
  for (int64_t step = 1; step <= 3; ++step) {
    options.first_step = step - 1;
    ASSERT_TRUE(Save(options, 1, Cut::kRows, step, step == 2 ? "another" : "ours").ok());
  }
  fs::remove(Step(1) + "/shard-00000-of-00001.safetensors");
  options.first_step = 3;
  SetLogCallback([](LogLevel, absl::string_view message) { warnings.emplace_back(message); });
  auto writer = CheckpointWriter::Create(options, 0, 1).value();
  const auto world = MakeLocalWorld({.ranks = 1});
  for (int64_t step = 4; step <= 5; ++step) {
    ASSERT_TRUE(testing::SaveRows(*writer, *world[0], step, "ours").ok());
  }
  SetLogCallback(nullptr);
  EXPECT_THAT(
      warnings,
      ElementsAre(absl::StrCat(
          "CheckpointWriter: not counted among the checkpoints that stay: ", Step(1),
          " is passed over: CheckpointReader: ", Step(1),
          ": shard-00000-of-00001.safetensors is missing; '", Step(2), "' is of another run")));
}

TEST_F(RetentionTest, NamesOfStepsAreReadAsTheyAreWritten) {
  for (const int64_t step : {int64_t{0}, int64_t{120}, int64_t{99999999}, int64_t{123456789012}}) {
    EXPECT_EQ(StepOf(StepFolderName(step)), step);
  }
  EXPECT_EQ(StepFolderName(120), "step-00000120");
  for (const char* name : {"step-120", "step-000000120", "step--0000120", "step-0000012x", "step-",
                           ".tmp-step-00000120", "step-99999999999999999999"}) {
    EXPECT_EQ(StepOf(name), std::nullopt) << name;
  }
}

TEST_F(RetentionTest, LeftoversGoAtTheNextStart) {
  for (const char* name : {".tmp-step-00000003", ".trash-step-00000001", "latest.tmp-77-0"}) {
    fs::create_directories(Folder() + "/" + name);
    Rewrite(Folder() + "/" + name + "/shard-00000-of-00001.safetensors", "x");
  }
  EXPECT_TRUE(CheckpointWriter::Create(Options(), 1, 2).ok());
  EXPECT_EQ(Names(Folder()).size(), 3u);  // rank 0 does it
  EXPECT_TRUE(CheckpointWriter::Create(Options(), 0, 2).ok());
  EXPECT_THAT(Names(Folder()), ElementsAre());
}

// Leftovers of a run that was stopped while it removed, into whose folder others have put files.
TEST_F(RetentionTest, LeftoversThatHoldMoreStayWithAWarning) {
  static std::vector<std::string>& warnings = *new std::vector<std::string>;
  warnings.clear();
  SetLogCallback([](LogLevel, absl::string_view message) { warnings.emplace_back(message); });
  const std::string trash = Folder() + "/.trash-step-00000001";
  fs::create_directories(trash + "/shard-00001-of-00002.safetensors");
  Rewrite(trash + "/shard-00000-of-00001.safetensors", "x");
  EXPECT_TRUE(CheckpointWriter::Create(Options(), 0, 1).ok());
  EXPECT_THAT(Names(trash),
              ElementsAre("shard-00000-of-00001.safetensors", "shard-00001-of-00002.safetensors"));
  EXPECT_THAT(warnings,
              ElementsAre(HasSubstr("not removed: '" + trash +
                                    "' holds a folder, 'shard-00001-of-00002.safetensors'")));
  SetLogCallback(nullptr);
}

TEST_F(RetentionTest, OneThatCannotGoKeepsNoOther) {
  CheckpointOptions options = Options();
  options.keep = 9;
  for (int64_t step = 1; step <= 3; ++step) {
    options.first_step = step - 1;
    ASSERT_TRUE(Save(options, 1, Cut::kRows, step).ok());
  }
  const std::string trash = Folder() + "/.trash-step-00000001";
  fs::create_directories(trash);
  Rewrite(trash + "/thesis.txt", "mine");
  options.keep = 1;
  options.first_step = 3;
  ASSERT_TRUE(Save(options, 1, Cut::kRows, 4).ok());
  EXPECT_THAT(ListSteps(Folder()).value(), ElementsAre(1, 4));
  EXPECT_EQ(Read(trash + "/thesis.txt"), "mine");
}

TEST_F(RetentionTest, WhatCameSinceThePlanStays) {
  ASSERT_TRUE(Save(Options(), 1, Cut::kRows, 1).ok());
  Rewrite(Step(1) + "/thesis.txt", "mine");
  EXPECT_THAT(RemoveStep(Folder(), 1), StatusIs(kFailedPrecondition, "' holds 'thesis.txt'"));
  EXPECT_THAT(Names(Folder()), ElementsAre("latest", "step-00000001"));
}

TEST_F(RetentionTest, LinksAreNotFollowed) {
  fs::create_directories(Path("elsewhere"));
  Rewrite(Path("elsewhere/shard-00000-of-00001.safetensors"), "x");
  fs::create_directories(Folder());
  fs::create_directory_symlink(Path("elsewhere"), Folder() + "/.trash-step-00000001");
  fs::create_directory_symlink(Path("elsewhere"), Step(2));
  auto writer = CheckpointWriter::Create(Options(2), 0, 1).value();
  const auto memory = testing::PartsOf(0, 1, Cut::kRows, 3);
  const auto world = MakeLocalWorld({.ranks = 1});
  const auto stream = MakeInlineStream();
  // A link that appears while the run continues, before shards are written and after.
  const std::string unfinished = UnfinishedPath(Folder(), 3);
  fs::create_directory_symlink(Path("elsewhere"), unfinished);
  ASSERT_TRUE(writer->Start(testing::StateOf(3), memory.parts).ok());
  EXPECT_THAT(writer->Publish(*world[0], *stream),
              StatusIs(kFailedPrecondition, "' is a link, expected a folder"));
  EXPECT_FALSE(fs::exists(fs::symlink_status(unfinished)));
  ASSERT_TRUE(writer->Start(testing::StateOf(3), memory.parts).ok());
  while (writer->phase() == WriterPhase::kWriting) absl::SleepFor(absl::Milliseconds(1));
  fs::rename(unfinished, Path("moved"));
  fs::create_directory_symlink(Path("moved"), unfinished);
  EXPECT_THAT(writer->Publish(*world[0], *stream),
              StatusIs(kFailedPrecondition, "' is a link, expected a folder"));
  EXPECT_THAT(Names(Folder()), ElementsAre("step-00000002"));
  EXPECT_THAT(Names(Path("elsewhere")), ElementsAre("shard-00000-of-00001.safetensors"));
}

TEST_F(RetentionTest, ARunDoesNotOverwriteANewerCheckpoint) {
  ASSERT_TRUE(Save(Options(), 1, Cut::kRows, 20).ok());
  EXPECT_THAT(
      CheckpointWriter::Create(Options(10), 0, 1),
      StatusIs(kAlreadyExists, "step-00000020 is newer than step 10, where this run begins"));
  EXPECT_TRUE(CheckpointWriter::Create(Options(20), 0, 1).ok());
  // Nor does a run overwrite one that appeared while it ran.
  EXPECT_EQ(Save(Options(20), 2, Cut::kRows, 20).code(), kAlreadyExists);
  EXPECT_EQ(NewestWholeStep(Folder()), 20);
}

// Two folders are set aside, and both stay.
TEST_F(RetentionTest, ADamagedFolderIsSetAside) {
  ASSERT_TRUE(Save(Options(), 1, Cut::kRows, 10).ok());
  for (const char* manifest : {"{}", "["}) {
    fs::create_directories(Step(20));
    Rewrite(Step(20) + "/manifest.json", manifest);
    ASSERT_TRUE(Save(Options(10), 2, Cut::kBlocks, 20).ok());
    EXPECT_EQ(NewestWholeStep(Folder()), 20);
  }
  EXPECT_THAT(Names(Folder()), ElementsAre("damaged-step-00000020", "damaged-step-00000020.1",
                                           "latest", "step-00000010", "step-00000020"));
  EXPECT_EQ(Read(Folder() + "/damaged-step-00000020/manifest.json"), "{}");
  EXPECT_EQ(Read(Folder() + "/damaged-step-00000020.1/manifest.json"), "[");
}

// A step that a resume has passed over, and that the run then reached again.
TEST_F(RetentionTest, ADamagedStepThatIsWrittenAnewCounts) {
  ASSERT_TRUE(Save(Options(), 1, Cut::kRows, 10).ok());
  ASSERT_TRUE(Save(Options(10), 1, Cut::kRows, 20).ok());
  CheckpointOptions options = Options(10);
  options.keep = 2;
  options.damaged_steps = {20};
  auto writer = CheckpointWriter::Create(options, 0, 1).value();
  const auto world = MakeLocalWorld({.ranks = 1});
  for (const int64_t step : {20, 30}) {
    ASSERT_TRUE(testing::SaveRows(*writer, *world[0], step).ok());
    EXPECT_EQ(NewestWholeStep(Folder()), step);
  }
  EXPECT_THAT(ListSteps(Folder()).value(), ElementsAre(20, 30));
}

TEST_F(RetentionTest, WhereNoFolderCanBeIsNamed) {
  Write("file", "x");
  CheckpointOptions options = Options();
  options.folder = Path("file/checkpoints");
  const absl::Status status = CheckpointWriter::Create(options, 0, 1).status();
  EXPECT_THAT(status, StatusIs(kUnavailable, "cannot make folder '" + options.folder));
  options.folder = "";
  EXPECT_EQ(CheckpointWriter::Create(options, 0, 1).status().code(), kInvalidArgument);
}

}  // namespace
}  // namespace moe
