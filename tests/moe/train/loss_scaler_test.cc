// The loss scale over the steps of a run, and which ones may be asked for.
#include "moe/train/loss_scaler.h"

#include <cmath>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace moe {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// The scales of the steps that `overflows` describes, and of the one after them.
std::vector<double> ScalesOf(const LossScaleOptions& options, const std::vector<bool>& overflows) {
  LossScaler scaler(options);
  std::vector<double> scales = {scaler.scale()};
  for (const bool overflow : overflows) {
    if (overflow) {
      EXPECT_TRUE(scaler.StepSkipped().ok());
    } else {
      scaler.StepTaken();
    }
    EXPECT_EQ(std::ldexp(1.0, scaler.scale_log2()), scaler.scale());
    scales.push_back(scaler.scale());
  }
  return scales;
}

TEST(LossScalerTest, HalvesAtEveryOverflowAndDoublesAfterAWindow) {
  const LossScaleOptions options = {.initial = 16, .window = 3, .hysteresis = 1};
  EXPECT_THAT(ScalesOf(options, {true, true, false, false, false, false, false, true}),
              ElementsAre(16, 8, 4, 4, 4, 8, 8, 8, 4));
}

// As in Megatron: one overflow is borne, every further one halves, until the scale has doubled.
TEST(LossScalerTest, HysteresisIsSpentOnceAndFilledWhenTheScaleDoubles) {
  const LossScaleOptions options = {.initial = 16, .window = 2, .hysteresis = 2};
  EXPECT_THAT(ScalesOf(options, {true, false, true, true, false, false, true, true}),
              ElementsAre(16, 16, 16, 8, 4, 4, 8, 8, 4));
}

// An overflow begins the window anew.
TEST(LossScalerTest, TheWindowCountsStepsInARow) {
  const LossScaleOptions options = {.initial = 16, .window = 2, .hysteresis = 9};
  EXPECT_THAT(ScalesOf(options, {false, true, false, false}), ElementsAre(16, 16, 16, 16, 32));
}

TEST(LossScalerTest, AConstantScaleStays) {
  const LossScaleOptions options = {.constant = 128, .window = 1, .hysteresis = 1};
  EXPECT_THAT(ScalesOf(options, {true, true, false, false}), ElementsAre(128, 128, 128, 128, 128));
}

TEST(LossScalerTest, OverflowAtTheMinimumEndsTheRun) {
  LossScaler scaler({.initial = 4, .minimum = 2, .hysteresis = 1});
  EXPECT_TRUE(scaler.StepSkipped().ok());
  const absl::Status status = scaler.StepSkipped();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(status.message(), "the loss scale is at its minimum, 2");
  EXPECT_EQ(scaler.skipped(), 2);
}

TEST(LossScalerTest, GrowsToTheLargestScaleOnly) {
  LossScaler scaler({.initial = 0x1p31, .window = 1});
  for (int i = 0; i < 4; ++i) scaler.StepTaken();
  EXPECT_EQ(scaler.scale(), 0x1p32);
}

TEST(LossScalerTest, WrongOptionsNameTheirFlag) {
  const auto error = [](const LossScaleOptions& options) {
    return std::string(ValidateLossScale(options).message());
  };
  EXPECT_EQ(error({}), "");
  EXPECT_EQ(error({.constant = 0.5}), "");
  EXPECT_EQ(error({.constant = 100}),
            "--loss-scale is 100, expected a power of two from 2^-24 to 2^32");
  EXPECT_THAT(error({.constant = -2}), HasSubstr("--loss-scale is -2"));
  EXPECT_THAT(error({.constant = INFINITY}), HasSubstr("--loss-scale is inf"));
  EXPECT_THAT(error({.initial = 0}), HasSubstr("--initial-loss-scale is 0"));
  EXPECT_THAT(error({.initial = 0x1p33}), HasSubstr("--initial-loss-scale is"));
  EXPECT_THAT(error({.minimum = 0x1p-25}), HasSubstr("--min-loss-scale is"));
  EXPECT_THAT(error({.initial = 2, .minimum = 4}), HasSubstr("at most --initial-loss-scale, 2"));
  EXPECT_THAT(error({.window = 0}), HasSubstr("--loss-scale-window is 0, expected at least 1"));
  EXPECT_THAT(error({.hysteresis = 0}), HasSubstr("--hysteresis is 0, expected at least 1"));
}

}  // namespace
}  // namespace moe
