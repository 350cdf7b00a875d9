// DeepSpeed's keys in a configuration file: which are accepted, with which meaning, and which are
// refused.
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_split.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/moe/cli/settings_harness.h"

namespace moe::cli {
namespace {

using ::testing::HasSubstr;
using testing::Load;

TEST(DeepSpeedTest, KeysOfTheSameMeaning) {
  const auto settings = Load({"--data", "x"}, {}, R"({
    "train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8,
    "gradient_clipping": 0.5, "seed": 42, "steps_per_print": 5, "bf16": {"enabled": true},
    "fp16": {"enabled": false, "loss_scale": 0, "initial_scale_power": 16},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.8, 0.99], "eps": 1e-7,
      "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_type": "linear",
      "warmup_num_steps": 10, "total_num_steps": 500, "cos_min_ratio": 0.1}}})")
                            .value();
  const auto options = MakeTrainOptions(settings, {.ranks = 4}).value();
  const lm::TrainConfig& train = options.train;
  EXPECT_EQ(train.micro_batch_size, 2);
  EXPECT_EQ(train.trainer.micro_batches, 32);
  EXPECT_EQ(train.trainer.seed, 42u);
  EXPECT_EQ(options.log_interval, 5);
  EXPECT_EQ(train.trainer.dtype, DType::kBFloat16);
  EXPECT_EQ(train.trainer.optimizer.clip_grad, 0.5);
  EXPECT_EQ(train.trainer.optimizer.beta1, 0.8f);
  EXPECT_EQ(train.trainer.optimizer.beta2, 0.99f);
  EXPECT_EQ(train.trainer.optimizer.epsilon, 1e-7f);
  EXPECT_EQ(train.trainer.optimizer.weight_decay, 0.01f);
  EXPECT_EQ(train.schedule.peak, 1e-3);
  EXPECT_DOUBLE_EQ(train.schedule.minimum, 1e-4);
  EXPECT_EQ(train.schedule.warmup_steps, 10);
  EXPECT_EQ(train.schedule.total_steps, 500);
}

TEST(DeepSpeedTest, LossScaling) {
  const auto s = Load({}, {}, R"({"fp16": {"enabled": true, "auto_cast": false, "loss_scale": 0,
      "initial_scale_power": 24, "loss_scale_window": 200, "hysteresis": 3,
      "min_loss_scale": 4}, "bf16": {"enabled": false}})")
                     .value();
  EXPECT_EQ(s.text("dtype"), "f16");
  EXPECT_EQ(s.real("loss-scale"), 0);
  EXPECT_EQ(s.real("initial-loss-scale"), 0x1p24);
  EXPECT_EQ(s.integer("loss-scale-window"), 200);
  EXPECT_EQ(s.integer("hysteresis"), 3);
  EXPECT_EQ(s.real("min-loss-scale"), 4);
}

TEST(DeepSpeedTest, WarmupLrStaysAtItsPeak) {
  const auto s = Load({}, {}, R"({"scheduler": {"type": "WarmupLR", "params": {
      "warmup_type": "linear", "warmup_max_lr": 0.002, "warmup_num_steps": 7}}})")
                     .value();
  EXPECT_EQ(s.real("lr"), 0.002);
  EXPECT_EQ(s.text("lr-decay-style"), "constant");
  EXPECT_EQ(s.integer("lr-warmup-steps"), 7);
}

TEST(DeepSpeedTest, WarmupDecayLrFallsInALineToZero) {
  const auto s = Load({"--min-lr", "0"}, {}, R"({
      "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "adam_w_mode": true}},
      "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_type": "linear",
        "warmup_min_lr": 0, "warmup_max_lr": 2e-5, "warmup_num_steps": 5,
        "total_num_steps": 50, "last_batch_iteration": -1}}})")
                     .value();
  EXPECT_EQ(s.text("lr-decay-style"), "linear");
  EXPECT_EQ(s.real("lr"), 2e-5) << "the schedule's peak, not the optimiser's";
  EXPECT_EQ(s.real("min-lr"), 0);
  EXPECT_EQ(s.integer("lr-decay-steps"), 50);
}

