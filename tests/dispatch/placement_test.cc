// dispatch/placement: contiguous blocks, as even as possible.
#include "dispatch/placement.h"

#include <gtest/gtest.h>

namespace moe {
namespace {

TEST(ExpertPlacementTest, FirstRanksHoldOneMore) {
  const ExpertPlacement placement(8, 3);  // 0 1 2 | 3 4 5 | 6 7
  EXPECT_EQ(placement.FirstExpert(0), 0);
  EXPECT_EQ(placement.FirstExpert(1), 3);
  EXPECT_EQ(placement.FirstExpert(2), 6);
  EXPECT_EQ(placement.FirstExpert(3), 8);
  EXPECT_EQ(placement.LocalExperts(2), 2);
  EXPECT_EQ(placement.RankOf(5), 1);
  EXPECT_EQ(placement.RankOf(6), 2);
}

TEST(ExpertPlacementTest, EveryExpertIsOnOneRankAndCountsDifferByOneAtMost) {
  for (int32_t experts = 1; experts <= 20; ++experts) {
    for (int ranks = 1; ranks <= 23; ++ranks) {
      const ExpertPlacement placement(experts, ranks);
      ASSERT_EQ(placement.FirstExpert(0), 0);
      ASSERT_EQ(placement.FirstExpert(ranks), experts);
      for (int r = 0; r < ranks; ++r) {
        ASSERT_GE(placement.LocalExperts(r), experts / ranks);
        ASSERT_LE(placement.LocalExperts(r), (experts + ranks - 1) / ranks);
        ASSERT_LE(placement.LocalExperts(r), placement.LocalExperts(r > 0 ? r - 1 : 0));
        for (int32_t e = placement.FirstExpert(r); e < placement.FirstExpert(r + 1); ++e) {
          ASSERT_EQ(placement.RankOf(e), r) << experts << " experts, " << ranks << " ranks";
        }
      }
    }
  }
}

}  // namespace
}  // namespace moe
