// What the process beside the ranks of a host says of those that go. Ranks are processes here, too,
// but no launcher ends them.
#include "comm/mpi/host_watch.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <utility>

#include <absl/status/status.h>
#include <absl/strings/str_cat.h>
#include <absl/time/clock.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/create.h"
#include "comm/local/local_world.h"
#include "tests/comm/forwarding_communicator.h"

namespace moe {
namespace {

constexpr int kRanks = 3;

// What processes share: the cards that they hand round, and how many have joined and begun to work.
struct Shared {
  std::array<std::array<std::byte, 64>, kRanks> cards;
  std::atomic<int> gathered, joined, begun;
};

// A world of processes that knows one collective, and that once.
class SharedWorld final : public testing::ForwardingCommunicator {
 public:
  SharedWorld(std::unique_ptr<Communicator> alone, int rank, Shared& shared)
      : ForwardingCommunicator(std::move(alone)), rank_(rank), shared_(shared) {}
  int rank() const override { return rank_; }
  int size() const override { return kRanks; }

 private:
  absl::Status DoCollective(CollectiveCall call, Stream&) override {
    std::copy(call.send.begin(), call.send.end(), shared_.cards[rank_].begin());
    ++shared_.gathered;
    while (shared_.gathered < kRanks) absl::SleepFor(absl::Milliseconds(1));
    auto to = call.recv.begin();
    for (const auto& card : shared_.cards) to = std::copy_n(card.begin(), call.send.size(), to);
    return absl::OkStatus();
  }

  const int rank_;
  Shared& shared_;
};

// The life of a rank: joins, comes to a place, and waits to be killed; SIGUSR1 makes it exit.
[[noreturn]] void RunRank(int rank, bool alone, Shared& shared) {
  RunOptions options;
  options.plan.launch = {.rank = rank, .size = kRanks, .local_rank = alone ? 0 : rank};
  options.report = [](const absl::Status& status) {
    std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  };
  HostWatch watch(options);
  SharedWorld world(std::move(MakeLocalWorld({.ranks = 1}).front()), rank, shared);
  LastPlaces places;
  if (watch.Join(world, &places, alone ? rank : 0).ok()) ++shared.joined;
  while (shared.joined < kRanks) absl::SleepFor(absl::Milliseconds(1));
  std::signal(SIGUSR1, [](int) { _exit(1); });
  places.Mark({.name = "experts", .layer = rank, .step = 5});
  ++shared.begun;
  for (;;) pause();
}

class HostWatchTest : public ::testing::Test {
 protected:
  // alone: each rank has a host of its own; file: standard error is one.
  explicit HostWatchTest(bool alone = false, std::FILE* file = nullptr)
      : alone_(alone), said_(file) {}
  void SetUp() override {
    void* const memory =
        mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    shared_ = new (memory) Shared();
    std::array<int, 2> ends = {};
    ASSERT_EQ(pipe(ends.data()), 0);
    if (said_ != nullptr) dup2(fileno(said_), ends[1]);
    for (int rank = 0; rank < kRanks; ++rank) {
      processes_[rank] = fork();
      if (processes_[rank] != 0) continue;
      dup2(ends[1], STDERR_FILENO);
      RunRank(rank, alone_, *shared_);
    }
    close(ends[1]);
    if (said_ == nullptr) said_ = fdopen(ends[0], "r");
    while (shared_->begun < kRanks) absl::SleepFor(absl::Milliseconds(1));
    std::ifstream children(
        absl::StrCat("/proc/", processes_[0], "/task/", processes_[0], "/children"));
    ASSERT_TRUE(children >> watch_);
  }
  void TearDown() override { munmap(shared_, sizeof(Shared)); }

  // Ends the rank and takes its status away, as launchers do.
  void Reap(int rank) {
    kill(processes_[rank], SIGKILL);
    ASSERT_EQ(waitpid(processes_[rank], nullptr, 0), processes_[rank]);
  }

  // All that ranks and watch say, once they are gone.
  std::string Said() {
    std::string all;
    for (int c = std::fgetc(said_); c != EOF; c = std::fgetc(said_)) all += static_cast<char>(c);
    std::fclose(said_);
    return all;
  }

  std::string Gone(int rank) const {
    return absl::StrCat("rank ", rank, " \\(process ", processes_[rank],
                        "\\) is gone without a word [0-9.ms]+ after it came to experts "
                        "\\(layer ",
                        rank, ", step 5\\)");
  }

