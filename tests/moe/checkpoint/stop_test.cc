// Save, publish and retention fail or stop at every system call: the newest readable checkpoint is
// the old one or the new one, and the next start resumes from it.
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/strings/str_cat.h>
#include <absl/time/clock.h>
#include <absl/time/time.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/local/local_world.h"
#include "kernels/base/log.h"
#include "moe/checkpoint/step_folders.h"
#include "moe/checkpoint/writer.h"
#include "tests/comm/local_ranks.h"
#include "tests/moe/checkpoint/checkpoint_harness.h"
#include "tests/moe/checkpoint/faulty_files.h"
#include "tests/moe/checkpoint/moved_files.h"
#include "tests/moe/io/io_test.h"
#include "tests/moe/status_is.h"
#include "tests/sanitizers.h"

namespace moe {
namespace {

namespace fs = std::filesystem;
using ::testing::AnyOf;
using testing::Cut;
using testing::Fault;
using testing::FaultyFiles;
using ::testing::HasSubstr;
using testing::Loss;
using testing::NewestWholeStep;
using testing::Save;
using enum absl::StatusCode;
using testing::StatusIs;

constexpr int64_t kOld = 20, kNew = 30;

class CheckpointStopTest : public IoTest {
 protected:
  void SetUp() override {
    IoTest::SetUp();
    SetLogCallback([](LogLevel, absl::string_view) {});  // what fails behind Publish is no error
    Write("outside", "x");
    CheckpointOptions options = {.folder = Path("before"), .keep = 2, .files = &disk_};
    for (const int64_t step : {kOld - 10, kOld}) {
      ASSERT_TRUE(Save(options, 1, Cut::kRows, step).ok());
      options.first_step = step;
    }
  }

  void TearDown() override {
    SetLogCallback(nullptr);
    IoTest::TearDown();
  }

  // The third checkpoint, after which the first one goes: two shards, through `files`, in a folder
  // as two saves left it.
  absl::Status SaveThird(FileSystem& files) {
    fs::remove_all(Path("run"));
    fs::copy(Path("before"), Path("run"), fs::copy_options::recursive);
    return Save(Options(files), 1, Cut::kRows, kNew);
  }
  CheckpointOptions Options(FileSystem& files, int64_t first_step = kOld) const {
    return {.folder = Path("run"),
            .keep = 2,
            .first_step = first_step,
            .max_box_bytes = 200,
            .max_shard_bytes = 300,
            .files = &files};
  }
  std::string Graveyard() {
    fs::remove_all(Path("graveyard"));
    return Path("graveyard");
  }
  // A run that resumes from the newest checkpoint leaves nothing of the one that stopped.
  void GoOn(int64_t newest) {
    ASSERT_TRUE(Save(Options(disk_, newest), 1, Cut::kColumns, kNew + 10).ok());
    EXPECT_EQ(NewestWholeStep(Path("run")), kNew + 10);
    for (const auto& entry : fs::directory_iterator(Path("run"))) {
      const std::string name = entry.path().filename().string();
      EXPECT_TRUE(name == "latest" || StepOf(name).has_value()) << name;
    }
    EXPECT_EQ(Read(Path("outside")), "x");
    fs::remove_all(Path("graveyard"));
    EXPECT_EQ(NumFiles(), 3);  // before, outside, run
  }

