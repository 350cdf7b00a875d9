// What strangers at the place where ranks meet over TCP can do: nothing but be there.
#include <atomic>
#include <random>

#include "tests/comm/nccl_store_ranks.h"

namespace moe::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr absl::Duration kSoon = absl::Milliseconds(300);

Descriptor NextOf(const Descriptor& listener, absl::Duration patience = absl::Seconds(20)) {
  pollfd ready = {.fd = listener.number(), .events = POLLIN, .revents = 0};
  WaitFor({&ready, 1}, SteadyIn(patience));
  return AcceptFrom(listener);
}

std::string Text(const NcclAnnouncement& said) {
  return std::string(IdOf(said).status().message());
}

TEST_F(NcclStoreTest, AnotherSecretIsToldSoAndRankZeroGoesOn) {
  std::thread zero = Meeting(0, 2);
  NcclStore other = store_;
  other.secret = "another secret of the same test";
  const Joined joined = JoinNcclByTcp({.rank = 1, .size = 2, .device = 1}, other);
  EXPECT_EQ(joined.status().code(), absl::StatusCode::kUnauthenticated);
  EXPECT_THAT(TextOf(joined), AllOf(HasSubstr(address()), HasSubstr("another secret, expected"),
                                    Not(HasSubstr(other.secret))));
  Meet(1, 2);
  zero.join();
  EXPECT_THAT(Warnings::All(),
              ElementsAre(AllOf(HasSubstr("refused 127.0.0.1:"), HasSubstr("another secret"),
                                Not(HasSubstr(store_.secret)))));
}

TEST_F(NcclStoreTest, ARankThatCameAlreadyIsRefused) {
  std::thread zero([&] { EXPECT_TRUE(Join(0, 3).ok()); });
  std::atomic<int> refused = 0;
  const auto be_one = [&] {
    const Joined joined = Join(1, 3);
    if (joined.ok()) return;
    EXPECT_EQ(joined.status().code(), absl::StatusCode::kAlreadyExists);
    EXPECT_THAT(TextOf(joined), HasSubstr("refused rank 1 of 3 at 127.0.0.1:"));
    ++refused;
  };
  std::thread one(be_one);
  std::thread one_too(be_one);
  while (refused == 0) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_TRUE(Join(2, 3).ok());
  for (std::thread* rank : {&zero, &one, &one_too}) rank->join();
  EXPECT_EQ(refused, 1);
  EXPECT_THAT(Warnings::All(), ElementsAre(HasSubstr("refused rank 1 of 3")));
}

