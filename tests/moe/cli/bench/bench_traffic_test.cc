// Traffic matrices: every generator against its distribution, sums and distances.
#include <cmath>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dispatch/placement.h"
#include "moe/cli/measure/routing_spec.h"
#include "moe/cli/measure/traffic.h"

namespace moe::measure {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Traffic Make(const std::string& routing, int ranks, int64_t count, uint64_t seed = 1,
             int num_experts = 0) {
  return MakeTraffic(ParseRouting(routing).value(),
                     {.ranks = ranks,
                      .count = count,
                      .num_experts = num_experts > 0 ? num_experts : 8 * ranks,
                      .seed = seed});
}

// The number of a rank's tokens for a destination is binomial(T, share): within six standard
// deviations, which all tests here together exceed with a chance below 1e-6 (and the seed is
// fixed).
void ExpectShares(const Traffic& traffic, const std::vector<double>& shares, int64_t tokens) {
  const int ranks = traffic.ranks();
  for (int s = 0; s < ranks; ++s) {
    for (int d = 0; d < ranks; ++d) {
      const double p = shares[d];
      const double n = static_cast<double>(tokens);
      EXPECT_NEAR(static_cast<double>(traffic.at(s, d)), n * p,
                  6 * std::sqrt(n * p * (1 - p)) + 1e-9)
          << "from " << s << " to " << d;
    }
  }
}

TEST(TrafficTest, UniformIsEvenWithTheRemainderFirst) {
  const Traffic t = Make("uniform", 3, 11);
  for (int s = 0; s < 3; ++s) EXPECT_THAT(t.from(s), ElementsAre(4, 4, 3));
  EXPECT_EQ(t.Largest(), 12);  // rank 0 receives 4 of each
  EXPECT_DOUBLE_EQ(Imbalance(t.ReceivedByRank()), 12 * 3 / 33.0);
  EXPECT_EQ(Imbalance(t.SentByRank()), 1);
}

TEST(TrafficTest, DrawnRoutingsFollowTheirShares) {
  const struct {
    const char* routing;
    uint64_t seed;
    int num_experts;             // 0: eight per rank
    std::vector<double> shares;  // the ranks' shares of every rank's tokens
  } cases[] = {{"zipf:1", 7, 4, {12. / 25, 6. / 25, 4. / 25, 3. / 25}},  // over 25/12
               {"zipf:0", 3, 5, {0.2, 0.2, 0.2, 0.2, 0.2}},
               // Rank 0 has the hot expert and one of five others.
               {"hot_expert:0.5", 5, 6, {0.6, 0.2, 0.2}},
               {"hot_rank:0.7", 1, 0, {0.7, 0.1, 0.1, 0.1}}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.routing);
    const auto ranks = static_cast<int>(c.shares.size());
    const Traffic t = Make(c.routing, ranks, kTokensPerRank, c.seed, c.num_experts);
    ExpectShares(t, c.shares, kTokensPerRank);
    EXPECT_NEAR(Imbalance(t.ReceivedByRank()), c.shares[0] * ranks, 0.1);
  }
  const std::vector<double> stated = DestinationShares(ParseRouting("zipf:1").value(), 4, 4);
  for (int d = 0; d < 4; ++d) EXPECT_NEAR(stated[d], 12.0 / 25 / (d + 1), 1e-15);
}

TEST(TrafficTest, HotSharesReachTheirEnds) {
  const Traffic all = Make("hot_rank:1", 3, 1000);
  for (int s = 0; s < 3; ++s) EXPECT_THAT(all.from(s), ElementsAre(1000, 0, 0));
  EXPECT_EQ(all.Largest(), 3000);
  const Traffic none = Make("hot_rank:0", 3, 1000);
  for (int s = 0; s < 3; ++s) EXPECT_EQ(none.at(s, 0), 0);
  EXPECT_THAT(Make("hot_rank:0", 1, 10).from(0), ElementsAre(10));
  EXPECT_THAT(Make("hot_expert:0.25", 1, 10, 1, 1).from(0), ElementsAre(10));
}

TEST(TrafficTest, RaggedRanksHaveAUniformShareOfTheirTokens) {
  // Over many seeds a rank's tokens are uniform on 0 .. T: mean T/2, standard deviation T/sqrt(12).
  constexpr int kSeeds = 200;
  constexpr int64_t kTokens = 100;
  double sum = 0;
  double least = kTokens;
  double most = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const Traffic t = Make("ragged", 3, kTokens, seed);
    for (int s = 0; s < 3; ++s) {
      const auto sent = static_cast<double>(t.Sent(s));
      sum += sent;
      least = std::min(least, sent);
      most = std::max(most, sent);
    }
  }
  const double n = 3.0 * kSeeds;
  EXPECT_NEAR(sum / n, kTokens / 2.0, 6 * kTokens / std::sqrt(12 * n));
  EXPECT_LE(least, 2);  // 600 draws of 101 values miss the lowest three with a chance of 1e-8
  EXPECT_GE(most, kTokens - 2);
}

TEST(TrafficTest, ZeroRankSendsNothingAndReceives) {
  const Traffic t = Make("zero_rank", 3, kTokensPerRank);
  EXPECT_EQ(t.Sent(2), 0);
  EXPECT_EQ(t.Sent(0), kTokensPerRank);
  EXPECT_GT(t.Received(2), 0);
  EXPECT_DOUBLE_EQ(Imbalance(t.SentByRank()), 1.5);
}

