// Ranks that are processes meet over another communicator, or over TCP: early, late, not at all,
// where, and with which arguments.
#include <functional>

#include "comm/local/local_world.h"
#include "tests/comm/nccl_store_ranks.h"

namespace moe::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr absl::Duration kSoon = absl::Milliseconds(300);
constexpr absl::StatusCode kLate = absl::StatusCode::kDeadlineExceeded;

class NcclStoreRanksTest : public NcclStoreTest, public ::testing::WithParamInterface<int> {};

TEST_P(NcclStoreRanksTest, MeetAndSum) {
  std::vector<std::thread> ranks;
  for (int r = 0; r < GetParam(); ++r) ranks.push_back(Meeting(r, GetParam()));
  for (std::thread& rank : ranks) rank.join();
}

INSTANTIATE_TEST_SUITE_P(Sizes, NcclStoreRanksTest, ::testing::Values(1, 2, 5));

TEST_F(NcclStoreTest, MeetsAtANameAndAtAnAddressOfEitherKind) {
  for (const std::string host : {"localhost", "127.0.0.1", "127.0.0.7", "::1", "0.0.0.0"}) {
    const SocketAddress there = Resolve(host, store_.port).value().front();
    if (!ListenOn({there}).ok()) continue;  // a machine without IPv6
    SCOPED_TRACE(host);
    store_.host = host;
    std::thread other = Meeting(1, 2);
    Meet(0, 2);
    other.join();
  }
}

TEST_F(NcclStoreTest, AnyRankMayBeLate) {
  for (const int late : {0, 2}) {
    std::vector<std::thread> early;
    for (int r = 0; r < 3; ++r) {
      if (r != late) early.push_back(Meeting(r, 3));
    }
    absl::SleepFor(absl::Milliseconds(400));
    Meet(late, 3);
    for (std::thread& rank : early) rank.join();
  }
}

TEST_F(NcclStoreTest, RankZeroNamesExactlyWhoDidNotCome) {
  std::thread one([&] { EXPECT_EQ(Join(1, 5, 3 * kSoon).status().code(), kLate); });
  std::thread three([&] { EXPECT_EQ(Join(3, 5, 3 * kSoon).status().code(), kLate); });
  const Joined joined = Join(0, 5, 3 * kSoon);
  EXPECT_EQ(joined.status().code(), kLate);
  EXPECT_THAT(TextOf(joined),
              AllOf(StartsWith("rank 0 on host "), HasSubstr(" in joining NCCL: waited 9"),
                    HasSubstr("for ranks 2, 4, deadline 900ms"),
                    HasSubstr(absl::StrCat("127.0.0.1 port ", store_.port))));
  one.join();
  three.join();
}

// Linux may give a connection to a free port that very port, from even ones on: it meets itself.
TEST_F(NcclStoreTest, WhereNobodyListensNoTryConnects) {
  const SocketAddress nobody = Resolve(store_.host, store_.port & ~1).value().front();
  for (int i = 0; i < 30'000; ++i) {
    Patience patience(absl::Seconds(1));
    const auto socket = ConnectTo(nobody, patience);
    ASSERT_FALSE(socket.ok()) << "try " << i;
  }
}

TEST_F(NcclStoreTest, WithoutRankZeroTheOthersNameItsAddress) {
  const absl::Time begun = absl::Now();
  const Joined joined = Join(1, 2, kSoon);
  EXPECT_LT(absl::Now() - begun, kSoon + absl::Seconds(2));
  EXPECT_EQ(joined.status().code(), kLate);
  EXPECT_THAT(TextOf(joined),
              AllOf(StartsWith("rank 1 on host "), HasSubstr("for rank 0, deadline"),
                    HasSubstr(absl::StrCat(address(), ": Connection refused"))));
}

TEST_F(NcclStoreTest, JoiningHasADeadlineOfItsOwn) {
  const Joined joined = JoinNcclByTcp(
      {.rank = 0, .size = 2, .timeout = absl::Seconds(60), .join_timeout = kSoon}, store_);
  EXPECT_THAT(TextOf(joined), HasSubstr("for rank 1, deadline 300ms"));
}

