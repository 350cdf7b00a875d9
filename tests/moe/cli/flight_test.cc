// moe debug flight: reading dumps and naming the rank that is missing.
#include "moe/cli/debug/flight.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace moe::flight {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Head(int rank, const std::string& at = "", const std::string& reason = "") {
  return absl::StrCat("{\"flight\":1,\"rank\":", rank, ",\"ranks\":3,\"host\":\"h\",\"reason\":\"",
                      reason, "\",", at, "\"monotonic_ns\":100,\"unix_ns\":1100}\n",
                      "{\"group\":\"world\",\"members\":[0,1,2]}\n"
                      "{\"group\":\"world/0.1\",\"members\":[1,2]}\n"
                      "{\"group\":\"alone\",\"members\":[0]}\n");
}

std::string CallOf(const std::string& group, int sequence, const std::string& state, int at_ns,
                   const std::string& operation = "AllReduce", int bytes = 8) {
  return absl::StrCat("{\"group\":\"", group, "\",\"sequence\":", sequence, ",\"operation\":\"",
                      operation, "\",\"site\":\"loss\",\"step\":5,\"bytes_in\":", bytes,
                      ",\"bytes_out\":", bytes, ",\"type\":\"f32\",\"state\":\"", state,
                      "\",\"entered_ns\":", at_ns, ",\"started_ns\":", at_ns, "}\n");
}

std::vector<Dump> Parsed(const std::vector<std::string>& texts) {
  std::vector<Dump> dumps;
  for (const std::string& text : texts) {
    auto dump = ParseDump("a", text);
    EXPECT_TRUE(dump.ok()) << dump.status();
    if (dump.ok()) dumps.push_back(*std::move(dump));
  }
  return dumps;
}

TEST(FlightTest, RanksThatAgree) {
  std::vector<std::string> texts;
  for (int rank = 0; rank < 3; ++rank) {
    texts.push_back(Head(rank) + CallOf("world", 0, "completed", rank == 2 ? 9 : 5));
  }
  const Analysis analysis = Analyse(Parsed(texts));
  EXPECT_EQ(analysis.difference.kind, Difference::Kind::kNone);
  EXPECT_EQ(analysis.straggler.rank, 2);
  EXPECT_EQ(analysis.straggler.last, 1);
  EXPECT_EQ(analysis.straggler.calls, 1);
  EXPECT_DOUBLE_EQ(analysis.straggler.seconds, 4e-9);
}

// Rank 0 waits in the world for ranks 1 and 2, and rank 2 in a group for rank 1: that is the one.
TEST(FlightTest, TheRankThatAllWaitFor) {
  const Analysis analysis = Analyse(Parsed(
      {Head(0) + CallOf("world", 0, "completed", 1) + CallOf("world", 1, "failed", 20),
       Head(1, "\"at\":\"experts\",\"layer\":3,\"step\":5,") + CallOf("world", 0, "completed", 1),
       Head(2) + CallOf("world", 0, "completed", 1) + CallOf("world/0.1", 0, "started", 30)}));
  const Difference& difference = analysis.difference;
  EXPECT_EQ(difference.kind, Difference::Kind::kMissing);
  EXPECT_EQ(TextOf(difference.call), "AllReduce 1 of world (loss, step 5)");
  EXPECT_EQ(difference.call.entered_ns, 1020);
  EXPECT_THAT(difference.ranks, ElementsAre(1));
  EXPECT_THAT(difference.where, ElementsAre("rank 1 was last in experts, layer 3, step 5"));
}

// What an abort stops is open, also in a group of one rank: it does not hide the rank that failed.
TEST(FlightTest, OpenCallsComeAfterMissingOnes) {
  const std::string reason = "exception: rank 1 on host h in data (step 5): injected fault: throw";
  const std::string at = "\"at\":\"data\",\"step\":5,";
  const Analysis missing = Analyse(Parsed(
      {Head(0, "", reason) + CallOf("alone", 0, "failed", 1) + CallOf("world", 0, "failed", 9),
       Head(1, at, reason) + CallOf("world/0.1", 0, "failed", 3),
       Head(2, "", reason) + CallOf("world/0.1", 0, "failed", 2) +
           CallOf("world", 0, "failed", 8)}));
  EXPECT_EQ(missing.difference.kind, Difference::Kind::kMissing);
  EXPECT_EQ(missing.difference.call.group, "world");
  EXPECT_THAT(missing.difference.where, ElementsAre("rank 1 was last in data, step 5"));

  const Analysis none = Analyse(Parsed({Head(0, "", reason) + CallOf("alone", 0, "failed", 1),
                                        Head(1, at, reason), Head(2, "", reason)}));
  EXPECT_EQ(none.difference.kind, Difference::Kind::kNone);
  EXPECT_TRUE(none.difference.members.empty());
  EXPECT_EQ(none.failed, 1);
  EXPECT_EQ(none.failed_where, "rank 1 was last in data, step 5");
}

