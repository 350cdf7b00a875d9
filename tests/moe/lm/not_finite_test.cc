// Runs whose weights or moments are NaN or infinite: they end, and nobody goes on from them.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moe/checkpoint/manifest.h"
#include "moe/checkpoint/reader.h"
#include "moe/checkpoint/step_folders.h"
#include "moe/io/file.h"
#include "tests/moe/lm/train_harness.h"
#include "tests/moe/status_is.h"

namespace moe::lm::testing {
namespace {

namespace fs = std::filesystem;
using ::moe::testing::StatusIs;
using ::testing::HasSubstr;
using enum absl::StatusCode;
using Resume = TrainCheckpoints::Resume;

class NotFiniteTest : public ::testing::Test {
 protected:
  NotFiniteTest() { fs::remove_all(folder_); }
  ~NotFiniteTest() override { fs::remove_all(folder_); }

  TrainConfig Saving(int64_t steps, Resume resume = Resume::kNone) const {
    TrainConfig config = SmallConfig();
    config.steps = steps;
    config.evaluation.interval = 0;
    config.checkpoints = {
        .folder = folder_, .interval = 1, .asynchronous = false, .resume = resume};
    return config;
  }
  std::string StepPath(int64_t step) const { return folder_ + "/" + StepFolderName(step); }

  const std::string folder_ = ::testing::TempDir() + "not_finite_" +
                              ::testing::UnitTest::GetInstance()->current_test_info()->name();
};

// The gradients of the first step are finite, the weights that it makes are not.
TEST_F(NotFiniteTest, WeightsEndEveryRankInTheirStepAndAreNotSaved) {
  TrainConfig config = Saving(3);
  config.schedule = {.peak = 1e39, .warmup_steps = 0, .total_steps = 3};
  for (const ZeroStage zero : {ZeroStage::kNone, ZeroStage::kGradients}) {
    for (const bool asynchronous : {false, true}) {
      fs::remove_all(folder_);
      config.trainer.zero = zero;
      config.checkpoints.asynchronous = asynchronous;
      const Trace trace = TrainIn(config, {.ranks = 4, .expert_parallel = 2});
      EXPECT_THAT(trace.status, StatusIs(kDataLoss, "step 1: "));
      EXPECT_THAT(std::string(trace.status.message()),
                  ::testing::ContainsRegex("[0-9]+ values of weights or their moments are not "
                                           "finite, the first in tensor '.*weight' of rank 0, "
                                           "expected finite ones: lower --lr"));
      EXPECT_FALSE(fs::exists(StepPath(1)));
    }
  }
}

// As a version that did not look at weights would have left it: hashes of boxes are right.
TEST_F(NotFiniteTest, ACheckpointWithSuchValuesIsPassedOver) {
  ASSERT_TRUE(TrainIn(Saving(2)).status.ok());
  auto reader = CheckpointReader::Open(StepPath(2)).value();
  CheckpointManifest manifest = reader.manifest();
  ManifestBox& box = manifest.boxes.front();
  const ManifestTensor& tensor = manifest.tensors[box.tensor];
  std::vector<float> values(box.box.rows() * box.box.cols());
  const MatrixView<float> rows(values.data(), box.box.rows(), box.box.cols());
  ASSERT_TRUE(reader.ReadBox(tensor.name, tensor.states[box.state], box.box, rows).ok());
  const auto* const data = reinterpret_cast<const char*>(values.data());
  const size_t size = values.size() * sizeof(float);
  const std::string shard = StepPath(2) + "/" + manifest.files[box.file].name;
  std::stringstream stored;
  stored << std::ifstream(shard, std::ios::binary).rdbuf();
  const auto at = static_cast<int64_t>(stored.view().find({data, size}));
  values[0] = std::numeric_limits<float>::infinity();
  box.xxh3 = CheckpointHash({reinterpret_cast<const uint8_t*>(data), size});
  std::fstream(shard, std::ios::in | std::ios::out | std::ios::binary)
      .seekp(at)
      .write(data, static_cast<int64_t>(size));
  std::ofstream(StepPath(2) + "/" + kManifestName) << SerializeManifest(manifest).value();

  TrainConfig config = Saving(4, Resume::kPath);
  config.checkpoints.path = StepPath(2);
  const absl::Status refused = TrainIn(config, {.ranks = 2}).status;
  EXPECT_EQ(FileFaultOf(refused), FileFault::kContent);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("1 values that are not finite"));
  const Trace resumed = TrainIn(Saving(4, Resume::kAuto), {.ranks = 3});
  EXPECT_TRUE(resumed.status.ok()) << resumed.status;
  EXPECT_EQ(resumed.report.first_step, 1);
}

}  // namespace
}  // namespace moe::lm::testing