TEST(TrafficTest, MatrixKeepsItsProportions) {
  RoutingSpec routing = ParseRouting("matrix:file").value();
  // Sent 3, 1; received 1, 3: the largest is 3.
  routing.weights = ParseTrafficMatrix("# two ranks\n0, 3\n\n1 0 # back\n", 2).value();
  const Traffic t = MakeTraffic(routing, {.ranks = 2, .count = 300});
  EXPECT_THAT(t.from(0), ElementsAre(0, 300));
  EXPECT_THAT(t.from(1), ElementsAre(100, 0));
  EXPECT_EQ(t.Largest(), 300);
}

TEST(TrafficTest, MatrixOfHugeNumbersDoesNotOverflow) {
  RoutingSpec routing = ParseRouting("matrix:file").value();
  routing.weights = ParseTrafficMatrix("1e307 1e307\n1e307 1e307\n", 2).value();
  EXPECT_THAT(MakeTraffic(routing, {.ranks = 2, .count = 10}).from(0), ElementsAre(5, 5));
}

TEST(TrafficTest, WhatIsSentIsReceivedForEveryRoutingAndRankCount) {
  for (const char* routing :
       {"uniform", "zipf:1.2", "hot_expert:0.3", "hot_rank:0.9", "ragged", "zero_rank"}) {
    for (const int ranks : {1, 2, 3, 5, 8}) {
      for (const int64_t count : {0, 1, 7, 5000, 100'003}) {
        const Traffic t = Make(routing, ranks, count);
        int64_t sent = 0;
        int64_t received = 0;
        for (int r = 0; r < ranks; ++r) {
          EXPECT_LE(t.Sent(r), count);
          sent += t.Sent(r);
          received += t.Received(r);
        }
        EXPECT_EQ(sent, received) << routing;
        const std::string name = routing;
        if (name != "ragged" && name != "zero_rank") {
          EXPECT_EQ(sent, ranks * count) << routing;
        }
      }
    }
  }
}

TEST(TrafficTest, SeedsRepeatAndDiffer) {
  const auto flat = [](const Traffic& t) {
    std::vector<int64_t> all;
    for (int s = 0; s < t.ranks(); ++s) {
      for (int d = 0; d < t.ranks(); ++d) all.push_back(t.at(s, d));
    }
    return all;
  };
  EXPECT_EQ(flat(Make("zipf:1", 4, 5000, 9)), flat(Make("zipf:1", 4, 5000, 9)));
  EXPECT_NE(flat(Make("zipf:1", 4, 5000, 9)), flat(Make("zipf:1", 4, 5000, 10)));
}

constexpr uint64_t kAlone[] = {0, 1, 2, 3, 4, 5}, kPairs[] = {0, 0, 1, 1, 2, 2}, kOne[6] = {};

TEST(DistancesTest, FourRanksOnTwoHostsByHand) {
  // 1 element between every pair: 4 stay, 4 go to the other rank of the host, 8 cross.
  const Traffic t = Make("uniform", 4, 4);
  const Distances direct = DistancesOf(t, kPairs);
  EXPECT_EQ(direct.self, 4);
  EXPECT_EQ(direct.same_node, 4);
  EXPECT_EQ(direct.cross_node, 8);
  // First hop, inside the rail: half stay, half cross. Second, inside the host: half stay.
  const Distances hops = DistancesOf(TwoHopTraffic(t, 2), kPairs);
  EXPECT_EQ(hops.self, 8 + 8);
  EXPECT_EQ(hops.cross_node, 8);
  EXPECT_EQ(hops.same_node, 8);
}

TEST(DistancesTest, OneHostAndLoneHosts) {
  const Traffic t = Make("zipf:1", 6, 1000);
  EXPECT_EQ(DistancesOf(t, kOne).cross_node, 0);
  EXPECT_EQ(DistancesOf(t, kAlone).same_node, 0);
  const Distances direct = DistancesOf(t, kPairs);
  EXPECT_EQ(direct.self + direct.same_node + direct.cross_node, 6000);
  // Hierarchical crosses between hosts exactly what has to cross.
  EXPECT_EQ(DistancesOf(TwoHopTraffic(t, 2), kPairs).cross_node, direct.cross_node);
}

TEST(RoutingSpecTest, RefusesWhatItDoesNotKnow) {
  for (const char* text :
       {"", "zip", "zipf", "zipf:", "zipf:-1", "zipf:x", "zipf:65", "hot_rank:1.5",
        "hot_expert:-0.1", "hot_expert:nan", "ragged:1", "uniform:", "matrix:", "matrix"}) {
    const auto parsed = ParseRouting(text);
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr("expected")) << text;
  }
}

TEST(RoutingSpecTest, RefusesBrokenMatricesWithTheLine) {
  const auto refused = [](const char* text) {
    const auto parsed = ParseTrafficMatrix(text, 2);
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << text;
    return std::string(parsed.status().message());
  };
  EXPECT_THAT(refused("1 2\n3\n"), HasSubstr("line 2 has 1 numbers"));
  EXPECT_THAT(refused("1 2\n3 -4\n"), HasSubstr("line 2: '-4'"));
  EXPECT_THAT(refused("1 2\n3 nan\n"), HasSubstr("line 2: 'nan'"));
  EXPECT_THAT(refused("1 2\n"), HasSubstr("1 lines of numbers, expected 2"));
  EXPECT_THAT(refused("1 2\n1 2\n1 2\n"), HasSubstr("line 3 is one too many"));
  EXPECT_THAT(refused("0 0\n0 0\n"), HasSubstr("add up to 0"));
  EXPECT_THAT(refused(""), HasSubstr("0 lines"));
  const std::string long_comment = "#" + std::string(1 << 21, '-');
  EXPECT_THAT(refused(long_comment.c_str()), HasSubstr("2097153 bytes, expected at most 1048832"));
}

}  // namespace
}  // namespace moe::measure