TEST_F(NcclStoreTest, AllLearnWhyThereIsNoId) {
  const cusim::ScopedNccl nccl({.version = 22605});
  const auto expect_reason = [&](int rank) {
    const Joined joined = Join(rank, 3);
    EXPECT_EQ(joined.status().code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(TextOf(joined), HasSubstr("version 2.26.5"));
  };
  std::thread zero(expect_reason, 0);
  std::thread one(expect_reason, 1);
  const NcclAnnouncement said = Claim(2, 3);  // rank 0's own words
  EXPECT_EQ(said.code, static_cast<int32_t>(absl::StatusCode::kUnimplemented));
  EXPECT_THAT(std::string(IdOf(said).status().message()), HasSubstr("version 2.26.5"));
  EXPECT_EQ(said.id, NcclId{});
  zero.join();
  one.join();
  EXPECT_EQ(Join(0, 2, kSoon).status().code(), absl::StatusCode::kUnimplemented);  // alone
}

// As processes that have MPI do.
class NcclJoinOverCommunicatorTest : public ::testing::Test {
 protected:
  static void Join(const std::function<void(const Joined&, int rank)>& expect) {
    const cusim::ScopedMachine machine({.devices = 3});
    auto meeting = MakeLocalWorld({.ranks = 3});
    std::vector<std::thread> ranks;
    for (int r = 0; r < 3; ++r) {
      ranks.emplace_back([&, r] { expect(JoinNcclOver(*meeting[r], {.device = r}), r); });
    }
    for (std::thread& rank : ranks) rank.join();
    EXPECT_EQ(cusim::NcclCommunicators(), 0);
  }
};

TEST_F(NcclJoinOverCommunicatorTest, OverAnotherCommunicatorOfTheSameRanks) {
  Join([](const Joined& joined, int rank) {
    ASSERT_TRUE(joined.ok()) << joined.status();
    EXPECT_EQ((*joined)->rank(), rank);
    EXPECT_EQ((*joined)->size(), 3);
    EXPECT_TRUE((*joined)->Barrier().ok());
  });
}

TEST_F(NcclJoinOverCommunicatorTest, AllLearnWhyThereIsNoId) {
  const cusim::ScopedNccl nccl({.version = 22605});
  Join([](const Joined& joined, int) {
    EXPECT_EQ(joined.status().code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(TextOf(joined), HasSubstr("version 2.26.5"));
  });
}

TEST_F(NcclStoreTest, APortInUseIsNamed) {
  const Descriptor taken = Listen(store_.host, store_.port);
  const Joined joined = Join(0, 2);
  EXPECT_EQ(joined.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(TextOf(joined), AllOf(HasSubstr(address()), HasSubstr("Address already in use")));
}

TEST_F(NcclStoreTest, AnAddressOfAnotherMachineIsNamed) {
  store_.host = "198.51.100.77";  // for documentation: nobody's
  const Joined joined = Join(0, 2);
  EXPECT_EQ(joined.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(TextOf(joined), AllOf(HasSubstr(address()), HasSubstr("Cannot assign")));
}

TEST_F(NcclStoreTest, ListensAtItsAddressAlone) {
  std::thread zero = Meeting(0, 2);
  (void)Connect();
  for (const char* other : {"127.0.0.2", "::1"}) {
    const SocketAddress there = Resolve(other, store_.port).value().front();
    Patience patience(absl::Seconds(1));
    EXPECT_FALSE(ConnectTo(there, patience).ok()) << other;
  }
  Meet(1, 2);
  zero.join();
}

TEST_F(NcclStoreTest, ListensEverywhereOnlyWhereTheHostSaysSo) {
  for (const char* host : {"0", "0x0", "0::0"}) {
    store_.host = host;
    const Joined joined = Join(0, 1);
    EXPECT_EQ(joined.status().code(), absl::StatusCode::kInvalidArgument) << host;
    EXPECT_THAT(TextOf(joined), HasSubstr("every address of the machine"));
  }
}

TEST_F(NcclStoreTest, SecretsOfAnotherLengthAreRefusedUnprinted) {
  for (const size_t bytes : {0, 15, 257}) {
    store_.secret = std::string(bytes, 'Q');
    for (const int rank : {0, 1}) {
      const Joined joined = Join(rank, 2);
      EXPECT_EQ(joined.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(TextOf(joined), AllOf(HasSubstr(absl::StrCat("a secret of ", bytes, " bytes")),
                                        HasSubstr("16 to 256"), Not(HasSubstr("QQ"))));
    }
  }
}

TEST_F(NcclStoreTest, BadArgumentsAreNamed) {
  const auto refusal = [&](const std::string& host, int port) {
    const Joined joined = JoinNcclByTcp({.rank = 1, .size = 2}, {host, port, store_.secret});
    EXPECT_EQ(joined.status().code(), absl::StatusCode::kInvalidArgument) << joined.status();
    return TextOf(joined);
  };
  EXPECT_THAT(refusal("", 29500), HasSubstr("host ''"));
  EXPECT_THAT(refusal("localhost", 0), HasSubstr("port 0"));
  EXPECT_THAT(refusal("localhost", 65536), HasSubstr("port 65536"));
  EXPECT_THAT(refusal("no host", 29500), HasSubstr("host 'no host'"));
  EXPECT_EQ(Join(2, 2).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Join(-1, 2).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace moe::testing