TEST(DeepSpeedTest, AutoLeavesASettingToFlagsAndDefaults) {
  const auto s = Load({"--lr", "0.25"}, {}, R"({
      "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "seed": 3,
      "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
      "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"},
      "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": null}},
      "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_type": "linear",
        "warmup_num_steps": "auto", "total_num_steps": "auto", "cos_min_ratio": 0.5}}})")
                     .value();
  EXPECT_FALSE(s.given("dtype"));
  EXPECT_FALSE(s.given("train-batch-size"));
  EXPECT_FALSE(s.given("lr-warmup-steps"));
  EXPECT_FALSE(s.given("lr-decay-steps"));
  EXPECT_EQ(s.real("min-lr"), 0.125) << "half of the flag's rate";
}

// Configurations as people publish them. Those that request nothing unsupported are accepted; for
// each of the others one message names everything that must change, and nothing else.
TEST(DeepSpeedTest, PublishedShapes) {
  struct Shape {
    const char* document;
    std::vector<const char*> refused;
  };
  const char* const kWarmup = "scheduler.params.warmup_type is missing, expected \"linear\"";
  const Shape shapes[] = {
      // From a library's own tutorial.
      {R"({"train_batch_size": 16, "steps_per_print": 2000, "prescale_gradients": false,
           "wall_clock_breakdown": false, "gradient_clipping": 1.0, "optimizer": {"type": "Adam",
           "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
           "bf16": {"enabled": false}, "fp16": {"enabled": true, "loss_scale": 0,
             "fp16_master_weights_and_grads": false, "loss_scale_window": 500, "hysteresis": 2,
             "min_loss_scale": 1, "initial_scale_power": 15},
           "zero_optimization": {"stage": 0, "allgather_partitions": true,
             "allgather_bucket_size": 50000000, "overlap_comm": true}})",
       {}},
      // For trainers that fill in the values "auto".
      {R"({"fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
           "bf16": {"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": "auto",
             "betas": "auto", "eps": "auto", "weight_decay": "auto"}}, "zero_optimization": {
             "stage": 0, "reduce_bucket_size": "auto", "round_robin_gradients": true},
           "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
           "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
           "steps_per_print": 2000, "wall_clock_breakdown": false})",
       {}},
      {R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1,
           "zero_optimization": {}, "zero_allow_untested_optimizer": true,
           "bf16": {"enabled": true}, "activation_checkpointing": {"partition_activations": false,
             "cpu_checkpointing": false, "contiguous_memory_optimization": false,
             "number_checkpoints": null, "profile": false}})",
       {}},
      {R"({"train_batch_size": 100, "dump_state": false, "communication_data_type": "fp32",
           "gradient_predivide_factor": 1.0, "sparse_gradients": false,
           "data_types": {"grad_accum_dtype": null}, "memory_breakdown": true,
           "tensorboard": {"enabled": false, "output_path": "logs", "job_name": "a"},
           "wandb": {"enabled": false}, "csv_monitor": {"enabled": false}})",
       {}},
      {R"({"bfloat16": {"enabled": true}, "aio": {"block_size": 1048576, "queue_depth": 8},
           "flops_profiler": {"enabled": false, "profile_step": 1},
           "comms_logger": {"enabled": false, "verbose": true}, "amp": {"enabled": false},
           "elasticity": {"enabled": false, "max_train_batch_size": 2000},
           "autotuning": {"enabled": false}, "compile": {"deepcompile": false},
           "hybrid_engine": {"enabled": false, "max_out_tokens": 512}})",
       {}},
      {R"({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": true,
             "adam_w_mode": true, "bias_correction": true}}, "scheduler": {"type": "WarmupLR",
           "params": {"warmup_type": "linear", "warmup_min_lr": 0, "warmup_max_lr": "auto",
             "warmup_num_steps": "auto"}}, "checkpoint": {"tag_validation": "Warn"},
           "pld": {"enabled": false}, "curriculum_learning": {"enabled": false}})",
       {}},
      {R"({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_type": "linear",
             "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
             "total_num_steps": "auto", "last_batch_iteration": -1}},
           "fp16": {"enabled": false, "auto_cast": true, "consecutive_hysteresis": true}})",
       {}},
      // Supported stages, with memory where it is supported.
      {R"({"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2, "overlap_comm": true,
             "offload_optimizer": {"device": "none", "pin_memory": true}},
           "gradient_accumulation_steps": "auto", "wall_clock_breakdown": false})",
       {}},
      {R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0,
             "warmup_max_lr": 0.001, "warmup_num_steps": 1000}}, "fp16": {"enabled": true,
             "consecutive_hysteresis": false}})",
       {kWarmup}},
      {R"({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto",
             "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
           "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"},
             "stage3_max_live_parameters": 1e9}, "tensorboard": {"enabled": true},
           "sparse_attention": {"mode": "fixed", "block": 16}, "gradient_acculation_steps": 1})",
       {"'tensorboard.enabled' is not supported; remove it: --tensorboard-dir DIR",
        "'sparse_attention.mode' is not supported; remove it",
        "unknown key 'gradient_acculation_steps'; did you mean 'gradient_accumulation_steps'?"}},
      {R"({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-4, "freeze_step": 400}},
           "activation_checkpointing": {"partition_activations": true}, "zero_optimization": true,
           "fp16": {"enabled": true, "auto_cast": true}})",
       {"optimizer.type is OneBitAdam, expected AdamW", "'optimizer.params.freeze_step'",
        "'zero_optimization'", "'fp16.auto_cast'"}},
      {R"({"tensor_parallel": {"autotp_size": 2},
           "bf16": {"enabled": true, "bf16_master_weights_and_grads": true}})",
       {"'tensor_parallel.autotp_size'", "'bf16.bf16_master_weights_and_grads'"}},
  };
  for (const Shape& shape : shapes) {
    const absl::Status status = Load({}, {}, shape.document).status();
    if (shape.refused.empty()) {
      EXPECT_TRUE(status.ok()) << status << "\n" << shape.document;
      continue;
    }
    const std::string message = testing::ErrorOf(status);
    for (const char* text : shape.refused) EXPECT_THAT(message, HasSubstr(text));
    size_t named = 0;
    for (const absl::string_view part : absl::StrSplit(message, "; ")) {
      named += !absl::StartsWith(part, "remove it") && !absl::StartsWith(part, "did you mean");
    }
    EXPECT_EQ(named, shape.refused.size()) << message;
  }
}

