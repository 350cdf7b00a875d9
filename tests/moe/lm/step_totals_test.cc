#include "moe/lm/step_totals.h"

#include <limits>

#include <gtest/gtest.h>

namespace moe::lm {
namespace {

TEST(StepTotalsTest, CountsWhatItCannotAdd) {
  StepTotals totals(0);
  const float rows[] = {1.5f, 0.25f};
  totals.AddLosses(rows, 5);  // three of the tokens have no loss
  EXPECT_EQ(totals.MeanLoss(), 0.875f);
  EXPECT_EQ(totals.tokens(), 5);
  const float bad[] = {std::numeric_limits<float>::quiet_NaN()};
  totals.AddLosses(bad, 1);
  EXPECT_EQ(totals.non_finite(), 1);
}

TEST(LoadMeasuresTest, HandMadeCounts) {
  EXPECT_DOUBLE_EQ(MaxViolation({{4, 4, 4, 4}, {8, 0, 4, 4}}, 4), 1.0);
  EXPECT_EQ(DeadExperts({{4, 4, 4, 4}, {8, 0, 4, 0}}, 4), 2);
  EXPECT_DOUBLE_EQ(MaxViolation({{0, 0}}, 2), 0.0);
  // The last entry is an identity expert: neither overloaded nor dead.
  EXPECT_DOUBLE_EQ(MaxViolation({{4, 4, 9}}, 2), 0.0);
  EXPECT_EQ(DeadExperts({{4, 4, 0}}, 2), 0);
}

}  // namespace
}  // namespace moe::lm
