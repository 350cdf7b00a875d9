// Axes of a sweep and their cross product.
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moe/cli/sweep/axis.h"

namespace moe::sweep {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const AxisForm kCount;  // whole numbers from 1
const AxisForm kFactor = {.kind = AxisKind::kReal, .words = {"none"}, .least = 0, .above = true};
const AxisForm kName = {.kind = AxisKind::kText};

std::vector<std::string> Values(const char* text, const AxisForm& form = kCount) {
  const auto values = ParseAxis(text, form);
  EXPECT_TRUE(values.ok()) << values.status();
  return values.value_or(std::vector<std::string>());
}

std::string Problem(const char* text, const AxisForm& form = kCount) {
  const auto values = ParseAxis(text, form);
  EXPECT_TRUE(absl::IsInvalidArgument(values.status())) << text;
  return std::string(values.status().message());
}

TEST(Axis, ListsAndRangesComeInTheOrderGiven) {
  EXPECT_THAT(Values("8"), ElementsAre("8"));
  EXPECT_THAT(Values("16,4,8"), ElementsAre("16", "4", "8"));
  EXPECT_THAT(Values("1-4"), ElementsAre("1", "2", "3", "4"));
  EXPECT_THAT(Values("5-5"), ElementsAre("5"));
  EXPECT_THAT(Values("256-1024+256"), ElementsAre("256", "512", "768", "1024"));
  EXPECT_THAT(Values("4-64*2"), ElementsAre("4", "8", "16", "32", "64"));
  EXPECT_THAT(Values("64,1-2,8-32*2"), ElementsAre("64", "1", "2", "8", "16", "32"));
}

TEST(Axis, TheLastOfARangeNeedNotBeHit) {
  EXPECT_THAT(Values("4-63*2"), ElementsAre("4", "8", "16", "32"));
  EXPECT_THAT(Values("1-10+4"), ElementsAre("1", "5", "9"));
  EXPECT_THAT(Values("1000000000-1000000001"), ElementsAre("1000000000", "1000000001"));
  EXPECT_THAT(Values("2147483647-2147483647"), ElementsAre("2147483647"));
}

TEST(Axis, NumbersComeInTheirShortestForm) {
  EXPECT_THAT(Values("none,1.50,1e0", kFactor), ElementsAre("none", "1.5", "1"));
  // Steps of tenths are not sums of binary fractions: 0.1 + 2 * 0.1 is 0.30000000000000004.
  EXPECT_THAT(Values("0.1-0.5+0.1", kFactor), ElementsAre("0.1", "0.2", "0.3", "0.4", "0.5"));
  EXPECT_THAT(Values("1e-3-8e-3*2", kFactor), ElementsAre("0.001", "0.002", "0.004", "0.008"));
  EXPECT_THAT(Values("1000000"), ElementsAre("1000000"));
}

TEST(Axis, TextsAreTakenAsTheyAre) {
  EXPECT_THAT(Values("zipf:1.2,hot_expert:0.5", kName), ElementsAre("zipf:1.2", "hot_expert:0.5"));
  EXPECT_THAT(Values("deepseek-v3,mixtral", kName), ElementsAre("deepseek-v3", "mixtral"));
}

TEST(Axis, WhatIsWrongIsNamed) {
  EXPECT_THAT(Problem("4,x"), HasSubstr("'x', expected a whole number from 1, or a range"));
  EXPECT_THAT(Problem("0"), HasSubstr("'0'"));
  EXPECT_THAT(Problem("-4"), HasSubstr("'-4'"));
  EXPECT_THAT(Problem("1.5"), HasSubstr("'1.5'"));
  EXPECT_THAT(Problem(""), HasSubstr("''"));
  EXPECT_THAT(Problem("4,,8"), HasSubstr("''"));
  EXPECT_THAT(Problem("4;8"), HasSubstr("'4;8'"));
  EXPECT_THAT(Problem("2147483648"), HasSubstr("'2147483648'"));
  EXPECT_THAT(Problem("8-4"), HasSubstr("last is not below its first"));
  EXPECT_THAT(Problem("0-4"), HasSubstr("'0-4'"));
  EXPECT_THAT(Problem("4-64*1"), HasSubstr("a factor above 1"));
  EXPECT_THAT(Problem("4-64+0"), HasSubstr("a step above 0"));
  EXPECT_THAT(Problem("4-64*"), HasSubstr("'4-64*'"));
  EXPECT_THAT(Problem("4-64/2"), HasSubstr("'4-64/2'"));
  EXPECT_THAT(Problem("4,8,1-4"), HasSubstr("4 stands twice"));
  EXPECT_THAT(Problem("1-2000"), HasSubstr("at most 1000 values"));
  EXPECT_THAT(Problem("1-2147483647"), HasSubstr("at most 1000 values"));
  EXPECT_THAT(Problem("0", kFactor), HasSubstr("a number above 0 or none"));
  EXPECT_THAT(Problem("nan", kFactor), HasSubstr("'nan'"));
  EXPECT_THAT(Problem("inf", kFactor), HasSubstr("'inf'"));
  EXPECT_THAT(Problem("nonee", kFactor), HasSubstr("'nonee'"));
  EXPECT_THAT(Problem("1,1.0", kFactor), HasSubstr("1 stands twice"));
}

TEST(Grid, TheLastAxisIsTheFastest) {
  const std::vector<Axis> axes = {{"a", {"1", "2"}}, {"b", {"x", "y", "z"}}};
  const auto points = CrossProduct(axes).value();
  using Point = std::vector<std::string>;
  EXPECT_THAT(points, ElementsAre(Point{"1", "x"}, Point{"1", "y"}, Point{"1", "z"},
                                  Point{"2", "x"}, Point{"2", "y"}, Point{"2", "z"}));
}

TEST(Grid, ACoupledAxisGoesWithTheOther) {
  const std::vector<Axis> axes = {
      {"a", {"1", "2"}}, {"b", {"x", "y"}}, {"c", {"3", "3"}, /*with=*/0}};
  using Point = std::vector<std::string>;
  EXPECT_THAT(CrossProduct(axes).value(), ElementsAre(Point{"1", "x", "3"}, Point{"1", "y", "3"},
                                                      Point{"2", "x", "3"}, Point{"2", "y", "3"}));
  AxisForm repeats;
  repeats.repeats = true;
  EXPECT_THAT(ParseAxis("1,2,2", repeats).value(), ElementsAre("1", "2", "2"));
}

TEST(Grid, NoAxisIsOnePoint) {
  const auto points = CrossProduct({}).value();
  EXPECT_EQ(points.size(), 1u);
}

TEST(Grid, TooManyPointsAreRefusedWithTheirAxes) {
  const std::vector<Axis> axes(5, {"num-experts", std::vector<std::string>(1000, "1")});
  const auto points = CrossProduct(axes);
  EXPECT_TRUE(absl::IsInvalidArgument(points.status()));
  EXPECT_THAT(std::string(points.status().message()), HasSubstr("1000 of --num-experts x"));
}

}  // namespace
}  // namespace moe::sweep