TEST(FlightTest, OfOpenCallsTheRankThatFailed) {
  const auto analysed = [](const std::string& reason0, const std::string& reason) {
    const std::string calls = CallOf("world/0.1", 0, "failed", 1);
    return Analyse(Parsed({Head(0, "\"at\":\"data\",\"step\":5,", reason0),
                           Head(1, "", reason) + calls, Head(2, "", reason) + calls}));
  };
  for (const char* const reason0 :
       {"rank 0 on host h in data (step 5): of 3, rank 9 is one", "no such file"}) {
    const Analysis own = analysed(reason0, "rank 2 was stopped by rank 0: rank 0 aborted: x");
    EXPECT_EQ(own.failed, 0);
    EXPECT_EQ(own.difference.kind, Difference::Kind::kOpen);
    EXPECT_THAT(own.difference.where, ElementsAre("rank 0 was last in data, step 5"));
  }
  for (const char* const unknown :
       {"end", "SIGUSR2", "", "the same of all",
        "rank 2 on host h in Fence: waited 2s for rank 1, deadline 2s"}) {
    const Analysis open = analysed(unknown, unknown);
    EXPECT_EQ(open.failed, -1) << unknown;
    EXPECT_THAT(open.difference.ranks, ElementsAre(1, 2)) << unknown;
  }
}

std::string Made(int rank, int ranks, int began, int written, const std::string& reason) {
  return absl::StrCat("{\"flight\":1,\"rank\":", rank, ",\"ranks\":", ranks,
                      ",\"host\":\"h\",\"reason\":\"", reason, "\",\"began_unix_ns\":", began,
                      ",\"unix_ns\":", written, "}\n");
}

TEST(FlightTest, DumpsOfEarlierRunsAreLeftOut) {
  std::string folder = ::testing::TempDir() + "flight.XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const auto write = [&](int file, const std::string& text) {
    std::ofstream(absl::StrCat(folder, "/flight.rank", file, ".jsonl")) << text;
  };
  const auto ranks = [&] {
    std::vector<int> read;
    const auto dumps = ReadDumps(folder);
    EXPECT_TRUE(dumps.ok()) << dumps.status();
    if (!dumps.ok()) return read;
    for (const Dump& dump : *dumps) {
      EXPECT_EQ(dump.reason, "new");
      read.push_back(dump.rank);
    }
    return read;
  };
  write(0, Made(0, 4, 100, 205, "new"));
  write(1, Made(1, 4, 110, 200, "new"));
  write(2, Made(2, 4, 10, 99, "old"));  // as many ranks, ended before
  write(3, Made(3, 8, 10, 150, "old"));
  EXPECT_THAT(ranks(), ElementsAre(0, 1));
  write(2, Made(1, 4, 105, 201, "new"));
  EXPECT_EQ(ReadDumps(folder).status().code(), absl::StatusCode::kDataLoss);
  std::filesystem::remove_all(folder);
}

TEST(FlightTest, ARankWithAnotherCall) {
  const Analysis analysis =
      Analyse(Parsed({Head(0) + CallOf("world", 0, "failed", 1),
                      Head(1) + CallOf("world", 0, "failed", 2, "Broadcast"),
                      Head(2) + CallOf("world", 0, "failed", 3, "AllReduce", 16)}));
  EXPECT_EQ(analysis.difference.kind, Difference::Kind::kOtherCall);
  EXPECT_THAT(analysis.difference.where,
              ElementsAre("rank 1 has Broadcast 0 of world (loss, step 5)",
                          "rank 2 has AllReduce 0 of world (loss, step 5)"));
}

