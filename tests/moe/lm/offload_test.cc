// Runs whose optimiser state is in files, against runs that keep it in memory.
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>

#include "moe/checkpoint/reader.h"
#include "moe/io/file.h"
#include "tests/moe/lm/train_harness.h"
#include "tests/moe/scratch_files.h"
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
  TrainConfig config = ZeroConfig(dtype);
  config.model.moe.ffn_hidden_size = 96;
  config.trainer.bucket_bytes = 100'000;
  config.steps = 6;
  config.evaluation.interval = config.verify_replicas = 3;
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
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    SCOPED_TRACE(NameOf(dtype));
    TrainConfig config = ConfigOfPages(dtype);
    config.steps = 4;
    TrainConfig in_parts = config;
    in_parts.trainer.zero = ZeroStage::kOptimizer;
    ExpectResumes({{"memory", config, {.ranks = 2}}, {"file", InFile(config), {.ranks = 2}}},
                  {{"memory", config, {.ranks = 3}}, {"file", InFile(in_parts), {.ranks = 3}}},
                  TrainIn(config));
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
    if (metrics.step == 3) ::moe::testing::LoseOpenFiles("moe-optimizer-rank-0-");
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
