// Comparison and layouts of moe verify.
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "moe/cli/verify/axes.h"
#include "moe/cli/verify/compare.h"

namespace moe::verify {
namespace {

TEST(UlpDistanceTest, CountsFloatsBetween) {
  EXPECT_EQ(UlpDistance(1.0f, 1.0f), 0);
  EXPECT_EQ(UlpDistance(1.0f, std::nextafter(1.0f, 2.0f)), 1);
  EXPECT_EQ(UlpDistance(-1.0f, std::nextafter(-1.0f, 0.0f)), 1);
  EXPECT_EQ(UlpDistance(0.0f, -0.0f), 0);
  const float least = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(UlpDistance(-least, least), 2);
  EXPECT_EQ(UlpDistance(1.0f, 2.0f), 1 << 23);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(UlpDistance(nan, nan), 0);
  EXPECT_EQ(UlpDistance(nan, 1.0f), std::numeric_limits<int64_t>::max());
}

// y [2, 3], and one [2, 2] matrix of each of two experts.
Problem TwoTensors() {
  Problem problem;
  problem.tensors = {
      {.name = "y", .family = "y", .kind = TensorKind::kTokens, .rows = 2, .cols = 3},
      {.name = "experts.0.down", .family = "experts.down", .expert = 0, .rows = 2, .cols = 2},
      {.name = "experts.1.down", .family = "experts.down", .expert = 1, .rows = 2, .cols = 2}};
  problem.reference = {std::vector<Bounded>(6, Bounded(1, 0.125)),
                       std::vector<Bounded>(4, Bounded(2, 0.125)),
                       std::vector<Bounded>(4, Bounded(2, 0.125))};
  problem.token_experts = {{0, 1}, {1}};
  return problem;
}

RunResult Expected() {
  return {.tensors = {std::vector<float>(6, 1.0f), std::vector<float>(4, 2.0f),
                      std::vector<float>(4, 2.0f)}};
}

TEST(CompareTest, NamesTheFirstWrongElement) {
  RunResult got = Expected();
  got.tensors[0][2] = 1.0625f;  // within the bound
  got.tensors[0][4] = 1.25f;    // token 1, column 1: beyond it
  got.tensors[2][3] = -2.0f;    // expert 1, row 1, column 1
  const std::vector<TensorReport> reports = CompareWithReference(TwoTensors(), got);
  ASSERT_EQ(reports.size(), 2u);
  EXPECT_EQ(reports[0].tensor, "y");
  EXPECT_EQ(reports[0].differing, 2);
  EXPECT_EQ(reports[0].wrong, 1);
  EXPECT_EQ(Describe(reports[0].first), "token 1 column 1 expert 1");
  EXPECT_EQ(reports[0].got, 1.25f);
  EXPECT_NEAR(reports[0].max_of_bound, 2, 1e-9);
  EXPECT_EQ(reports[0].max_relative_error, 0.25);
  EXPECT_EQ(reports[1].elements, 8);
  EXPECT_EQ(Describe(reports[1].first), "row 1 column 1 expert 1");
  EXPECT_EQ(reports[1].max_relative_error, 2);
}

TEST(CompareTest, BitsAreStricterThanTheBound) {
  RunResult got = Expected();
  got.tensors[0][2] = std::nextafter(1.0f, 2.0f);
  const Problem problem = TwoTensors();
  EXPECT_TRUE(CompareResults(problem, got, Expected(), Measure::kTwiceBound)[0].ok());
  const TensorReport bits = CompareResults(problem, got, Expected(), Measure::kBits)[0];
  EXPECT_FALSE(bits.ok());
  EXPECT_EQ(bits.max_ulp, 1);
  EXPECT_EQ(Describe(bits.first), "token 0 column 2 expert 0");
  // Two products may be on either side of the truth.
  got.tensors[0][2] = 1.25f;
  EXPECT_TRUE(CompareResults(problem, got, Expected(), Measure::kTwiceBound)[0].ok());
  got.tensors[0][2] = 1.2501f;
  EXPECT_FALSE(CompareResults(problem, got, Expected(), Measure::kTwiceBound)[0].ok());
}

TEST(CompareTest, NamesStepLayerAndExpertOfAModel) {
  Problem problem;
  problem.tensors = {{.name = "expert_count",
                      .family = "expert_count",
                      .kind = TensorKind::kPerStepExpert,
                      .rows = 4,  // two steps of two layers
                      .cols = 3,
                      .rows_of_step = 2}};
  const RunResult expected = {.tensors = {std::vector<float>(12, 5.0f)}};
  RunResult got = expected;
  got.tensors[0][10] = 4.0f;
  const TensorReport report = CompareResults(problem, got, expected, Measure::kBits)[0];
  EXPECT_EQ(report.wrong, 1);
  EXPECT_EQ(Describe(report.first), "step 2 layer 1 expert 1");
}

TEST(CompareTest, NanIsWrong) {
  RunResult got = Expected();
  got.tensors[0][0] = std::numeric_limits<float>::quiet_NaN();
  const Problem problem = TwoTensors();
  EXPECT_FALSE(CompareWithReference(problem, got)[0].ok());
  EXPECT_FALSE(CompareResults(problem, got, Expected(), Measure::kTwiceBound)[0].ok());
}

// Every two values of two axes that meet in a layout, as tables show them.
std::set<std::pair<std::string, std::string>> PairsOf(const std::vector<Layout>& layouts) {
  std::set<std::pair<std::string, std::string>> pairs;
  const std::vector<Axis> axes = Axes();
  for (const Layout& layout : layouts) {
    for (size_t a = 0; a < axes.size(); ++a) {
      for (size_t b = 0; b < a; ++b) pairs.emplace(axes[a].text(layout), axes[b].text(layout));
    }
  }
  return pairs;
}

TEST(AxesTest, AModelIsCutOnlyWhereThePartsFit) {
  std::vector<Axis> axes = Axes();
  for (Axis& axis : axes) {
    axis.values = axis.all.empty() ? std::vector<std::string>{axis.values.front()} : axis.all;
  }
  Find(axes, "ranks").values = {"8"};
  Find(axes, "offload").values = {"none", "optimizer"};
  std::set<std::string> texts;
  for (const Layout& layout : AllLayouts(axes)) texts.insert(Describe(layout));
  const std::string common = "8 ranks ep 4 local staged overlap 1 cf none";
  EXPECT_TRUE(texts.contains(common));
  EXPECT_TRUE(
      texts.contains(common + " tp 2 pp 2 vp 2 schedule interleaved zero 3 recompute layer"));
  EXPECT_TRUE(texts.contains(common + " zero 1 offload optimizer"));
  EXPECT_TRUE(texts.contains(common + " pp 2 schedule zb-h1"));
  EXPECT_FALSE(texts.contains(common + " pp 4"));                       // two ranks of a stage
  EXPECT_FALSE(texts.contains(common + " tp 3"));                       // EP 4
  EXPECT_FALSE(texts.contains(common + " schedule gpipe"));             // one stage
  EXPECT_FALSE(texts.contains(common + " pp 2 schedule interleaved"));  // one chunk
}

TEST(AxesTest, AllLayoutsAreTheCombinationsInWhichEpDividesTheRanks) {
  // Ranks 1, 2, 3, 4, 8 have 1 + 2 + 2 + 3 + 4 divisors; times 3 * 2 * 2.
  std::vector<Axis> axes = Axes();
  EXPECT_EQ(AllLayouts(axes).size(), 12u * 12u);
  Find(axes, "ranks").values = {"3"};
  Find(axes, "ep").values = {"2"};
  EXPECT_TRUE(AllLayouts(axes).empty());
}

TEST(AxesTest, PairwiseCoverMeetsEveryPairWithFewLayouts) {
  const std::vector<Layout> cover = PairwiseLayouts(Axes());
  EXPECT_EQ(PairsOf(cover), PairsOf(AllLayouts(Axes())));
  // 5 ranks x 3 dispatches need 15 at least.
  EXPECT_GE(cover.size(), 15u);
  EXPECT_LE(cover.size(), 30u);
}

TEST(AxesTest, PairwiseCoverCountsEqualValuesOnce) {
  std::vector<Axis> axes = Axes();
  Find(axes, "capacity").values = {"1", "1.0"};
  Find(axes, "ranks").values = {"2", "2"};
  for (const char* name : {"ep", "dispatch", "overlap"}) Find(axes, name).values.resize(1);
  EXPECT_EQ(PairwiseLayouts(axes).size(), 1u);
}

TEST(AxesTest, NodesDivideTheExpertParallelGroup) {
  for (const auto& [ep, node] :
       std::vector<std::pair<int, int>>{{1, 1}, {2, 1}, {3, 1}, {4, 2}, {6, 3}, {8, 4}}) {
    EXPECT_EQ((Layout{.ranks = ep, .expert_parallel = ep}.node_size()), node) << ep;
  }
}

}  // namespace
}  // namespace moe::verify
