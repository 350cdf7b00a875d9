// The unit of the exact grid: what holds partials, and how a run's follows its gradients.
#include "moe/train/grid_unit.h"

#include <cmath>
#include <limits>
#include <optional>

#include <gtest/gtest.h>

namespace moe {
namespace {

TEST(GridUnitTest, TheUnitIsTheSmallestThatHoldsThePartials) {
  EXPECT_EQ(GridUnitLog2(1.0f, 1, 0), 1 - 62);  // 2^62 units of the next one below fit
  EXPECT_EQ(GridUnitLog2(0x1.fffffep0f, 1, 0), 1 - 62);
  EXPECT_EQ(GridUnitLog2(0x1p-30f, 8, 20), -30 + 1 + 20 - 59);
  for (const float largest : {1.0f, 0x1.8p-40f, 0x1.fffffep30f}) {
    for (const int64_t terms : {1, 3, 8, 1000}) {
      const ExactGrid grid = {.unit_log2 = GridUnitLog2(largest, terms, 0), .max_terms = terms};
      EXPECT_LE(std::ldexp(largest, -grid.unit_log2), static_cast<double>(grid.limit()));
    }
  }
}

GradientNorm Fits(float largest, double grid_loss = 0) {
  return {.value = 1, .largest = largest, .grid_loss = grid_loss};
}
GradientNorm OffGrid(float largest) {
  return {.value = std::numeric_limits<double>::infinity(), .non_finite = 1, .largest = largest};
}
constexpr int64_t kTerms = 8;

TEST(GridUnitTest, TheDefaultStaysWhereItServesTheFirstGradients) {
  GridUnit unit(std::nullopt);
  unit.Follow(Fits(0), kTerms);  // says nothing
  EXPECT_FALSE(unit.state().settled);
  unit.Follow(Fits(0x1p-3f, 1e-3), kTerms);  // a finer one would leave them less headroom
  EXPECT_TRUE(unit.state().settled);
  unit.Follow(Fits(0x1p-30f, 1e-3), kTerms);  // the first alone decide
  unit.Follow(Fits(0x1p9f), kTerms);
  EXPECT_EQ(unit.state().log2, -50);
}

TEST(GridUnitTest, SmallGradientsGetASmallerUnitAndLargeOnesALargerOne) {
  GridUnit small(std::nullopt), large(std::nullopt), near(std::nullopt);
  small.Follow(Fits(0x1p-30f, 1e-3), kTerms);
  EXPECT_EQ(small.state().log2, GridUnitLog2(0x1p-30f, kTerms, 20));
  large.Follow(OffGrid(0x1p40f), kTerms);
  EXPECT_EQ(large.state().log2, GridUnitLog2(0x1p40f, kTerms, 20));
  EXPECT_FALSE(large.state().settled);
  near.Follow(Fits(0x1p9f), kTerms);  // 2^10 is the limit
  EXPECT_EQ(near.state().log2, GridUnitLog2(0x1p9f, kTerms, 20));
}

TEST(GridUnitTest, APartialThatLeavesTheGridRaisesTheUnitAtAnyTime) {
  GridUnit unit(std::nullopt);
  unit.Follow(Fits(1), kTerms);
  unit.Follow(OffGrid(std::numeric_limits<float>::infinity()), kTerms);
  EXPECT_EQ(unit.state().log2, -50);  // no unit holds it
  unit.Follow(OffGrid(0x1p40f), kTerms);
  EXPECT_EQ(unit.state().log2, GridUnitLog2(0x1p40f, kTerms, 20));
}

TEST(GridUnitTest, AUnitThatIsGivenStays) {
  GridUnit unit(-20);
  unit.Follow(Fits(0x1p-30f, 1), kTerms);
  unit.Follow(OffGrid(0x1p60f), kTerms);
  EXPECT_EQ(unit.state().log2, -20);
}

}  // namespace
}  // namespace moe
