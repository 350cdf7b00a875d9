// DeepSpeed's keys in a configuration file: which are taken, as what, and which are refused.
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/moe/cli/settings_harness.h"

namespace moe::cli {
namespace {

using ::testing::HasSubstr;
using testing::Load;
using testing::LoadError;

TEST(DeepSpeedTest, KeysOfTheSameMeaning) {
  const auto s = Load({}, {}, R"({
    "train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8,
    "gradient_clipping": 0.5, "seed": 42, "steps_per_print": 5, "bf16": {"enabled": true},
    "fp16": {"enabled": false, "loss_scale": 0, "initial_scale_power": 16},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.8, 0.99], "eps": 1e-7,
      "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_type": "linear",
      "warmup_num_steps": 10, "total_num_steps": 500, "cos_min_ratio": 0.1}}})");
  ASSERT_TRUE(s.ok()) << s.status();
  const auto options = [&] {
    Settings settings = *s;
    EXPECT_TRUE(settings.Set(*settings.Find("data"), {"x"}, Origin::kFlag, "--data").ok());
    return MakeTrainOptions(settings, {.ranks = 4});
  }();
  ASSERT_TRUE(options.ok()) << options.status();
  const lm::TrainConfig& train = options->train;
  EXPECT_EQ(train.micro_batch_size, 2);
  EXPECT_EQ(train.micro_batches, 32);
  EXPECT_EQ(train.seed, 42u);
  EXPECT_EQ(train.log_interval, 5);
  EXPECT_EQ(train.dtype, DType::kBFloat16);
  EXPECT_EQ(train.optimizer.clip_grad, 0.5);
  EXPECT_EQ(train.optimizer.beta1, 0.8f);
  EXPECT_EQ(train.optimizer.beta2, 0.99f);
  EXPECT_EQ(train.optimizer.epsilon, 1e-7f);
  EXPECT_EQ(train.optimizer.weight_decay, 0.01f);
  EXPECT_EQ(train.schedule.peak, 1e-3);
  EXPECT_DOUBLE_EQ(train.schedule.minimum, 1e-4);
  EXPECT_EQ(train.schedule.warmup_steps, 10);
  EXPECT_EQ(train.schedule.total_steps, 500);
}

TEST(DeepSpeedTest, LossScaling) {
  const auto s = Load({}, {}, R"({"fp16": {"enabled": true, "auto_cast": false, "loss_scale": 0,
      "initial_scale_power": 24, "loss_scale_window": 200, "hysteresis": 3,
      "min_loss_scale": 4}, "bf16": {"enabled": false}})");
  ASSERT_TRUE(s.ok()) << s.status();
  EXPECT_EQ(s->text("dtype"), "f16");
  EXPECT_EQ(s->real("loss-scale"), 0);
  EXPECT_EQ(s->real("initial-loss-scale"), 0x1p24);
  EXPECT_EQ(s->integer("loss-scale-window"), 200);
  EXPECT_EQ(s->integer("hysteresis"), 3);
  EXPECT_EQ(s->real("min-loss-scale"), 4);
}

TEST(DeepSpeedTest, WarmupLrStaysAtItsPeak) {
  const auto s = Load({}, {}, R"({"scheduler": {"type": "WarmupLR", "params": {
      "warmup_type": "linear", "warmup_max_lr": 0.002, "warmup_num_steps": 7}}})");
  ASSERT_TRUE(s.ok()) << s.status();
  EXPECT_EQ(s->real("lr"), 0.002);
  EXPECT_EQ(s->real("min-lr"), 0.002);
  EXPECT_EQ(s->integer("lr-warmup-steps"), 7);
}

TEST(DeepSpeedTest, OtherMeaningsAreRefused) {
  const auto error = [](const std::string& document) {
    return LoadError({}, {}, document);
  };
  EXPECT_THAT(error(R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}})"),
              HasSubstr("fp16.enabled is true, expected false beside bf16.enabled"));
  EXPECT_THAT(error(R"({"fp16": {"enabled": true, "consecutive_hysteresis": true}})"),
              HasSubstr("fp16.consecutive_hysteresis is true, expected false"));
  EXPECT_THAT(error(R"({"fp16": {"enabled": true, "initial_scale_power": 1.5}})"),
              HasSubstr("fp16.initial_scale_power is 1.5, expected an integer"));
  EXPECT_THAT(error(R"({"fp16": {"enabled": "auto"}})"), HasSubstr("expected true or false"));
  EXPECT_THAT(error(R"({"optimizer": {"type": "Lamb"}})"),
              HasSubstr("optimizer.type is Lamb, expected AdamW"));
  EXPECT_THAT(error(R"({"optimizer": {"params": {"betas": [0.9]}}})"), HasSubstr("expected two"));
  EXPECT_THAT(error(R"({"scheduler": {"type": "OneCycle"}})"),
              HasSubstr("expected WarmupCosineLR or WarmupLR"));
  // DeepSpeed warms up logarithmically unless told otherwise.
  EXPECT_THAT(error(R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1}}})"),
              HasSubstr("warmup_type is missing, expected linear"));
}

}  // namespace
}  // namespace moe::cli