  FaultyFiles disk_;
};

TEST_F(CheckpointStopTest, AStopAtAnyCallLeavesTheOldOrTheNewOne) {
  for (const Loss loss : {Loss::kNothing, Loss::kBytes, Loss::kBytesAndNames}) {
    // What a power cut leaves is the disk's; memory and threads are the same with each.
    if (testing::kSanitized && loss != Loss::kBytesAndNames) continue;
    int64_t published_from = 0;
    for (int64_t call = 1;; ++call) {
      SCOPED_TRACE(call);
      FaultyFiles files(Graveyard(), Fault::kStop, call);
      const absl::Status saved = SaveThird(files);
      if (!files.reached()) break;
      files.PowerCut(loss);
      const int64_t newest = NewestWholeStep(Path("run"));
      ASSERT_THAT(newest, AnyOf(kOld, kNew));
      // Once Publish has succeeded, the new checkpoint is the newest one; and it is so for every
      // later stop.
      ASSERT_TRUE(newest == kNew || (!saved.ok() && published_from == 0));
      if (newest == kNew && published_from == 0) published_from = call;
      if (loss != Loss::kBytes) GoOn(newest);
      if (HasFailure()) return;
    }
    EXPECT_GT(published_from, 30);
  }
}

TEST_F(CheckpointStopTest, ACallThatFailsLosesNothing) {
  for (int64_t call = 1;; ++call) {
    SCOPED_TRACE(call);
    const int error = call % 3 == 0 ? EIO : call % 3 == 1 ? ENOSPC : EACCES;
    FaultyFiles files(Graveyard(), Fault::kError, call, error);
    const absl::Status saved = SaveThird(files);
    if (!files.reached()) break;
    const int64_t newest = NewestWholeStep(Path("run"));
    ASSERT_THAT(newest, AnyOf(kOld, kNew));
    ASSERT_TRUE(newest == kNew || !saved.ok());
    if (!saved.ok()) {
      EXPECT_THAT(std::string(saved.message()), HasSubstr(Path("run")));
      EXPECT_THAT(std::string(saved.message()), HasSubstr(std::strerror(error)));
    }
    GoOn(newest);
    if (HasFailure()) return;
  }
}

TEST_F(CheckpointStopTest, AWriteThatIsShortOrInterruptedGoesOn) {
  for (int64_t call = 1;; ++call) {
    FaultyFiles files(Graveyard(), Fault::kShortWrite, call);
    ASSERT_TRUE(SaveThird(files).ok());
    ASSERT_EQ(NewestWholeStep(Path("run")), kNew);
    if (!files.reached()) break;
  }
}

// One writer, as a run has it: the disk fills up, and later there is room again.
TEST_F(CheckpointStopTest, AFullDiskCostsOneCheckpoint) {
  for (int64_t call = 3;; ++call) {
    FaultyFiles files(Graveyard(), Fault::kDiskFull, call);
    fs::remove_all(Path("run"));
    fs::copy(Path("before"), Path("run"), fs::copy_options::recursive);
    auto writer = CheckpointWriter::Create(Options(files), 0, 1).value();
    const auto world = MakeLocalWorld({.ranks = 1});
    const absl::Status full = testing::SaveRows(*writer, *world[0], kNew);
    if (!files.reached()) break;
    ASSERT_THAT(NewestWholeStep(Path("run")), AnyOf(kOld, kNew));
    if (!full.ok()) {
      EXPECT_THAT(full, StatusIs(kUnavailable, "No space left on device"));
      EXPECT_FALSE(fs::exists(UnfinishedPath(Path("run"), kNew)));
    }
    files.Mend();
    ASSERT_TRUE(testing::SaveRows(*writer, *world[0], kNew + 1).ok());
    ASSERT_EQ(NewestWholeStep(Path("run")), kNew + 1);
  }
}

// A disk that hangs in any call: the error names the call within the run's deadline, and nothing
// but closing follows that call when the disk comes back.
TEST_F(CheckpointStopTest, ACallThatHangsIsNamedWithinTheDeadline) {
  const auto world = MakeLocalWorld({.ranks = 1});
  const auto stream = MakeInlineStream();
  // Calls of a save, those of Create apart.
  const auto save = [&](FaultyFiles& files, int64_t& created) {
    fs::remove_all(Path("run"));
    fs::copy(Path("before"), Path("run"), fs::copy_options::recursive);
    CheckpointOptions options = Options(files);
    options.timeout = absl::Milliseconds(500);  // a busy machine may stand still for less
    auto writer = CheckpointWriter::Create(options, 0, 1).value();
    created = files.calls();
    const auto memory = testing::PartsOf(0, 1, Cut::kRows, kNew);
    EXPECT_TRUE(writer->Start(testing::StateOf(kNew), memory.parts).ok());
    const absl::Time begin = absl::Now();
    const absl::Status saved = writer->Publish(*world[0], *stream);
    EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
    return saved;
  };
  // Never destroyed: threads that were left may be in them.
  static auto& disks = *new std::vector<std::unique_ptr<FaultyFiles>>();
  int64_t first = 0;
  FaultyFiles whole;
  ASSERT_TRUE(save(whole, first).ok());
  const int64_t last = whole.calls();
  for (int64_t call = first + 1; call <= last; call += (last - first) / 2) {
    SCOPED_TRACE(call);
    disks.push_back(std::make_unique<FaultyFiles>("", Fault::kHang, call));
    FaultyFiles& files = *disks.back();
    EXPECT_THAT(save(files, first), StatusIs(kDeadlineExceeded, "in Save (checkpoint, step 30): "));
    EXPECT_EQ(files.calls(), call);
    files.Mend();
    absl::SleepFor(absl::Milliseconds(50));
    EXPECT_LE(files.calls(), call + 1);
    const int64_t newest = NewestWholeStep(Path("run"));
    ASSERT_THAT(newest, AnyOf(kOld, kNew));
    GoOn(newest);
    if (HasFailure()) return;
  }
}

// The mount of one of two ranks is lost while the third checkpoint is written, published and makes
// the first one go; then the mount is back, and the run continues.
TEST_F(CheckpointStopTest, AMountThatIsLostAtAnyCallLosesNothing) {
  for (const int lost : {0, 1}) {
    int64_t failed = 0;
    for (int64_t call = 1;; ++call) {
      SCOPED_TRACE(absl::StrCat("rank ", lost, ", call ", call));
      fs::remove_all(Path("run"));
      fs::copy(Path("before"), Path("run"), fs::copy_options::recursive);
      fs::remove_all(Path("other"));
      fs::create_directories(Path("other"));
      testing::MovedFiles files(Path("run"), Path("other"), call);
      std::vector<absl::Status> third(2), fourth(2);
      testing::RunLocalRanks(2, [&](std::unique_ptr<Communicator> world) {
        const int rank = world->rank();
        FileSystem& mine = rank == lost ? static_cast<FileSystem&>(files) : disk_;
        auto writer = CheckpointWriter::Create(Options(mine), rank, 2).value();
        const auto save = [&](int64_t step) {
          return testing::SaveRows(*writer, *world, step);
        };
        third[rank] = save(kNew);
        if (rank == 0) {
          EXPECT_EQ(NewestWholeStep(Path("run")), third[0].ok() ? kNew : kOld);
          files.Return();
        }
        fourth[rank] = save(kNew + 1);
        return absl::OkStatus();
      });
      EXPECT_EQ(third[1], third[0]);
      EXPECT_TRUE(fourth[0].ok() && fourth[1].ok()) << fourth[0];
      EXPECT_EQ(NewestWholeStep(Path("run")), kNew + 1);
      if (HasFailure()) return;
      if (!third[0].ok()) ++failed;
      if (call > 4 && third[0].ok()) break;  // after all calls of the third one
    }
    EXPECT_GT(failed, 5);
  }
}

}  // namespace
}  // namespace moe
