// Formulas of moe bench against figures computed by hand.
#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "moe/cli/measure/bench_row.h"
#include "moe/cli/measure/collectives.h"
#include "moe/cli/measure/statistics.h"
#include "moe/cli/measure/traffic.h"

namespace moe::measure {
namespace {

TEST(StatisticsTest, OfFourSamplesByHand) {
  const Statistics s = Describe({4, 1, 3, 8});
  EXPECT_EQ(s.mean, 4);
  EXPECT_EQ(s.min, 1);
  EXPECT_EQ(s.max, 8);
  EXPECT_EQ(s.p50, 3.5);
  EXPECT_EQ(s.p99, 8);
  // Deviations 0, -3, -1, 4: variance 26 / 4. Within two roundings of the exact root.
  EXPECT_DOUBLE_EQ(s.cv_pct, 100 * std::sqrt(6.5) / 4);
}

TEST(StatisticsTest, P99IsTheNearestRank) {
  std::vector<double> samples;
  for (int i = 1; i <= 100; ++i) samples.push_back(i);
  EXPECT_EQ(Describe(samples).p99, 99);  // 99 of 100 are at or below it
  samples.push_back(101);
  EXPECT_EQ(Describe(samples).p99, 100);  // ceil(0.99 * 101) = 100
  EXPECT_EQ(Describe(samples).p50, 51);
}

TEST(StatisticsTest, OneSampleHasNoSpread) {
  const Statistics s = Describe({7});
  EXPECT_EQ(s.p50, 7);
  EXPECT_EQ(s.p99, 7);
  EXPECT_EQ(s.cv_pct, 0);
  EXPECT_EQ(Describe({}).mean, 0);
}

TEST(BandwidthTest, AlgorithmBandwidthIsSizeOverTime) {
  EXPECT_DOUBLE_EQ(AlgorithmBandwidth(1'000'000, 500), 2);  // 1 MB in 0.5 ms
  EXPECT_EQ(AlgorithmBandwidth(8, 0), 0);
}

TEST(BandwidthTest, BusFactorsOfFourRanks) {
  for (const Op op : {Op::kAllToAll, Op::kAllToAllV, Op::kAllGather, Op::kReduceScatter}) {
    EXPECT_EQ(BusFactor(op, 4), 0.75) << NameOf(op);
    EXPECT_EQ(BusFactor(op, 1), 0) << NameOf(op);
  }
  EXPECT_EQ(BusFactor(Op::kAllReduce, 4), 1.5);
  EXPECT_EQ(BusFactor(Op::kAllReduce, 1), 0);
  EXPECT_EQ(BusFactor(Op::kPointToPoint, 4), 1);
  EXPECT_EQ(BusFactor(Op::kMemcpy, 4), 1);
}

TEST(BandwidthTest, RowDerivesItsFigures) {
  BenchRow row;
  row.op = Op::kAllReduce;
  row.ranks = 4;
  row.size_bytes = 4'000'000;
  row.time_us = 1000;
  row.memcpy_gbytes_per_s = 16;
  EXPECT_DOUBLE_EQ(row.algbw(), 4);
  EXPECT_DOUBLE_EQ(row.busbw(), 6);
  EXPECT_DOUBLE_EQ(row.memcpy_pct(), 25);
  EXPECT_STREQ(row.status(), "ok");
  row.wrong = 1;
  EXPECT_STREQ(row.status(), "wrong");
}

TEST(ImbalanceTest, NamesTheBusiestRankUnlessAllAreAlike) {
  Traffic traffic = EvenTraffic(3, 10);
  EXPECT_EQ(Busiest(traffic.SentByRank()), -1);
  EXPECT_EQ(Busiest(traffic.ReceivedByRank()), -1);
  traffic.at(2, 1) += 5;
  EXPECT_EQ(Busiest(traffic.SentByRank()), 2);
  EXPECT_EQ(Busiest(traffic.ReceivedByRank()), 1);
  traffic.at(2, 0) += 5;  // as much as rank 1
  EXPECT_EQ(Busiest(traffic.ReceivedByRank()), 0);
}

TEST(ImbalanceTest, IsMaxOverMean) {
  EXPECT_EQ(Imbalance({4, 4, 4}), 1);
  EXPECT_EQ(Imbalance({9, 0, 0}), 3);
  EXPECT_DOUBLE_EQ(Imbalance({1, 2, 3}), 1.5);
  EXPECT_EQ(Imbalance({0, 0}), 1);
}

// Two calls of three ranks, in ns. Rank 2 enters last in the first call, rank 1 in the second.
//   call 0: enter 1000 1400 2000, leave 3000 3000 3000: times 2000 1600 1000, waits 1000 600 0
//   call 1: enter 5000 6000 5000, leave 8000 8000 8000: times 3000 2000 3000, waits 1000 0 1000
constexpr CallStamps kStamps[] = {{1000, 3000}, {5000, 8000},   // rank 0
                                  {1400, 3000}, {6000, 8000},   // rank 1
                                  {2000, 3000}, {5000, 8000}};  // rank 2

TEST(TimingTest, SeparatesWaitingFromTransferByHand) {
  const TimingSummary t = Summarise(kStamps, 3);
  EXPECT_EQ(t.calls, 2);
  EXPECT_DOUBLE_EQ(t.time_us, 2.5);         // rank 0: (2000 + 3000) / 2
  EXPECT_DOUBLE_EQ(t.samples_us.min, 2.0);  // slowest ranks of the calls: 2000 and 3000
  EXPECT_DOUBLE_EQ(t.samples_us.max, 3.0);
  EXPECT_DOUBLE_EQ(t.wait_pct, 100 * 3600.0 / 12600.0);
  EXPECT_EQ(t.slow_rank, -1);  // two calls do not show the noise
}

// Two ranks: in every call rank 1 leaves `late` ns later, with an alternating deviation of up to
// `noise` ns.
std::vector<CallStamps> LateSecond(int64_t calls, int64_t late, int64_t noise) {
  std::vector<CallStamps> stamps(2 * calls);
  for (int64_t i = 0; i < calls; ++i) {
    // Squares modulo a prime: as good as random, so that stretches of calls differ, too.
    const int64_t off = i * i % 61 * noise / 30 - noise;
    stamps[i] = {1000 * i, 1000 * i + 500};
    stamps[calls + i] = {1000 * i, 1000 * i + 500 + late + off};
  }
  return stamps;
}

TEST(TimingTest, TheSlowRankIsOneBeyondNoise) {
  EXPECT_EQ(Summarise(LateSecond(40, 100, 50), 2).slow_rank, 1);
  EXPECT_EQ(Summarise(LateSecond(40, 100, 50), 2, ClocksShared::kNo).slow_rank, 1);
  EXPECT_EQ(Summarise(LateSecond(40, -100, 50), 2).slow_rank, 0);
  EXPECT_EQ(Summarise(LateSecond(40, 3, 400), 2).slow_rank, -1);
  EXPECT_EQ(Summarise(LateSecond(40, 0, 0), 2).slow_rank, -1);
  EXPECT_EQ(Summarise(LateSecond(10, 100, 0), 2).slow_rank, -1);  // too few calls
  EXPECT_EQ(Summarise(std::vector<CallStamps>(40, {0, 100}), 1).slow_rank,
            -1);  // no other rank
}

TEST(TimingTest, ARankThatLeavesBeforeTheLastEntersWaitsOnlyUntilThen) {
  const CallStamps stamps[] = {{0, 100}, {400, 500}};
  const TimingSummary t = Summarise(stamps, 2);
  EXPECT_DOUBLE_EQ(t.wait_pct, 100 * 100.0 / 200.0);
}

TEST(TimingTest, ARankWithMoreToMoveIsNoWait) {
  const CallStamps stamps[] = {{0, 900}, {0, 900}, {0, 900}};
  const TimingSummary t = Summarise(stamps, 3);
  EXPECT_EQ(t.wait_pct, 0);  // no rank entered late, whichever made the others wait
  EXPECT_DOUBLE_EQ(t.time_us, 0.9);
}

TEST(TimingTest, ClocksOfSeveralHostsGiveNoWait) {
  const TimingSummary t = Summarise(kStamps, 3, ClocksShared::kNo);
  EXPECT_TRUE(std::isnan(t.wait_pct));
  EXPECT_DOUBLE_EQ(t.time_us, 2.5);
}

TEST(TimingTest, TimeIsOfTheSlowestRankOnAverageNotOfTheSlowestCalls) {
  // Each rank is slow once: the mean of each is 55, the slowest rank of each call takes 100.
  const CallStamps stamps[] = {{0, 100'000}, {0, 10'000}, {0, 10'000}, {0, 100'000}};
  const TimingSummary t = Summarise(stamps, 2);
  EXPECT_DOUBLE_EQ(t.time_us, 55);
  EXPECT_DOUBLE_EQ(t.samples_us.mean, 100);
}

}  // namespace
}  // namespace moe::measure