// The file that transformers' manual shows for ZeRO-2: every value that a trainer fills in is
// "auto", and the others concern memory.
TEST(DeepSpeedTest, ATrainersTemplateIsTaken) {
  testing::Strings warnings;
  const auto s = Load({"--lr", "0.25", "--lr-warmup-steps", "3"}, {}, R"({
      "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000,
        "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
      "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
        "weight_decay": "auto"}},
      "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
        "warmup_num_steps": "auto"}},
      "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true},
        "offload_param": {"device": "none", "pin_memory": true}, "allgather_partitions": true,
        "allgather_bucket_size": 2e8, "overlap_comm": false, "reduce_bucket_size": "auto"},
      "activation_checkpointing": {"partition_activations": true, "profile": false},
      "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2e3,
      "train_batch_size": 16.0, "train_micro_batch_size_per_gpu": "auto",
      "wall_clock_breakdown": false})",
                      &warnings)
                     .value();
  EXPECT_EQ(s.text("zero"), "2");
  EXPECT_EQ(s.text("offload"), "optimizer");
  EXPECT_EQ(s.text("recompute"), "layer");
  EXPECT_EQ(s.integer("train-batch-size"), 16);
  EXPECT_EQ(s.integer("log-interval"), 2000);
  EXPECT_EQ(s.integer("lr-warmup-steps"), 3);
  EXPECT_THAT(warnings,
              ::testing::ElementsAre(
                  HasSubstr("memory and speed alone: zero_optimization.allgather_partitions, "
                            "zero_optimization.allgather_bucket_size"),
                  HasSubstr("warmup_type is missing: linear here, logarithmic in DeepSpeed")));
}