TEST_F(NcclStoreTest, RanksOutOfRangeAndOfOtherSizesAreRefused) {
  std::thread zero = Meeting(0, 2);
  EXPECT_THAT(Text(Claim(0, 2)), HasSubstr("refused rank 0 of 2"));
  EXPECT_THAT(Text(Claim(2, 2)), HasSubstr("refused rank 2 of 2"));
  EXPECT_THAT(Text(Claim(-1, 2)), HasSubstr("refused rank -1 of 2"));
  EXPECT_EQ(Claim(2, 2).id, NcclId{});
  const Joined joined = Join(1, 4);
  EXPECT_EQ(joined.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(TextOf(joined),
              AllOf(HasSubstr("refused rank 1 of 4"), HasSubstr("expected 2 ranks")));
  Meet(1, 2);
  zero.join();
}

TEST_F(NcclStoreTest, GarbageDoesNotKeepRanksFromJoining) {
  std::thread zero = Meeting(0, 3);
  std::thread one = Meeting(1, 3);
  std::atomic<bool> joined = false;
  std::atomic<int> talked = 0;
  const auto talk = [&](unsigned int seed) {
    std::mt19937 random(seed);
    const SocketAddress there = Resolve(store_.host, store_.port).value().front();
    while (!joined) {
      Patience patience(absl::Seconds(1));
      const auto socket = ConnectTo(there, patience);
      if (!socket.ok()) continue;
      std::string garbage(random() % 4096, '\0');
      for (char& byte : garbage) byte = static_cast<char>(random());
      // Rank 0 may receive nothing from a stranger that leaves at once.
      if (Send(*socket, garbage).ok() && garbage.size() >= sizeof(StoreClaim)) HearAll(*socket);
      ++talked;
    }
  };
  std::thread talker(talk, 1);
  std::thread another(talk, 2);
  while (talked < 500) absl::SleepFor(absl::Milliseconds(1));
  Meet(2, 3);
  joined = true;
  for (std::thread* thread : {&zero, &one, &talker, &another}) thread->join();
  const std::vector<std::string> lines = Warnings::All();
  ASSERT_EQ(lines.size(), 16);  // and not one for each of hundreds
  EXPECT_THAT(lines.back(), HasSubstr("further ones are not logged"));
}

TEST_F(NcclStoreTest, SilenceDoesNotKeepRanksFromJoining) {
  std::thread zero = Meeting(0, 2);
  std::vector<Descriptor> silent;
  for (int i = 0; i < 300; ++i) silent.push_back(Connect());  // more than rank 0 listens to at once
  const absl::Time begun = absl::Now();
  Meet(1, 2);
  EXPECT_LT(absl::Now() - begun, absl::Seconds(2)) << "waited until they were dropped";
  zero.join();
  EXPECT_THAT(Warnings::All(), ElementsAre());
}

TEST_F(NcclStoreTest, SilenceEnds) {
  std::thread zero = Meeting(0, 2);
  const Descriptor silent = Connect();
  const Descriptor stuck = Connect();
  EXPECT_TRUE(Send(stuck, "half a claim").ok());
  const absl::Time begun = absl::Now();
  EXPECT_EQ(HearAll(silent).size(), sizeof(StoreGreeting));
  EXPECT_EQ(HearAll(stuck).size(), sizeof(StoreGreeting));
  EXPECT_GT(absl::Now() - begun, absl::Seconds(2));
  EXPECT_LT(absl::Now() - begun, absl::Seconds(10));
  Meet(1, 2);
  zero.join();
}

TEST_F(NcclStoreTest, AClaimMayComeInPieces) {
  std::thread zero([&] { EXPECT_FALSE(Join(0, 2, 4 * kSoon).ok()); });  // this rank 1 stops here
  const Descriptor socket = Connect();
  const StoreSession session = SessionOn(socket);
  const StoreClaim claim = MakeClaim(session, 1, 2).value();
  for (const size_t begin : {0, 24, 48}) {
    EXPECT_TRUE(Send(socket, BytesOf(claim).substr(begin, 24)).ok());
    absl::SleepFor(absl::Milliseconds(5));
  }
  const auto answer = Hear<StoreAnswer>(socket);
  EXPECT_TRUE(IsProven(session, claim, answer));
  EXPECT_NE(answer.said.id, NcclId{});
  zero.join();
}

TEST_F(NcclStoreTest, NothingButANonceComesBeforeAProof) {
  std::thread zero([&] { EXPECT_FALSE(Join(0, 2, 4 * kSoon).ok()); });
  const Descriptor silent = Connect();
  const Descriptor liar = Connect();
  StoreClaim claim = MakeClaim({.secret = "a secret that is not the right one"}, 1, 2).value();
  EXPECT_TRUE(Send(liar, BytesOf(claim)).ok());
  std::string heard = HearAll(liar);
  EXPECT_EQ(heard.substr(sizeof(StoreGreeting)),
            BytesOf(StoreAnswer{}));  // no proof to try keys on
  const NcclAnnouncement said = Claim(1, 2);
  ASSERT_EQ(said.code, 0);
  heard += HearAll(silent);
  zero.join();
  const std::string id(said.id.data(), 16);  // id of the fake NCCL, a text
  EXPECT_THAT(id, HasSubstr("NCCL id"));
  EXPECT_THAT(std::string(BytesOf(said)), HasSubstr(id));
  EXPECT_THAT(heard, AllOf(Not(HasSubstr(id)), Not(HasSubstr(store_.secret))));
}

// Acts as rank 0: sends `greeting` to the first that connects and, after its claim, `answer`.
// Returns the claim.
StoreClaim BeRankZero(const Descriptor& listener, const StoreGreeting& greeting,
                      absl::string_view answer) {
  const Descriptor socket = NextOf(listener);
  EXPECT_TRUE(Send(socket, BytesOf(greeting)).ok());
  StoreClaim claim;
  Patience patience(absl::Seconds(20));
  EXPECT_TRUE(Receive(socket, RoomOf(claim), patience).ok());
  EXPECT_TRUE(Send(socket, answer).ok());
  return claim;
}

TEST_F(NcclStoreTest, AClaimOfAnEarlierRunIsRefused) {
  StoreClaim recorded;
  {
    const Descriptor listener = Listen(store_.host, store_.port);
    std::thread one([&] { EXPECT_FALSE(Join(1, 2, kSoon).ok()); });
    recorded = BeRankZero(listener, MakeGreeting().value(), "");
    one.join();
  }
  EXPECT_THAT(std::string(BytesOf(recorded)), Not(HasSubstr(store_.secret)));
  std::thread zero = Meeting(0, 2);
  const Descriptor socket = Connect();
  EXPECT_TRUE(Send(socket, BytesOf(recorded)).ok());
  EXPECT_EQ(HearAll(socket).substr(sizeof(StoreGreeting)), BytesOf(StoreAnswer{}));
  Meet(1, 2);
  zero.join();
}

TEST_F(NcclStoreTest, WhoRepeatsAnAnswerIsNotTakenForRankZero) {
  StoreGreeting greeting;
  StoreAnswer recorded;
  {
    std::thread zero([&] { EXPECT_FALSE(Join(0, 2, 4 * kSoon).ok()); });
    const Descriptor socket = Connect();
    const StoreSession session = SessionOn(socket);
    EXPECT_TRUE(Send(socket, BytesOf(MakeClaim(session, 1, 2).value())).ok());
    greeting = session.greeting;
    recorded = Hear<StoreAnswer>(socket);
    EXPECT_EQ(recorded.said.code, 0);
    zero.join();
  }
  const Descriptor listener = Listen(store_.host, store_.port);
  for (const StoreAnswer& answer : {recorded, StoreAnswer{}}) {
    std::thread impostor([&] { (void)BeRankZero(listener, greeting, BytesOf(answer)); });
    const Joined joined = Join(1, 2);
    EXPECT_EQ(joined.status().code(), absl::StatusCode::kUnauthenticated);
    EXPECT_THAT(TextOf(joined), HasSubstr(address()));
    impostor.join();
  }
}

// Rank 0 listens at one of two addresses of one name. A relay at the other passes messages to and
// fro.
TEST_F(NcclStoreTest, WhoPassesOnWhatOthersSayLearnsNothing) {
  std::thread zero = Meeting(0, 2);
  NcclStore elsewhere = store_;
  elsewhere.host = "127.0.0.2";
  const Descriptor listener = Listen(elsewhere.host, elsewhere.port);
  std::thread relay([&] {
    const Descriptor to_rank_zero = Connect();
    const auto greeting = Hear<StoreGreeting>(to_rank_zero);
    const Descriptor to_one = NextOf(listener);
    EXPECT_TRUE(Send(to_one, BytesOf(greeting)).ok());
    EXPECT_TRUE(Send(to_rank_zero, BytesOf(Hear<StoreClaim>(to_one))).ok());
    EXPECT_EQ(HearAll(to_rank_zero), BytesOf(StoreAnswer{}));
  });
  EXPECT_FALSE(
      JoinNcclByTcp({.rank = 1, .size = 2, .device = 1, .timeout = kSoon}, elsewhere).ok());
  relay.join();
  Meet(1, 2);
  zero.join();
}

TEST_F(NcclStoreTest, AnotherServiceIsNotTakenForRankZero) {
  const Descriptor listener = Listen(store_.host, store_.port);
  std::atomic<bool> late = false;
  std::thread service([&] {
    while (!late) {
      const Descriptor socket = NextOf(listener, absl::Milliseconds(10));
      if (!socket.is_open()) continue;
      EXPECT_TRUE(Send(socket, "220 mail.example ESMTP: this is not a word of ours\r\n").ok());
    }
  });
  const Joined joined = Join(1, 2, kSoon);
  EXPECT_EQ(joined.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(TextOf(joined),
              AllOf(HasSubstr("for rank 0"), HasSubstr(address() + " is no rank 0")));
  late = true;
  service.join();
}

TEST_F(NcclStoreTest, APeerThatStopsTalkingMeetsTheDeadline) {
  const Descriptor mute = Listen(store_.host, store_.port);  // connections wait in its queue
  const Joined joined = Join(1, 2, kSoon);
  EXPECT_EQ(joined.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(TextOf(joined), HasSubstr("silent"));
}

}  // namespace
}  // namespace moe::testing
