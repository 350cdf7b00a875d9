// The folder of a run: its lock, what ranks prove of it at the start, and whether there is room.
#include "moe/checkpoint/run_folder.h"

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>
#include <absl/time/clock.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/hosts.h"
#include "comm/local/local_world.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"
#include "moe/checkpoint/writer.h"
#include "moe/io/file.h"
#include "tests/comm/local_ranks.h"
#include "tests/moe/checkpoint/faulty_files.h"
#include "tests/moe/io/io_test.h"
#include "tests/moe/status_is.h"

namespace moe {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::Fault;
using testing::FaultyFiles;
using ::testing::HasSubstr;
using enum absl::StatusCode;
using testing::StatusIs;

constexpr absl::Duration kBeat = absl::Milliseconds(40);

class RunFolderTest : public IoTest {
 protected:
  void SetUp() override {
    IoTest::SetUp();
    fs::create_directories(Folder());
    warnings_.clear();
    SetLogCallback([](LogLevel, absl::string_view text) {
      const std::lock_guard lock(mu_);
      absl::StrAppend(&warnings_, text, "\n");
    });
  }
  void TearDown() override {
    SetLogCallback(nullptr);
    IoTest::TearDown();
  }

  std::string Folder() const { return Path("run"); }
  std::string LockPath() const { return Folder() + "/lock"; }
  RunLock Lock() const { return RunLock(Folder(), kBeat, RealFileSystem()); }
  void Leave(const std::string& text) const { std::ofstream(LockPath()) << text; }
  // Tries until the lock is held or refused.
  absl::Status Take(RunLock& lock) const {
    for (;;) {
      const absl::StatusOr<bool> taken = lock.TryTake(RealFileSystem());
      if (!taken.ok() || *taken) return taken.status();
      absl::SleepFor(kBeat / 10);
    }
  }
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(Folder())) {
      names.push_back(entry.path().filename().string());
    }
    return names;
  }

  inline static std::mutex mu_;
  inline static std::string warnings_;  // guarded by mu_
};

// Holder of a lock: a process of this host that has ended. reaped: its parent has waited for it,
// too.
LockHolder Ended(bool reaped, pid_t& child) {
  LockHolder holder = ThisRun();
  child = ::fork();
  if (child == 0) ::_exit(0);
  holder.pid = child;
  siginfo_t ended = {};
  EXPECT_EQ(::waitid(P_PID, child, &ended, WEXITED | WNOWAIT), 0);
  std::ifstream stat(absl::StrCat("/proc/", child, "/stat"));
  std::string field;
  for (int i = 0; i < 22; ++i) stat >> field;
  holder.process_start = std::stoll(field);
  if (reaped) {
    EXPECT_EQ(::waitpid(child, nullptr, 0), child);
  }
  return holder;
}

TEST_F(RunFolderTest, ALockSaysWhoseItIs) {
  const LockHolder me = ThisRun();
  EXPECT_EQ(me.pid, ::getpid());
  EXPECT_EQ(me.host, HostName());
  EXPECT_EQ(me.run.size(), 16u);
  EXPECT_NE(ThisRun().run, me.run);
  const auto read = ParseLock(LockText(me)).value();
  EXPECT_EQ(LockText(read), LockText(me));
  for (const char* text : {"", "{", "[]", "7", R"({"run":"a","host":"b","pid":"1"})"}) {
    EXPECT_EQ(ParseLock(text).status().code(), kDataLoss) << text;
  }
  const std::string line = LockText(me), pid = absl::StrCat("\"pid\":", me.pid);
  for (const char* number : {"-1", "2147483648", "18446744073709551615", "1.5", "1,\"pid\":1"}) {
    const std::string text = absl::StrReplaceAll(line, {{pid, absl::StrCat("\"pid\":", number)}});
    EXPECT_EQ(ParseLock(text).status().code(), kDataLoss) << text;
  }
}

TEST_F(RunFolderTest, OneRunHoldsTheFolder) {
  {
    RunLock first = Lock();
    ASSERT_TRUE(Take(first).ok());
    EXPECT_EQ(ParseLock(Read(LockPath()))->run, first.run());
    RunLock second = Lock();
    EXPECT_THAT(Take(second),
                StatusIs(kInvalidArgument, absl::StrCat("'", LockPath(), "' is held by process ",
                                                        ::getpid(), " on host ", HostName())));
    EXPECT_TRUE(first.CheckHeld(RealFileSystem()).ok());
  }
  EXPECT_THAT(Names(), ElementsAre());
  RunLock third = Lock();
  EXPECT_TRUE(Take(third).ok());
  EXPECT_EQ(warnings_, "");
}