// Of a rank without a dump nothing is known but what the others wait for.
TEST(FlightTest, ARankWithoutADump) {
  const Analysis analysis = Analyse(
      Parsed({Head(0) + CallOf("world", 0, "completed", 1) + CallOf("world", 1, "failed", 5),
              Head(1) + CallOf("world", 0, "completed", 1) + CallOf("world", 1, "failed", 6)}));
  EXPECT_THAT(analysis.without_dump, ElementsAre(2));
  EXPECT_EQ(analysis.difference.call.sequence, 1);
  EXPECT_THAT(analysis.difference.where, ElementsAre("rank 2 has no dump"));
}

// A dump that was made later than the others has calls that these lack, and one that is full has
// lost its first calls.
TEST(FlightTest, DumpsOfOtherTimes) {
  const Analysis analysis = Analyse(
      Parsed({Head(0) + CallOf("world", 0, "completed", 1) + CallOf("world", 1, "completed", 5) +
                  CallOf("world", 2, "completed", 7),
              Head(1) + CallOf("world", 1, "completed", 5) + CallOf("world", 2, "completed", 7),
              Head(2) + CallOf("world", 0, "completed", 1) + CallOf("world", 1, "completed", 5)}));
  EXPECT_EQ(analysis.difference.kind, Difference::Kind::kNone);
}

// The steps of a ring are transfers, and a rank that is late shows in them alone.
TEST(FlightTest, ARankThatIsLateInTransfers) {
  std::vector<std::string> texts;
  for (int rank = 0; rank < 3; ++rank) {
    texts.push_back(Head(rank) + CallOf("world", 0, "completed", rank == 0 ? 6 : 5) +
                    CallOf("world", 0, "completed", rank == 1 ? 90 : 10, "SendRecv"));
  }
  const Analysis analysis = Analyse(Parsed(texts));
  EXPECT_EQ(analysis.straggler.rank, 1);
  EXPECT_EQ(analysis.straggler.calls, 2);
  EXPECT_DOUBLE_EQ(analysis.straggler.seconds, 80e-9);
}

// Calls of a stream are entered without a wait: rank 1 is late to three of them by one delay of 50,
// rank 2 twice by delays of its own.
TEST(FlightTest, ADelayOfAStreamCountsOnce) {
  const int came[3][5] = {{10, 20, 30, 100, 200}, {60, 70, 81, 100, 200}, {10, 20, 30, 140, 240}};
  std::vector<std::string> texts;
  for (int rank = 0; rank < 3; ++rank) {
    texts.push_back(Head(rank));
    for (int i = 0; i < 5; ++i) {
      // In the fourth all wait for rank 2.
      std::string call = CallOf("world", i, i == 3 ? "completed" : "entered", came[rank][i]);
      if (i == 3) call.insert(call.size() - 2, ",\"ended_ns\":150");
      texts.back() += call;
    }
  }
  const Analysis analysis = Analyse(Parsed(texts));
  EXPECT_EQ(analysis.straggler.rank, 2);
  EXPECT_EQ(analysis.straggler.last, 2);
  EXPECT_DOUBLE_EQ(analysis.straggler.seconds, 80e-9);
}

TEST(FlightTest, MalformedDumps) {
  const std::string good = Head(0) + CallOf("world", 0, "completed", 1);
  ASSERT_TRUE(ParseDump("a", good).ok());
  const std::string bad[] = {"",
                             "{}\n",
                             "[1]\n",
                             "{\"flight\":2,\"rank\":0,\"ranks\":1}\n",
                             "{\"flight\":1,\"rank\":3,\"ranks\":3}\n",
                             Head(0) + CallOf("other", 0, "completed", 1),
                             Head(0) + "{\"group\":\"world\",\"members\":[3]}\n",
                             Head(0) + "{\"group\":\"world\",\"sequence\":-1}\n",
                             Head(0) + "{\"group\":7,\"sequence\":1,\"operation\":\"A\"}\n",
                             good.substr(0, good.size() - 9)};
  for (const std::string& text : bad) {
    const absl::Status status = ParseDump("a.jsonl", text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr("a.jsonl"));
  }
}

}  // namespace
}  // namespace moe::flight