  const bool alone_;
  Shared* shared_ = nullptr;
  std::array<pid_t, kRanks> processes_ = {};
  pid_t watch_ = 0;
  std::FILE* said_;
};

// A launcher ends the others at once and reaps them all, before the watch has its turn: the rank
// that died first is among those that it names, whichever it hears of first.
TEST_F(HostWatchTest, NamesEveryRankThatIsGoneWhenItComesToLook) {
  kill(watch_, SIGSTOP);
  Reap(0);
  Reap(1);
  kill(watch_, SIGCONT);
  std::string line;
  for (int c = std::fgetc(said_); c != '\n' && c != EOF; c = std::fgetc(said_)) {
    line += static_cast<char>(c);
  }
  EXPECT_THAT(line,
              ::testing::MatchesRegex(absl::StrCat("on host [^ ]+ ", Gone(0), ", ", Gone(1))));
  Reap(2);
  EXPECT_EQ(Said(), "");  // one line for one failure
}

struct LoneRankTest : HostWatchTest {
  LoneRankTest() : HostWatchTest(true) {}
};

// Whoever started it lives on, so that it did not end it because of another host.
TEST_F(LoneRankTest, IsReportedWhereItsLauncherOutlivesIt) {
  kill(processes_[1], SIGKILL);
  absl::SleepFor(absl::Seconds(2));  // the others end later than its watch waits
  for (const int rank : {0, 1, 2}) Reap(rank);
  EXPECT_THAT(Said(), ::testing::ContainsRegex(absl::StrCat(
                          "rank 1 \\(process ", processes_[1],
                          "\\) was killed by signal 9 \\(Killed\\) (0|[0-9]+ms) after")));
}

// A library may have ended rank 2 because of rank 1, which is then what to look at.
TEST_F(LoneRankTest, ThatExitsIsReportedAfterTheOneThatWasKilledBefore) {
  kill(processes_[1], SIGKILL);
  absl::SleepFor(absl::Milliseconds(200));
  kill(processes_[2], SIGUSR1);
  absl::SleepFor(absl::Seconds(2.2));
  for (const int rank : {0, 1, 2}) Reap(rank);
  EXPECT_THAT(Said(), ::testing::ContainsRegex(
                          "rank 1 [^\n]+ was killed [^\n]+\n.+rank 2 [^\n]+ exit code 1"));
}

struct LoneRankWithAFileTest : HostWatchTest {
  LoneRankWithAFileTest() : HostWatchTest(true, std::tmpfile()) {}
};

// Whether the launcher reads the file is unknown, and so whether it has killed the rank itself.
TEST_F(LoneRankWithAFileTest, IsNotReportedWhenKilled) {
  kill(processes_[1], SIGKILL);
  absl::SleepFor(absl::Seconds(2));
  for (const int rank : {0, 1, 2}) Reap(rank);
  std::rewind(said_);
  EXPECT_EQ(Said(), "");
}

// Rank 0 is on a host, ranks 1 and 2 are on another. The deadlines of 0 and 1 pass, as they wait
// for 2: the host of 2 reports first, and could have ended the job before the other reports.
TEST(HostWatchTurnsTest, TheHostOfTheRankThatIsWaitedForReportsFirst) {
  struct Turns : Shared {
    std::array<std::atomic<int64_t>, kRanks> answered_ns;
  };
  void* const memory =
      mmap(nullptr, sizeof(Turns), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* const shared = new (memory) Turns();
  std::array<pid_t, kRanks> processes = {};
  for (int rank = 0; rank < kRanks; ++rank) {
    processes[rank] = fork();
    if (processes[rank] != 0) continue;
    RunOptions options;
    options.plan.launch = {.rank = rank, .size = kRanks, .local_rank = rank / 2};
    options.report = [](const absl::Status&) {
    };
    HostWatch watch(options);
    SharedWorld world(std::move(MakeLocalWorld({.ranks = 1}).front()), rank, *shared);
    if (watch.Join(world, nullptr, rank == 0 ? 5 : 9).ok()) ++shared->joined;
    while (shared->joined < kRanks) absl::SleepFor(absl::Milliseconds(1));
    if (rank < 2 && watch.MaySpeak(absl::DeadlineExceededError("late")).has_value()) {
      shared->answered_ns[rank] = absl::GetCurrentTimeNanos();
    }
    for (;;) pause();
  }
  while (shared->answered_ns[0] == 0 || shared->answered_ns[1] == 0) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_GT(shared->answered_ns[0] - shared->answered_ns[1], 250'000'000);
  for (const pid_t process : processes) {
    kill(process, SIGKILL);
    waitpid(process, nullptr, 0);
  }
  munmap(memory, sizeof(Turns));
}

}  // namespace
}  // namespace moe
