// Which ranks and links moe doctor --seconds calls slow.
#include "moe/cli/doctor/world_check.h"

#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/create.h"

namespace moe::cli {
namespace {

using ::testing::HasSubstr;

// Two hosts of two ranks; links between hosts are ten times slower than those inside.
WorldCheck Even() {
  WorldCheck check;
  for (int r = 0; r < 4; ++r) {
    check.ranks.push_back({.host = r < 2 ? "a" : "b",
                           .host_id = r < 2 ? 1u : 2u,
                           .cores = 8,
                           .gflop_per_s = 10,
                           .gbytes_per_s = 5});
    for (int s = 0; s < 4; ++s) {
      const bool crosses = (r < 2) != (s < 2);
      if (r != s) {
        check.links.push_back({.source = r,
                               .destination = s,
                               .latency_us = crosses ? 20.0 : 2.0,
                               .gbytes_per_s = crosses ? 1.0 : 10.0});
      }
    }
  }
  return check;
}

std::vector<Finding> Slow(const WorldCheck& check) {
  std::vector<Finding> slow;
  for (const Finding& finding : DiagnoseWorld(check)) {
    if (finding.verdict != Verdict::kOk) slow.push_back(finding);
  }
  return slow;
}

TEST(WorldCheck, KindsOfLinksHaveMediansOfTheirOwn) {
  EXPECT_TRUE(Slow(Even()).empty());
  // Cores, memory, latency and bandwidth inside of and between hosts.
  EXPECT_EQ(DiagnoseWorld(Even()).size(), 6);
}

TEST(WorldCheck, OneSlowRankIsNamedWithItsHost) {
  WorldCheck check = Even();
  check.ranks[3].gflop_per_s = 10 / 1.4;
  EXPECT_TRUE(Slow(check).empty());
  check.ranks[3].gflop_per_s = 10 / 1.6;
  ASSERT_EQ(Slow(check).size(), 1);
  EXPECT_EQ(Slow(check)[0].subject, "core speed");
  EXPECT_THAT(Slow(check)[0].what,
              HasSubstr("rank 3 on b: 6.25 GFLOP/s, 1.6 times slower than the median of 4, 10"));
  EXPECT_FALSE(Slow(check)[0].remedy.empty());
  check.ranks[0].gbytes_per_s = 1;
  ASSERT_EQ(Slow(check).size(), 2);
  EXPECT_THAT(Slow(check)[1].what, HasSubstr("rank 0 on a: 1 GB/s"));
}

TEST(WorldCheck, SlowLinksAreNamedTheSlowestFirstAndNoMoreThanFour) {
  WorldCheck check = Even();
  int crossing = 0;
  for (Link& link : check.links) {
    if (link.source == 0 && link.destination == 1) link.latency_us = 5;
    if (link.gbytes_per_s == 1 && ++crossing <= 3) link.gbytes_per_s = 0.5 / (1 + crossing);
  }
  const auto slow = Slow(check);
  ASSERT_EQ(slow.size(), 4);
  EXPECT_THAT(slow[0].what, HasSubstr("rank 0 on a to rank 1 on a: 5 us, 2.5 times slower"));
  EXPECT_THAT(slow[1].what, HasSubstr("0.125 GB/s, 8.0 times slower than the median of 8, 1"));
  EXPECT_THAT(slow[3].what, HasSubstr("0.25 GB/s, 4.0 times slower"));
  for (int r = 0; r < 20; ++r) check.ranks.push_back(check.ranks[0]);
  for (int r = 4; r < 9; ++r) check.ranks[r].gflop_per_s = 1;
  EXPECT_THAT(Slow(check)[4].what, HasSubstr("and 1 more"));
}

TEST(WorldCheck, ProcessesWithDifferentCoresAreSlow) {
  WorldCheck check = Even();
  check.ranks[2].cores = 1;
  ASSERT_EQ(Slow(check).size(), 1);
  EXPECT_EQ(Slow(check)[0].what, "rank 2 on b may use 1 core, rank 0 on a 8");
}

TEST(WorldCheck, MeasuresEveryRankAndEveryOrderedPair) {
  RunOptions options;
  options.plan = {.backend = Backend::kLocal, .ranks = 3};
  const absl::Status run =
      RunRanks(options, [](std::unique_ptr<Communicator> world) -> absl::Status {
        const auto check = MeasureWorld(absl::Milliseconds(100), *world);
        if (!check.ok()) return check.status();
        EXPECT_EQ(check->ranks.size(), 3);
        EXPECT_EQ(check->links.size(), 6);
        for (const RankSpeed& rank : check->ranks) {
          EXPECT_FALSE(rank.host.empty());
          EXPECT_GT(rank.cores, 0);
          EXPECT_GT(rank.gflop_per_s, 0);
          EXPECT_GT(rank.gbytes_per_s, 0);
        }
        for (const Link& link : check->links) {
          EXPECT_GT(link.latency_us, 0);
          EXPECT_GT(link.gbytes_per_s, 0);
        }
        return absl::OkStatus();
      });
  EXPECT_TRUE(run.ok()) << run;
}

}  // namespace
}  // namespace moe::cli