TEST_F(RunFolderTest, OfManyThatStartTogetherOneHoldsTheFolder) {
  pid_t child = 0;
  const std::string stale = LockText(Ended(/*reaped=*/true, child));
  for (const bool free : {true, false}) {
    if (!free) Leave(stale);
    constexpr int kRuns = 8;
    std::atomic<int> began = 0, held = 0, ended = 0;
    std::vector<std::thread> runs;
    for (int i = 0; i < kRuns; ++i) {
      runs.emplace_back([&] {
        RunLock lock = Lock();
        const bool taken = Take(lock).ok();
        began += 1;
        while (began < kRuns) absl::SleepFor(absl::Milliseconds(1));
        if (taken && lock.CheckHeld(RealFileSystem()).ok()) held += 1;
        ended += 1;
        while (ended < kRuns) absl::SleepFor(absl::Milliseconds(1));
      });
    }
    for (std::thread& run : runs) run.join();
    EXPECT_EQ(held, 1);
  }
}

// A run is killed and started again on one host: it takes the lock over at once, with a warning.
TEST_F(RunFolderTest, AProcessOfThisHostThatHasEndedHoldsNothing) {
  for (const bool reaped : {true, false}) {
    pid_t child = 0;
    const LockHolder gone = Ended(reaped, child);
    Leave(LockText(gone));
    RunLock lock = Lock();
    EXPECT_TRUE(lock.TryTake(RealFileSystem()).value());
    EXPECT_THAT(warnings_,
                HasSubstr(absl::StrCat("is taken over from process ", gone.pid, " on host ",
                                       gone.host, " since ", gone.since, ", which has ended")));
    warnings_.clear();
    if (!reaped) {
      EXPECT_EQ(::waitpid(child, nullptr, 0), child);
    }
  }
  // A later process has the same process id.
  LockHolder other = ThisRun();
  other.process_start -= 1;
  Leave(LockText(other));
  RunLock lock = Lock();
  EXPECT_TRUE(lock.TryTake(RealFileSystem()).value());
}

// The holder is on another host or in another container, or ended before it had written.
TEST_F(RunFolderTest, AHolderThatCannotBeSeenIsWatched) {
  std::vector<std::string> texts = {""};
  LockHolder holder = ThisRun();
  holder.host_id += 1;
  texts.push_back(LockText(holder));
  holder = ThisRun();
  holder.pid_namespace = "pid:[1]";
  texts.push_back(LockText(holder));
  for (const std::string& text : texts) {
    SCOPED_TRACE(text);
    Leave(text);
    RunLock lock = Lock();
    const absl::Time begin = absl::Now();
    EXPECT_FALSE(lock.TryTake(RealFileSystem()).value());
    EXPECT_TRUE(Take(lock).ok());
    EXPECT_GE(absl::Now() - begin, RunLock::kStaleBeats * kBeat);
    EXPECT_THAT(warnings_, HasSubstr("which has not touched it for 120ms"));
    warnings_.clear();
  }
  Leave(texts.back());
  RunLock lock = Lock();
  EXPECT_FALSE(lock.TryTake(RealFileSystem()).value());
  fs::last_write_time(LockPath(), fs::file_time_type::clock::now() + std::chrono::seconds(7));
  EXPECT_THAT(Take(lock), StatusIs(kInvalidArgument, ", which still runs, expected a folder"));
  EXPECT_EQ(Read(LockPath()), texts.back());
}

TEST_F(RunFolderTest, AHolderTouchesItsLock) {
  RunLock lock = Lock();
  ASSERT_TRUE(Take(lock).ok());
  SmallFile first, now;
  ASSERT_FALSE(RealFileSystem().ReadSmall(LockPath(), first));
  const absl::Time end = absl::Now() + absl::Seconds(20);
  do {
    absl::SleepFor(kBeat / 4);
    ASSERT_FALSE(RealFileSystem().ReadSmall(LockPath(), now));
  } while (now.modified_ns == first.modified_ns && absl::Now() < end);
  EXPECT_GT(now.modified_ns, first.modified_ns);
}

