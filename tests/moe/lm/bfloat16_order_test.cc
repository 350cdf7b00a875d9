// The order of bfloat16 products of a run, over saving and resuming.
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <tuple>

#include <absl/strings/str_replace.h>
#include <gtest/gtest.h>

#include "moe/checkpoint/reader.h"
#include "moe/lm/run_settings.h"
#include "tests/moe/lm/train_harness.h"
#include "tests/moe/status_is.h"

namespace moe::lm::testing {
namespace {

namespace fs = std::filesystem;
using ::moe::testing::StatusIs;

class BFloat16OrderTest : public SavedRunTest {
 protected:
  BFloat16OrderTest() { config_.trainer.dtype = DType::kBFloat16; }
};

// Whatever is fastest on this CPU.
TEST_F(BFloat16OrderTest, ARunGoesOnInItsOrderOfBFloat16) {
  for (const auto& [order, other, difference] :
       {std::tuple(BFloat16Order::kDot, BFloat16Order::kTile,
                   "--bf16-order is tile, dot in the checkpoint"),
        std::tuple(BFloat16Order::kTile, BFloat16Order::kDot,
                   "--bf16-order is dot, tile in the checkpoint")}) {
    SCOPED_TRACE(difference);
    config_.trainer.session.bfloat16_order = order;
    const Trace whole = TrainIn(config_);
    EXPECT_EQ(whole.report.bfloat16_order, order);
    fs::remove_all(folder_);
    ASSERT_TRUE(TrainIn(Saving(3), {.ranks = 2}).status.ok());
    config_.trainer.session.bfloat16_order = other;
    EXPECT_THAT(TrainIn(Saving(6, Resume::kAuto)).status,
                StatusIs(absl::StatusCode::kInvalidArgument, difference));
    config_.trainer.session.bfloat16_order.reset();
    TrainConfig at_path = Saving(6, Resume::kPath);
    at_path.checkpoints.path = StepPath(3);
    at_path.checkpoints.folder.clear();
    for (const TrainConfig& config : {at_path, Saving(6, Resume::kAuto)}) {
      const Trace resumed = TrainIn(config, {.ranks = 3});
      ExpectSameEnd(resumed, whole);
      EXPECT_EQ(resumed.report.bfloat16_order, order);
      EXPECT_EQ(resumed.report.first_step, 3);
    }
    // What the resumed run has saved is of that order, too.
    const auto stored = StoredConfig(ReadManifest(StepPath(6)).value().sections);
    EXPECT_EQ(stored->trainer.session.bfloat16_order, order);
    fs::remove_all(StepPath(6));
    TrainConfig changed = Saving(6, Resume::kAuto);
    changed.trainer.session.bfloat16_order = other;
    changed.checkpoints.allow_numerics_change = true;
    EXPECT_EQ(TrainIn(changed).report.bfloat16_order, other);
  }
}

TEST_F(BFloat16OrderTest, ACheckpointWithoutAnOrderOfBFloat16IsOfDots) {
  config_.trainer.session.bfloat16_order = BFloat16Order::kDot;
  const Trace whole = TrainIn(config_);
  ASSERT_TRUE(TrainIn(Saving(3), {.ranks = 2}).status.ok());
  CheckpointManifest manifest = ReadManifest(StepPath(3)).value();
  const std::string with = manifest.sections.numerics;
  manifest.sections.numerics = absl::StrReplaceAll(with, {{R"("bf16_order":"dot",)", ""}});
  ASSERT_LT(manifest.sections.numerics.size(), with.size());
  std::ofstream(StepPath(3) + "/manifest.json") << SerializeManifest(manifest).value();
  config_.trainer.session.bfloat16_order = BFloat16Order::kTile;
  EXPECT_THAT(
      TrainIn(Saving(6, Resume::kAuto)).status,
      StatusIs(absl::StatusCode::kInvalidArgument, "--bf16-order is tile, dot in the checkpoint"));
  config_.trainer.session.bfloat16_order.reset();
  const Trace resumed = TrainIn(Saving(6, Resume::kAuto), {.ranks = 3});
  ExpectSameEnd(resumed, whole);
  EXPECT_EQ(resumed.report.bfloat16_order, BFloat16Order::kDot);
}

// The order is chosen before data are read.
TEST_F(BFloat16OrderTest, ADamagedCheckpointOfAnotherOrderThanTheOneBeforeItIsNotPassedOver) {
  config_.trainer.session.bfloat16_order = BFloat16Order::kDot;
  ASSERT_TRUE(TrainIn(Saving(2)).status.ok());
  TrainConfig changed = Saving(3, Resume::kAuto);
  changed.trainer.session.bfloat16_order = BFloat16Order::kTile;
  changed.checkpoints.allow_numerics_change = true;
  ASSERT_TRUE(TrainIn(changed).status.ok());
  std::fstream shard(StepPath(3) + "/shard-00000-of-00001.safetensors",
                     std::ios::in | std::ios::out | std::ios::binary);
  shard.seekg(-2, std::ios::end);
  const auto flipped = static_cast<char>(shard.get() ^ 1);
  shard.seekp(-2, std::ios::end).put(flipped);
  shard.close();
  config_.trainer.session.bfloat16_order.reset();
  EXPECT_THAT(TrainIn(Saving(6, Resume::kAuto)).status,
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "step-00000002: --bf16-order is tile, dot in the checkpoint"));
  TrainConfig before = config_;
  before.checkpoints.resume = Resume::kPath;
  before.checkpoints.path = StepPath(2);
  EXPECT_EQ(TrainIn(before).report.bfloat16_order, BFloat16Order::kDot);
}

TEST_F(BFloat16OrderTest, WithoutProductsOfBFloat16ThereIsNoOrder) {
  config_.trainer.dtype = DType::kFloat32;
  EXPECT_EQ(TrainIn(Saving(2)).report.bfloat16_order, std::nullopt);
  EXPECT_EQ(TrainIn(Saving(4, Resume::kAuto)).report.bfloat16_order, std::nullopt);
  config_.trainer.session.bfloat16_order = BFloat16Order::kDot;
  EXPECT_THAT(TrainIn(config_).status,
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "--bf16-order is dot with --dtype f32, expected auto"));
}

}  // namespace
}  // namespace moe::lm::testing
