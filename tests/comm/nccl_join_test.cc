// How ranks come by the id of their world: over another communicator, and through a file.
#include "comm/nccl/nccl_join.h"

#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "comm/local/local_world.h"
#include "tests/cusim/fake_nccl.h"
#include "tests/cusim/fake_streams.h"

namespace moe {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kRanks = 3;
constexpr absl::Duration kTimeout = absl::Milliseconds(200);

using Joined = absl::StatusOr<std::unique_ptr<Communicator>>;

std::string Text(const Joined& joined) {
  return std::string(joined.status().message());
}

class NcclJoinTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string folder = ::testing::TempDir() + "nccl_join_XXXXXX";
    ASSERT_NE(mkdtemp(folder.data()), nullptr);
    folder_ = folder;
    file_ = {.path = folder_ + "/id", .run_token = "run 7"};
  }
  void TearDown() override {
    unlink(file_.path.c_str());
    EXPECT_EQ(rmdir(folder_.c_str()), 0) << "something was left in " << folder_;
    EXPECT_EQ(cusim::NcclCommunicators(), 0);
  }

  static NcclRankOptions Rank(int rank, absl::Duration timeout = absl::Seconds(30)) {
    return {.rank = rank, .size = kRanks, .device = rank, .timeout = timeout};
  }
  static void OnRanks(const std::function<void(int rank)>& body) {
    std::vector<std::thread> threads;
    for (int r = 0; r < kRanks; ++r) threads.emplace_back(body, r);
    for (auto& thread : threads) thread.join();
  }
  void Leave(const std::string& content, mode_t mode) {
    std::ofstream(file_.path) << content;
    ASSERT_EQ(chmod(file_.path.c_str(), mode), 0);
  }
  bool FileIsThere() const { return access(file_.path.c_str(), F_OK) == 0; }

  const cusim::ScopedMachine machine_{{.devices = kRanks}};
  std::string folder_;
  NcclIdFile file_;
};

void ExpectMeets(const Joined& joined, int rank) {
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_EQ((*joined)->rank(), rank);
  EXPECT_EQ((*joined)->size(), kRanks);
  EXPECT_TRUE((*joined)->Barrier().ok());
}

TEST_F(NcclJoinTest, OverAnotherCommunicatorOfTheSameRanks) {
  auto meeting = MakeLocalWorld({.ranks = kRanks});
  OnRanks([&](int r) { ExpectMeets(JoinNcclOver(*meeting[r], {.device = r}), r); });
}

TEST_F(NcclJoinTest, AllLearnWhyThereIsNoId) {
  const cusim::ScopedNccl nccl({.version = 22605});
  auto meeting = MakeLocalWorld({.ranks = kRanks});
  OnRanks([&](int r) {
    const Joined joined = JoinNcclOver(*meeting[r], {.device = r});
    EXPECT_EQ(joined.status().code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(Text(joined), HasSubstr("version 2.26.5"));
  });
}

TEST_F(NcclJoinTest, ThroughAFileThatIsGoneAfterwards) {
  OnRanks([&](int r) {
    if (r == 0) absl::SleepFor(absl::Milliseconds(20));
    ExpectMeets(JoinNcclByFile(Rank(r), file_), r);
  });
  EXPECT_FALSE(FileIsThere());
}

TEST_F(NcclJoinTest, AFileOfAnotherRunIsNotTaken) {
  Leave("moe-nccl-id-1\n" + std::string(128, 'x') + "run 6", 0600);
  const Joined alone = JoinNcclByFile(Rank(1, kTimeout), file_);
  EXPECT_EQ(alone.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(Text(alone), AllOf(HasSubstr("rank 1 on host "), HasSubstr("for rank 0"),
                                 HasSubstr("deadline 200ms"), HasSubstr("is of another run")));
  // Rank 0 writes over it; who came before it waits.
  OnRanks([&](int r) {
    if (r == 0) absl::SleepFor(absl::Milliseconds(20));
    ExpectMeets(JoinNcclByFile(Rank(r), file_), r);
  });
}

TEST_F(NcclJoinTest, RankZeroMissesTheOthersAndTakesItsFileAway) {
  const Joined joined = JoinNcclByFile(Rank(0, kTimeout), file_);
  EXPECT_EQ(joined.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(Text(joined), HasSubstr("for ranks 1, 2"));
  EXPECT_FALSE(FileIsThere());
}

TEST_F(NcclJoinTest, WithoutRankZeroTheOthersMissItsFile) {
  const Joined joined = JoinNcclByFile(Rank(2, kTimeout), file_);
  EXPECT_EQ(joined.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(Text(joined), AllOf(HasSubstr("for rank 0"), HasSubstr("did not appear")));
}

TEST_F(NcclJoinTest, TwoRunsWithOneTokenAreRefused) {
  Leave("moe-nccl-id-1\n" + std::string(128, 'x') + file_.run_token, 0600);
  EXPECT_EQ(JoinNcclByFile(Rank(0), file_).status().code(), absl::StatusCode::kAlreadyExists);
}

// What rank 0 will not write nobody waits for.
TEST_F(NcclJoinTest, EveryRankSaysAtOnceThatTheLibraryWillNotDo) {
  const cusim::ScopedNccl nccl({.version = 22605});
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(JoinNcclByFile(Rank(rank), file_).status().code(), absl::StatusCode::kUnimplemented);
  }
}

// A run that ends late does not take away what the next one has written.
TEST_F(NcclJoinTest, AFileOfALaterRunStays) {
  std::thread late([&] {  // alone: nobody joins it
    NcclRankOptions alone = Rank(0);
    alone.join_timeout = 3 * kTimeout;
    EXPECT_FALSE(JoinNcclByFile(alone, file_).ok());
  });
  while (access(file_.path.c_str(), F_OK) != 0) std::this_thread::yield();
  unlink(file_.path.c_str());
  Leave("moe-nccl-id-1\n" + std::string(128, 'x') + "run 8", 0600);
  late.join();
  EXPECT_EQ(access(file_.path.c_str(), F_OK), 0);
}

TEST_F(NcclJoinTest, AFileThatOthersMayReadIsRefused) {
  Leave("moe-nccl-id-1\n" + std::string(128, 'x') + file_.run_token, 0644);
  for (const int rank : {0, 1}) {
    const Joined joined = JoinNcclByFile(Rank(rank), file_);
    EXPECT_EQ(joined.status().code(), absl::StatusCode::kPermissionDenied);
    EXPECT_THAT(Text(joined), HasSubstr("may be used by others"));
  }
}

TEST_F(NcclJoinTest, ALinkIsNotFollowed) {
  ASSERT_EQ(symlink("/etc/passwd", file_.path.c_str()), 0);
  EXPECT_EQ(JoinNcclByFile(Rank(1), file_).status().code(), absl::StatusCode::kPermissionDenied);
}

TEST_F(NcclJoinTest, BadArgumentsAndFoldersAreNamed) {
  EXPECT_EQ(JoinNcclByFile(Rank(0), {.path = file_.path}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(JoinNcclByFile(Rank(0), {.path = "", .run_token = "x"}).status().code(),
            absl::StatusCode::kInvalidArgument);
  const Joined nowhere = JoinNcclByFile(Rank(0), {.path = folder_ + "/no/id", .run_token = "x"});
  EXPECT_EQ(nowhere.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Text(nowhere), HasSubstr("cannot create"));
}

}  // namespace
}  // namespace moe