TEST_F(RunFolderTest, ALockThatIsLostIsNoticed) {
  LockHolder other = ThisRun();
  other.host = "elsewhere";
  {
    RunLock lock = Lock();
    ASSERT_TRUE(Take(lock).ok());
    fs::remove(LockPath());
    EXPECT_TRUE(lock.CheckHeld(RealFileSystem()).ok());
    EXPECT_THAT(warnings_, HasSubstr("lock' is gone and made anew"));
    EXPECT_EQ(ParseLock(Read(LockPath()))->run, lock.run());
    Leave(LockText(other));
    EXPECT_THAT(lock.CheckHeld(RealFileSystem()), StatusIs(kUnavailable, "was taken by process"));
  }
  EXPECT_EQ(Read(LockPath()), LockText(other));  // it is not ours to remove
}

// The statuses of ranks that open a folder each, which must be one.
absl::Status OpenAll(const std::vector<RunFolderOptions>& ranks) {
  std::vector<absl::Status> statuses(ranks.size());
  std::vector<std::string> runs(ranks.size());
  testing::RunLocalRanks(static_cast<int>(ranks.size()), [&](std::unique_ptr<Communicator> world) {
    const int rank = world->rank();
    const auto stream = MakeInlineStream();
    const auto folder = RunFolder::Open(ranks[rank], *world, *stream);
    statuses[rank] = folder.status();
    if (folder.ok()) runs[rank] = (*folder)->run();
    return world->Barrier();
  });
  for (const absl::Status& status : statuses) EXPECT_EQ(status, statuses[0]);
  for (const std::string& run : runs) EXPECT_EQ(run, runs[0]);
  return statuses[0];
}

TEST_F(RunFolderTest, RanksProveThatTheySeeOneFolder) {
  RunFolderOptions one = {.folder = Folder(), .sight = absl::Milliseconds(100)};
  RunFolderOptions same = one, other = one;
  same.folder = Folder() + "/../run/";
  EXPECT_TRUE(OpenAll({one, same, one}).ok());
  EXPECT_THAT(Names(), ElementsAre());
  other.folder = Path("local");
  const std::string host = HostName();
  EXPECT_THAT(OpenAll({one, other, same, other}),
              StatusIs(kInvalidArgument,
                       absl::StrCat("ranks 1, 3 on host ", host, " cannot see what rank 0 on host ",
                                    host, " writes to '", Folder(), "', expected one folder")));
  fs::create_directories(Path("local"));
  EXPECT_EQ(OpenAll({one, other}).code(), kInvalidArgument);
  EXPECT_THAT(Names(), ElementsAre());
  EXPECT_TRUE(fs::is_empty(Path("local")));
}

// Any call of any rank fails: all ranks report it, nothing is left, and the next start succeeds.
TEST_F(RunFolderTest, AFolderThatCannotBeWrittenIsFoundAtTheStart) {
  for (const size_t rank : {0, 1}) {
    int64_t refused = 0;
    for (int64_t call = 1;; ++call) {
      SCOPED_TRACE(absl::StrCat("rank ", rank, ", call ", call));
      FaultyFiles files("", Fault::kError, call, EROFS);
      std::vector<RunFolderOptions> ranks(2,
                                          {.folder = Folder(), .sight = absl::Milliseconds(100)});
      ranks[rank].files = &files;
      const absl::Status opened = OpenAll(ranks);
      if (!files.reached()) break;
      fs::remove(LockPath());  // where that was the call that failed
      if (!opened.ok()) {
        ++refused;
        EXPECT_EQ(opened.code(), kUnavailable) << opened;
        EXPECT_EQ(FileFaultOf(opened), FileFault::kWrite);
        EXPECT_THAT(opened.message(), HasSubstr("Read-only file system"));
        EXPECT_THAT(opened.message(), HasSubstr(Folder()));
        if (rank == 1) {
          EXPECT_THAT(opened.message(),
                      AllOf(HasSubstr("rank 1: "), HasSubstr(", on host " + HostName())));
        }
      }
    }
    EXPECT_GE(refused, 3);
    EXPECT_TRUE(OpenAll({{.folder = Folder()}, {.folder = Folder()}}).ok());
  }
}

