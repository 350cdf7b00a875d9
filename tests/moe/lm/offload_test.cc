// Runs whose optimiser state is in files, against runs that keep it in memory.
#include <cstdint>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "moe/checkpoint/reader.h"
#include "moe/io/file.h"
#include "tests/moe/lm/train_harness.h"
#include "tests/moe/status_is.h"
#include "tests/sanitizers.h"

namespace moe::lm::testing {
namespace {

namespace fs = std::filesystem;
using ::moe::testing::kThreadSanitized;
using ::moe::testing::Layout;
using ::moe::testing::StatusIs;

// Several pages a bucket, and several buckets of each group.
TrainConfig ConfigOfPages(DType dtype) {
  TrainConfig config = SmallConfig();
  config.model.hidden_size = 32;
  config.model.moe.ffn_hidden_size = 96;
  config.model.moe.router.gate = "topk";
  config.model.moe.router.num_experts = 4;
  config.model.moe.router.expert_bias = true;
  config.model.moe.router.score_function = ScoreFunction::kSigmoid;
  config.model.moe.router.bias_update_rate = 1e-3f;
  config.model.moe.projection_biases = true;
  config.trainer.dtype = dtype;
  config.micro_batch_size = 1;
  config.trainer.micro_batches = 5;
  config.trainer.bucket_bytes = 100'000;
  config.steps = 6;
  config.evaluation.interval = 3;
  config.evaluation.sequences = 1;
  config.verify_replicas = 3;
  return config;
}

TrainConfig InFile(TrainConfig config) {
  const std::string folder = ::testing::TempDir() + "offload_runs";
  fs::create_directories(folder);
  config.trainer.offload = {.optimizer = OffloadTo::kFile,
                            .file = {.folder = folder, .page_bytes = 30'000}};
  return config;
}

TEST(OffloadRunTest, HasTheSameBitsAtEveryStageAndNumberOfRanks) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    TrainConfig config = ConfigOfPages(dtype);
    const Trace expected = TrainIn(config);
    ASSERT_TRUE(expected.status.ok()) << expected.status;
    for (const ZeroStage zero :
         {ZeroStage::kNone, ZeroStage::kOptimizer, ZeroStage::kGradients, ZeroStage::kWeights}) {
      if (kThreadSanitized && (dtype == DType::kFloat32 || zero == ZeroStage::kGradients)) continue;
      config.trainer.zero = zero;
      for (const Layout& layout :
           {Layout{}, Layout{.ranks = 3}, Layout{.ranks = 4, .expert_parallel = 2}}) {
        SCOPED_TRACE(absl::StrCat(NameOf(dtype), " zero ", static_cast<int>(zero), ", ",
                                  layout.ranks, " ranks"));
        ExpectSameTrace(TrainIn(InFile(config), layout), expected);
      }
    }
  }
}

TEST(OffloadRunTest, HostMemoryOnACpuIsWhatThereIs) {
  TrainConfig config = ConfigOfPages(DType::kFloat32);
  config.steps = 2;
  const Trace expected = TrainIn(config);
  config.trainer.offload.optimizer = OffloadTo::kHost;
  const Trace got = TrainIn(config);
  ExpectSameTrace(got, expected);
  EXPECT_EQ(got.report.state_bytes, expected.report.state_bytes);
}

// Steps that overflow move nothing, in memory or in a file.
TEST(OffloadRunTest, SkipsTheStepsThatOverflow) {
  TrainConfig config = ConfigOfPages(DType::kFloat16);
  config.loss_scale.initial = 0x1p20;
  config.loss_scale.hysteresis = 1;
  const Trace expected = TrainIn(config);
  ASSERT_TRUE(expected.status.ok()) << expected.status;
  EXPECT_GT(expected.skipped.size(), 0u);
  EXPECT_LT(expected.skipped.size(), 6u);
  ExpectSameTrace(TrainIn(InFile(config), {.ranks = 2}), expected);
}

// A checkpoint does not name where state was: any run resumes from any.
TEST(OffloadRunTest, ACheckpointResumesWithAndWithoutAFile) {
  if (kThreadSanitized) GTEST_SKIP() << "passes and pages as in the other tests";
  const std::string folder = ::testing::TempDir() + "offload_resume";
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    TrainConfig config = ConfigOfPages(dtype);
    config.steps = 4;
    const Trace whole = TrainIn(config);
    ASSERT_TRUE(whole.status.ok()) << whole.status;
    for (const bool saved_in_file : {false, true}) {
      SCOPED_TRACE(absl::StrCat(NameOf(dtype), saved_in_file ? " saved in file" : " saved"));
      fs::remove_all(folder);
      TrainConfig saving = saved_in_file ? InFile(config) : config;
      saving.steps = 2;
      saving.checkpoints.folder = folder;
      const Trace first = TrainIn(saving, {.ranks = 2});
      ASSERT_TRUE(first.status.ok()) << first.status;
      for (const bool in_file : {false, true}) {
        TrainConfig resuming = in_file ? InFile(config) : config;
        resuming.trainer.zero = in_file ? ZeroStage::kOptimizer : ZeroStage::kNone;
        resuming.checkpoints.resume = TrainCheckpoints::Resume::kPath;
        resuming.checkpoints.path = folder + "/step-00000002";
        const Trace second = TrainIn(resuming, {.ranks = 3});
        ASSERT_TRUE(second.status.ok()) << second.status;
        EXPECT_EQ(second.loss, std::vector(whole.loss.begin() + 2, whole.loss.end()));
        EXPECT_EQ(second.weights, whole.weights);
      }
    }
  }
  fs::remove_all(folder);
}

void ShortenScratchFiles() {
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code ignored;
    const std::string target = fs::read_symlink(entry.path(), ignored).string();
    if (!absl::StrContains(target, "moe-optimizer-rank-0-")) continue;
    EXPECT_EQ(::truncate(entry.path().c_str(), 0), 0);
  }
}

// A disk that loses state ends every rank with its error, and the last checkpoint stays.
TEST(OffloadRunTest, ALostFileEndsTheRunAndLeavesItsCheckpoint) {
  const std::string folder = ::testing::TempDir() + "offload_lost";
  fs::remove_all(folder);
  TrainConfig config = InFile(ConfigOfPages(DType::kBFloat16));
  config.checkpoints.folder = folder;
  config.checkpoints.interval = 2;
  config.checkpoints.asynchronous = false;
  const Trace got = TrainIn(config, {.ranks = 2}, [&](const StepMetrics& metrics) {
    if (metrics.step == 3) ShortenScratchFiles();
  });
  EXPECT_THAT(got.status, StatusIs(absl::StatusCode::kUnavailable, "moe-optimizer-rank-0-"));
  EXPECT_EQ(FileFaultOf(got.status), FileFault::kRead);
  EXPECT_GE(got.loss.size(), 3u);
  EXPECT_LT(got.loss.size(), 6u);
  auto reader = CheckpointReader::Open(folder + "/step-00000002");
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_TRUE(reader->Verify(1).ok());
  fs::remove_all(folder);
}

}  // namespace
}  // namespace moe::lm::testing