TEST(DeepSpeedTest, StageThreeIsTakenAndItsKeysOfMemoryAreNamed) {
  testing::Strings warnings;
  const auto s = Load({}, {}, R"({"zero_optimization": {"stage": 3,
      "stage3_prefetch_bucket_size": 5e7, "stage3_param_persistence_threshold": "auto",
      "stage3_gather_16bit_weights_on_model_save": true}})",
                      &warnings)
                     .value();
  EXPECT_EQ(s.text("zero"), "3");
  EXPECT_THAT(warnings,
              ::testing::ElementsAre(HasSubstr(
                  "memory and speed alone: zero_optimization.stage3_prefetch_bucket_size, "
                  "zero_optimization.stage3_gather_16bit_weights_on_model_save")));
  EXPECT_THAT(Load({}, {}, R"({"zero_optimization": {"stage": 4}})").status().message(),
              HasSubstr("zero_optimization.stage"));
}

TEST(DeepSpeedTest, ActivationsAreComputedAgainWhereItSaysSo) {
  const auto recompute = [](const std::string& section) {
    testing::Strings warnings;
    const auto s =
        Load({}, {}, R"({"activation_checkpointing": {)" + section + "}}", &warnings).value();
    EXPECT_EQ(warnings, testing::Strings{}) << section;
    return s.text("recompute");
  };
  EXPECT_EQ(recompute(R"("cpu_checkpointing": true, "profile": true)"), "layer");
  EXPECT_EQ(recompute(R"("number_checkpoints": 4)"), "layer");
  EXPECT_EQ(recompute(R"("partition_activations": false, "number_checkpoints": null)"), "none");
  EXPECT_EQ(recompute(R"("synchronize_checkpoint_boundary": true)"), "none");
}

TEST(DeepSpeedTest, StateIsOffloadedWhereItSaysSo) {
  const auto with = [](const std::string& section) {
    return R"({"zero_optimization": {"stage": 1, "offload_optimizer": {)" + section + "}}}";
  };
  const std::string nvme = R"("device": "nvme", "nvme_path": "/disk", "buffer_count": 5)";
  testing::Strings warnings;
  EXPECT_EQ(Load({}, {}, with(nvme), &warnings).value().text("offload"), "optimizer:file=/disk");
  EXPECT_EQ(Load({}, {}, with(R"("device": "none")")).value().text("offload"), "none");
  EXPECT_EQ(warnings, testing::Strings{});
  // A GPU keeps its state, as it did.
  EXPECT_EQ(Load({"--device", "cuda"}, {}, with(nvme), &warnings).value().text("offload"), "none");
  EXPECT_THAT(warnings, ::testing::ElementsAre(HasSubstr("zero_optimization.offload_optimizer")));
  EXPECT_THAT(Load({}, {}, with(R"("device": "nvme")")).status().message(),
              HasSubstr("zero_optimization.offload_optimizer.nvme_path is missing, expected a"));
  EXPECT_THAT(Load({}, {}, with(R"("device": "disk")")).status().message(),
              HasSubstr("offload_optimizer.device is disk, expected none, cpu or nvme"));
}

TEST(DeepSpeedTest, AWarmupOfAnotherShapeIsRefusedWhereItDiffers) {
  const auto document = [](const std::string& parameters) {
    return R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, )" + parameters +
           "}}}";
  };
  for (const char* same : {R"("warmup_type": "auto", "warmup_num_steps": 9)",
                           R"("warmup_type": "log", "warmup_num_steps": 1)",
                           R"("warmup_num_steps": 0)", R"("warmup_num_steps": "auto")"}) {
    EXPECT_TRUE(Load({}, {}, document(same)).ok()) << same;
  }
  for (const char* other : {R"("warmup_type": "log", "warmup_num_steps": "auto")",
                            R"("warmup_num_steps": 2)", R"("warmup_min_lr": 0)"}) {
    EXPECT_THAT(testing::LoadError({"--lr-warmup-steps", "5"}, {}, document(other)),
                HasSubstr("scheduler.params.warmup_type is"));
  }
}

TEST(DeepSpeedTest, NumbersOfCountsAreWhole) {
  EXPECT_EQ(Load({}, {}, R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear",
                "warmup_max_lr": 0.1, "warmup_num_steps": 7.0}}})")
                ->integer("lr-warmup-steps"),
            7);
  EXPECT_EQ(Load({}, {}, R"({"seed": 42.0, "num_layers": 1.2e1})")->integer("num-layers"), 12);
}

}  // namespace
}  // namespace moe::cli