// Deadlines hold before the first step, too: at the first, a middle and the last call of a start,
// those of CheckpointWriter included.
TEST_F(RunFolderTest, ACallThatHangsEndsTheStartInTime) {
  const auto start = [&](FaultyFiles& files) {
    const auto world = MakeLocalWorld({.ranks = 1});
    const auto stream = MakeInlineStream();
    const absl::Duration timeout = absl::Milliseconds(50);
    auto folder = RunFolder::Open({.folder = Folder(), .timeout = timeout, .files = &files},
                                  *world[0], *stream);
    MOE_RETURN_IF_ERROR(folder.status());
    MOE_RETURN_IF_ERROR((*folder)->CheckRoom(1, 1, *world[0], *stream));
    const CheckpointOptions options = {.folder = Folder(), .timeout = timeout, .files = &files};
    return CheckpointWriter::Create(options, 0, 1).status();
  };
  // Never destroyed: threads that were left may be in them.
  static auto& disks = *new std::vector<std::unique_ptr<FaultyFiles>>();
  FaultyFiles whole;
  ASSERT_TRUE(start(whole).ok());
  const int64_t last = whole.calls() - 1;  // the call after it releases the lock
  for (const int64_t call : {int64_t{1}, last / 2, last}) {
    SCOPED_TRACE(call);
    disks.push_back(std::make_unique<FaultyFiles>("", Fault::kHang, call));
    const absl::Time begin = absl::Now();
    EXPECT_THAT(start(*disks.back()), StatusIs(kDeadlineExceeded, ", deadline 50ms"));
    EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
    disks.back()->Mend();
    fs::remove(LockPath());
  }
}

TEST_F(RunFolderTest, AnotherRunIsRefusedOnAllRanks) {
  RunLock lock = Lock();
  ASSERT_TRUE(Take(lock).ok());
  EXPECT_THAT(OpenAll({{.folder = Folder()}, {.folder = Folder()}}),
              StatusIs(kInvalidArgument, "which still runs"));
}

// Both runs had judged that the lock's holder had ended; the second takes the lock between the
// first one's lock and its probe.
TEST_F(RunFolderTest, OfTwoThatTakeOverOneLockTheFirstIsRefused) {
  class LateTaker final : public FaultyFiles {
   public:
    explicit LateTaker(std::function<void()> take) : take_(std::move(take)) {}
    std::error_code Create(const std::string& path, int& file) override {
      if (path.find("/.probe-") != std::string::npos) take_();
      return FaultyFiles::Create(path, file);
    }

   private:
    const std::function<void()> take_;
  };
  LockHolder other = ThisRun();
  other.host = "elsewhere";
  LateTaker files([&] { Leave(LockText(other)); });
  EXPECT_THAT(OpenAll({{.folder = Folder(), .files = &files}, {.folder = Folder()}}),
              StatusIs(kInvalidArgument, "lock' was taken by process"));
  EXPECT_EQ(Read(LockPath()), LockText(other));
  EXPECT_THAT(Names(), ElementsAre("lock"));
}

TEST_F(RunFolderTest, RoomIsNeededForWhatStaysAndOneMore) {
  FaultyFiles files;
  std::vector<absl::Status> enough(2), short_of(2);
  testing::RunLocalRanks(2, [&](std::unique_ptr<Communicator> world) {
    const int rank = world->rank();
    const auto stream = MakeInlineStream();
    auto folder = RunFolder::Open({.folder = Folder(), .files = &files}, *world, *stream).value();
    const int64_t mine = (int64_t{rank} + 1) << 20;  // 3 MiB in all
    if (rank == 0) files.free_bytes = int64_t{6} << 20;
    enough[rank] = folder->CheckRoom(mine, 2, *world, *stream);
    if (rank == 0) files.free_bytes -= 1;
    short_of[rank] = folder->CheckRoom(mine, 2, *world, *stream);
    return absl::OkStatus();
  });
  EXPECT_TRUE(enough[0].ok() && enough[1].ok());
  EXPECT_THAT(short_of[0],
              StatusIs(kUnavailable, "needs 6.0 MiB for 2 more checkpoints of 3.0 MiB, free 6.0"));
  EXPECT_EQ(FileFaultOf(short_of[0]), FileFault::kWrite);
  EXPECT_EQ(short_of[1], short_of[0]);
  int64_t free = 0;
  ASSERT_FALSE(RealFileSystem().FreeBytes(Folder(), free));
  EXPECT_GT(free, 0);
}

TEST(CheckpointsToCome, TheOneThatIsWrittenIsThereBeforeTheOldestGoes) {
  EXPECT_EQ(CheckpointsToCome(/*there=*/0, /*saves=*/1, /*keep=*/3), 1);
  EXPECT_EQ(CheckpointsToCome(0, 3, 3), 3);
  EXPECT_EQ(CheckpointsToCome(0, 100, 3), 4);
  EXPECT_EQ(CheckpointsToCome(2, 100, 3), 2);
  EXPECT_EQ(CheckpointsToCome(3, 100, 3), 1);
  EXPECT_EQ(CheckpointsToCome(9, 100, 3), 1);
  EXPECT_EQ(CheckpointsToCome(0, 100, 1), 2);
}

}  // namespace
}  // namespace moe
