// Runs that are saved, stopped and resumed, against one that never stopped.
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <absl/strings/str_replace.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/log.h"
#include "moe/checkpoint/reader.h"
#include "moe/checkpoint/run_lock.h"
#include "moe/checkpoint/step_folders.h"
#include "moe/checkpoint/stop_signal.h"
#include "moe/io/file.h"
#include "moe/lm/evaluation.h"
#include "moe/lm/run_settings.h"
#include "tests/moe/lm/train_harness.h"
#include "tests/moe/status_is.h"

namespace moe::lm::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class ResumeTest : public SavedRunTest {
 protected:
  ResumeTest() {
    // With everything that a run resumes from: moments, a router's bias and shares.
    LearnBias(config_.model.moe.router);
    config_.model.moe.router.load_balancing = LoadBalancing::kGlobalAuxLoss;
    config_.model.moe.shared_expert_ffn_hidden_size = 8;
    config_.schedule.total_steps = 6;
  }

  // The run that holds the folder.
  std::string Run() const {
    std::ifstream lock(folder_ + "/" + kLockName);
    std::string line;
    std::getline(lock, line);
    return ParseLock(line).value().run;
  }
};

TEST_F(ResumeTest, AtAnyLayoutARunGoesOnAsIfItHadNotStopped) {
  const Trace whole = TrainIn(config_);
  ASSERT_TRUE(whole.status.ok()) << whole.status;
  const std::vector<::moe::testing::Layout> layouts = {{},
                                                       {.ranks = 5, .expert_parallel = 5},
                                                       {.ranks = 3, .threads = 2},
                                                       {.ranks = 8, .expert_parallel = 4}};
  // Each saves for the next: 2 steps, 3, 4, and the rest.
  for (size_t i = 0; i < layouts.size(); ++i) {
    SCOPED_TRACE(layouts[i]);
    const auto steps = static_cast<int64_t>(i + 1 == layouts.size() ? 6 : i + 2);
    TrainConfig config = Saving(steps, i == 0 ? Resume::kNone : Resume::kAuto);
    config.checkpoints.asynchronous = i % 2 == 0;
    const Trace part = TrainIn(config, layouts[i]);
    ASSERT_TRUE(part.status.ok()) << part.status;
    EXPECT_EQ(part.report.first_step, i == 0 ? 0 : i + 1);
    EXPECT_EQ(part.report.saved_step, steps);
    if (steps == 6) ExpectSameEnd(part, whole);
  }
}

TEST_F(ResumeTest, TheLossScaleGoesOnToo) {
  config_.trainer.dtype = DType::kFloat16;
  config_.loss_scale = {.initial = 0x1p30, .window = 3, .hysteresis = 1};  // overflows, then grows
  const Trace whole = TrainIn(config_);
  ASSERT_FALSE(whole.skipped.empty());
  ASSERT_TRUE(TrainIn(Saving(4), {.ranks = 2}).status.ok());
  ExpectSameEnd(TrainIn(Saving(6, Resume::kAuto), {.ranks = 3}), whole);
}

// The first gradients of such a z-loss are off the default grid. A checkpoint of that step alone
// records that no gradients have fitted yet.
TEST_F(ResumeTest, TheUnitOfTheExactGridGoesOnToo) {
  config_.model.moe.router.z_loss_coeff = 1e9f;
  const Trace whole = TrainIn(config_);
  ASSERT_TRUE(whole.status.ok()) << whole.status;
  EXPECT_EQ(whole.report.skipped_steps, 1);
  EXPECT_GT(whole.report.grid_unit_log2, -50);
  for (const int64_t steps : {1, 3}) {
    SCOPED_TRACE(steps);
    fs::remove_all(folder_);
    ASSERT_TRUE(TrainIn(Saving(steps), {.ranks = 2}).status.ok());
    const Trace resumed = TrainIn(Saving(6, Resume::kAuto), {.ranks = 3});
    ExpectSameEnd(resumed, whole);
    EXPECT_EQ(resumed.report.grid_unit_log2, whole.report.grid_unit_log2);
    EXPECT_EQ(resumed.report.skipped_steps, 1);
  }
  TrainConfig given = Saving(6, Resume::kAuto);
  given.trainer.unit_log2 = -20;
  EXPECT_THAT(TrainIn(given).status,
              ::moe::testing::StatusIs(absl::StatusCode::kInvalidArgument, "--grid-unit-log2"));
}

// Frozen weights have no masters, and are made again as they were at first: here from the seed.
TEST_F(ResumeTest, FrozenWeightsAreNoPartOfWhatIsSaved) {
  config_.trainer.dtype = DType::kBFloat16;
  config_.model.moe.train_experts = false;
  const Trace whole = TrainIn(config_);
  ASSERT_TRUE(TrainIn(Saving(4), {.ranks = 2, .expert_parallel = 2}).status.ok());
  ExpectSameEnd(TrainIn(Saving(6, Resume::kAuto), {.ranks = 3}), whole);
}

TEST_F(ResumeTest, ASignalStopsAllRanksInOneStepWhichIsSaved) {
  const Trace whole = TrainIn(config_);
  Trace stopped;
  {
    const StopSignal stop;
    EXPECT_EQ(stop.received(), 0);
    stopped = TrainIn(
        Saving(6), {.ranks = 4, .expert_parallel = 2},
        [](const StepMetrics& m) {
          if (m.step != 2) return;
          // As scancel sends SIGTERM while moe launch passes SIGUSR1 on.
          for (const int signal : {SIGUSR1, SIGTERM, SIGUSR1}) raise(signal);
        },
        &stop);
    EXPECT_EQ(stop.received(), SIGTERM);  // what a run without --save ends by
  }
  ASSERT_TRUE(stopped.status.ok()) << stopped.status;
  EXPECT_TRUE(stopped.report.stopped);
  // Ranks that have begun step 3 when the signal comes report it in that step, or in the next.
  EXPECT_THAT(stopped.report.steps, ::testing::AnyOf(3, 4));
  EXPECT_EQ(stopped.report.saved_step, stopped.report.steps);
  const Trace resumed = TrainIn(Saving(6, Resume::kAuto), {.ranks = 3});
  EXPECT_EQ(resumed.report.first_step, stopped.report.steps);
  ExpectSameEnd(resumed, whole);
}

TEST_F(ResumeTest, OldCheckpointsGoAndADamagedOneIsPassedOver) {
  TrainConfig config = Saving(5);
  config.checkpoints.interval = 1;
  config.checkpoints.keep = 2;
  config.checkpoints.keep_every = 3;
  config.checkpoints.asynchronous = false;
  ASSERT_TRUE(TrainIn(config, {.ranks = 2}).status.ok());
  for (int64_t step = 1; step <= 5; ++step) EXPECT_EQ(fs::exists(StepPath(step)), step >= 3);
  std::ofstream(StepPath(5) + "/manifest.json", std::ios::in) << "?";
  const Trace resumed = TrainIn(Saving(6, Resume::kAuto));
  EXPECT_EQ(resumed.report.first_step, 4);
  ExpectSameEnd(resumed, TrainIn(config_));
}

// Damage that is found only by reading the data, by each rank in another part of them.
TEST_F(ResumeTest, DamagedDataCostTheNewestCheckpointsAlone) {
  const Trace whole = TrainIn(config_);
  TrainConfig config = Saving(5);
  config.checkpoints.interval = 1;
  config.checkpoints.asynchronous = false;
  ASSERT_TRUE(TrainIn(config, {.ranks = 2, .expert_parallel = 2}).status.ok());
  const auto damage = [&](int64_t step, int rank) {
    std::fstream shard(
        StepPath(step) + "/shard-0000" + std::to_string(rank) + "-of-00002.safetensors",
        std::ios::in | std::ios::out | std::ios::binary);
    shard.seekg(-2, std::ios::end);
    const auto flipped = static_cast<char>(shard.get() ^ 1);
    shard.seekp(-2, std::ios::end).put(flipped);
  };
  damage(5, 0);  // a router's shares
  damage(4, 1);  // moments
  config = Saving(6, Resume::kPath);
  config.checkpoints.path = StepPath(5);
  EXPECT_EQ(FileFaultOf(TrainIn(config, {.ranks = 2}).status), FileFault::kContent);

  static std::vector<std::string>& warnings = *new std::vector<std::string>;
  SetLogCallback([](LogLevel, absl::string_view message) { warnings.emplace_back(message); });
  const std::string saved = folder_ + "_saved";
  fs::remove_all(saved);
  fs::rename(folder_, saved);
  config = Saving(6, Resume::kAuto);
  config.checkpoints.interval = 1;
  config.checkpoints.asynchronous = false;
  const std::vector<::moe::testing::Layout> layouts = {
      {}, {.ranks = 3}, {.ranks = 5, .expert_parallel = 5}};
  for (const ZeroStage zero : {ZeroStage::kNone, ZeroStage::kGradients}) {
    for (const ::moe::testing::Layout& layout : layouts) {
      SCOPED_TRACE(layout);
      fs::remove_all(folder_);
      fs::copy(saved, folder_, fs::copy_options::recursive);
      warnings.clear();
      config.trainer.zero = zero;
      const Trace resumed = TrainIn(config, layout);
      EXPECT_EQ(resumed.report.first_step, 3);
      ExpectSameEnd(resumed, whole);
      EXPECT_THAT(warnings,
                  ::testing::ElementsAre(HasSubstr("step-00000005 is passed over: "),
                                         HasSubstr("step-00000004 is passed over: "),
                                         HasSubstr("step-00000004 cannot be read and is now "),
                                         HasSubstr("step-00000005 cannot be read and is now ")));
      EXPECT_THAT(warnings[0], HasSubstr("shard-00000-of-00002.safetensors: box '"));
      // The run has passed their steps again.
      for (const int64_t step : {4, 5, 6}) {
        auto reader = CheckpointReader::Open(StepPath(step));
        EXPECT_TRUE(reader.ok() && reader->Verify(1).ok()) << step;
      }
    }
  }
  fs::remove_all(folder_);
  fs::rename(saved, folder_);
  damage(3, 1);
  EXPECT_EQ(FileFaultOf(TrainIn(config, {.ranks = 2}).status), FileFault::kContent);
  SetLogCallback(nullptr);
}

// Checkpoints that cannot be read are no reason to begin anew unasked, and stay when a run does.
TEST_F(ResumeTest, UnreadableCheckpointsAreNamedAndStay) {
  TrainConfig config = Saving(4);
  config.checkpoints.interval = 2;
  config.checkpoints.asynchronous = false;
  ASSERT_TRUE(TrainIn(config, {.ranks = 2}).status.ok());
  for (const int64_t step : {2, 4}) {
    fs::resize_file(StepPath(step) + "/shard-00000-of-00002.safetensors", 100);
  }
  const absl::Status none = TrainIn(Saving(6, Resume::kAuto), {.ranks = 2}).status;
  EXPECT_EQ(FileFaultOf(none), FileFault::kContent) << none;
  EXPECT_THAT(none.message(), HasSubstr("none of the checkpoints in '" + folder_));
  EXPECT_THAT(none.message(), HasSubstr(StepPath(2) + " is passed over"));
  EXPECT_THAT(none.message(), HasSubstr("--resume none"));
  config.steps = 6;
  const Trace anew = TrainIn(config, {.ranks = 2});
  ExpectSameEnd(anew, TrainIn(config_));
  EXPECT_EQ(anew.report.first_step, 0);
  for (const int64_t step : {2, 4}) {
    EXPECT_TRUE(fs::exists(folder_ + "/damaged-step-0000000" + std::to_string(step)));
  }
}

// Boxes that are right under a hash that is not: of a writer that went wrong between the two.
TEST_F(ResumeTest, AHashOfAStateIsVerifiedByTheModelsUnits) {
  config_.model.tied_embeddings = true;
  config_.model.num_query_groups = 1;
  config_.trainer.dtype = DType::kBFloat16;
  ASSERT_TRUE(TrainIn(Saving(2), {.ranks = 3}).status.ok());
  const auto verify = [&] {
    auto reader = CheckpointReader::Open(StepPath(2)).value();
    EXPECT_TRUE(reader.Verify(2).ok());
    return reader.VerifyStates(StoredTensors(reader.manifest()).value(), 2);
  };
  EXPECT_TRUE(verify().ok()) << verify();
  CheckpointManifest manifest = ReadManifest(StepPath(2)).value();
  StateHashes hashes = ParseStateHashes(manifest.sections.hash).value();
  EXPECT_EQ(hashes.size(), 4u);
  ++hashes["m"];
  manifest.sections.hash = StateHashesText(hashes);
  std::ofstream(StepPath(2) + "/manifest.json") << SerializeManifest(manifest).value();
  EXPECT_THAT(verify(), ::moe::testing::StatusIs(absl::StatusCode::kDataLoss, "all 'm' have hash"));
  EXPECT_EQ(FileFaultOf(TrainIn(Saving(6, Resume::kAuto)).status), FileFault::kContent);
  // No model of so many layers was written here.
  manifest.sections.model = absl::StrReplaceAll(
      manifest.sections.model, {{R"("num_layers":"2")", R"("num_layers":"2000000000")"}});
  EXPECT_THAT(
      StoredTensors(manifest),
      ::moe::testing::StatusIs(absl::StatusCode::kDataLoss, "expected more for 2000000000 layers"));
}

// The folder is the run's: what another run has left in it stays.
TEST_F(ResumeTest, ARunIsTheSameOverItsResumes) {
  TrainConfig config = Saving(1);
  config.checkpoints.keep = 1;
  const auto run_of = [&](int64_t step) {
    return RunOf(ReadManifest(StepPath(step)).value().sections);
  };
  ASSERT_TRUE(TrainIn(config, {.ranks = 2}).status.ok());
  const std::string first = run_of(1);
  EXPECT_EQ(first.size(), 16u);
  fs::rename(folder_, folder_ + "_first");
  ASSERT_TRUE(TrainIn(config).status.ok());
  EXPECT_NE(run_of(1), first);
  fs::remove_all(folder_);

  config.steps = 2;
  config.checkpoints.resume = Resume::kPath;
  config.checkpoints.path = folder_ + "_first/step-00000001";
  ASSERT_TRUE(TrainIn(config, {.ranks = 3}).status.ok());
  EXPECT_EQ(run_of(2), first);
  fs::remove_all(folder_ + "_first");
  // A checkpoint of a program that recorded no runs belongs to the run that resumes from it.
  CheckpointManifest manifest = ReadManifest(StepPath(2)).value();
  manifest.sections.written_by = "{}";
  std::ofstream(StepPath(2) + "/manifest.json") << SerializeManifest(manifest).value();
  config.steps = 3;
  config.checkpoints.resume = Resume::kAuto;
  ASSERT_TRUE(TrainIn(config).status.ok());
  EXPECT_EQ(run_of(3), "");
  EXPECT_FALSE(fs::exists(StepPath(2)));
}

TEST_F(ResumeTest, NothingLeftToTrainIsSaid) {
  static std::string& warning = *new std::string;
  ASSERT_TRUE(TrainIn(Saving(4)).status.ok());
  TrainConfig config = Saving(3, Resume::kAuto);
  config.schedule.total_steps = 6;
  SetLogCallback([](LogLevel, absl::string_view message) { warning = std::string(message); });
  EXPECT_TRUE(TrainIn(config, {.ranks = 2}).status.ok());
  SetLogCallback(nullptr);
  EXPECT_EQ(warning, "--steps is 3, and the checkpoint has 4: nothing is left to train");
}

TEST_F(ResumeTest, RefusesWhatWouldNotGoOn) {
  ASSERT_TRUE(TrainIn(Saving(2)).status.ok());
  const auto status = [&](const TrainConfig& config) {
    return TrainIn(config, {.ranks = 2}).status;
  };
  EXPECT_THAT(status(Saving(6)).message(), HasSubstr("--save: "));
  EXPECT_THAT(status(Saving(6)).message(), HasSubstr("--resume auto"));

  TrainConfig other = Saving(6, Resume::kAuto);
  other.model.moe.ffn_hidden_size = 16;
  EXPECT_THAT(status(other).message(), HasSubstr("--moe-ffn-hidden-size is 16, 12 in the check"));

  other = Saving(6, Resume::kAuto);
  other.trainer.micro_batches = 4;
  EXPECT_THAT(status(other).message(), HasSubstr("--micro-batches is 4, 6 in the checkpoint"));
  EXPECT_EQ(status(other).code(), absl::StatusCode::kInvalidArgument);
  other.checkpoints.allow_numerics_change = true;
  EXPECT_TRUE(status(other).ok());

  other = Saving(6, Resume::kPath);
  other.checkpoints.path = folder_ + "/none";
  EXPECT_EQ(status(other).code(), absl::StatusCode::kNotFound);
}

// Ranks with a folder of their own are found before a step, and nothing is lost by a mount that is
// lost later: rank 1's folder is another one when step 4 is saved.
TEST_F(ResumeTest, RanksThatDoNotShareOneFolderLoseNothing) {
  const std::string mount = folder_ + "_mount", local = folder_ + "_local";
  const auto mount_to = [&](const std::string& target) {
    fs::remove(mount);
    fs::create_directory_symlink(target, mount);
  };
  for (const std::string& each : {folder_, local}) fs::create_directories(each);
  TrainConfig config = Saving(6);
  config.checkpoints.interval = 2;
  config.checkpoints.keep = 1;
  config.checkpoints.asynchronous = false;
  const auto train = [&](const std::function<void(int64_t)>& after) {
    std::vector<absl::Status> statuses(2);
    const Corpus corpus = MakeCorpus();
    ::moe::testing::RunLocalRanks(2, [&](std::unique_ptr<Communicator> world) {
      const int rank = world->rank();
      TrainConfig mine = config;
      if (rank == 1) mine.checkpoints.folder = mount;
      TrainHooks hooks;
      hooks.on_step = [&](const StepMetrics& metrics) {
        after(metrics.step);
        return absl::OkStatus();
      };
      statuses[rank] = Train(mine, corpus, std::move(world), hooks).status();
      return absl::OkStatus();
    });
    EXPECT_EQ(statuses[1], statuses[0]);
    return statuses[0];
  };
  mount_to(local);
  const absl::Status refused = train([](int64_t step) { ADD_FAILURE() << "step " << step; });
  EXPECT_THAT(refused.message(), HasSubstr("--save: rank 1 on host "));
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FileFaultOf(refused), FileFault::kNone);

  mount_to(folder_);
  EXPECT_TRUE(train([&](int64_t step) {
                if (step == 3) mount_to(local);
                if (step != 5) return;
                EXPECT_TRUE(fs::exists(StepPath(2)));
                EXPECT_FALSE(fs::exists(StepPath(4)));
                mount_to(folder_);
              }).ok());
  EXPECT_EQ(TrainIn(Saving(6, Resume::kAuto)).report.first_step, 6);
  EXPECT_TRUE(fs::is_empty(local));
  for (const std::string& each : {mount, local}) fs::remove_all(each);
}

TEST_F(ResumeTest, RanksThatReadDifferentCheckpointsAreRefused) {
  TrainConfig config = Saving(4);
  config.checkpoints.interval = 2;
  config.checkpoints.asynchronous = false;
  ASSERT_TRUE(TrainIn(config).status.ok());
  const Corpus corpus = MakeCorpus();
  ::moe::testing::RunLocalRanks(2, [&](std::unique_ptr<Communicator> world) {
    TrainConfig mine = config_;
    mine.checkpoints.resume = Resume::kPath;
    mine.checkpoints.path = StepPath(world->rank() == 0 ? 2 : 4);
    EXPECT_THAT(
        Train(mine, corpus, std::move(world), {}).status(),
        ::moe::testing::StatusIs(absl::StatusCode::kInvalidArgument,
                                 "--resume: ranks read different checkpoints, of steps 2 to 4"));
    return absl::OkStatus();
  });
}

// Another run took the lock, as it may from a host that was frozen: this one saves no more.
TEST_F(ResumeTest, WhoLostTheLockPublishesNothing) {
  TrainConfig config = Saving(4);
  config.checkpoints.interval = 1;
  config.checkpoints.asynchronous = false;
  const Trace trace = TrainIn(config, {}, [&](const StepMetrics& m) {
    if (m.step == 2) std::ofstream(folder_ + "/" + kLockName) << LockText(ThisRun());
  });
  EXPECT_EQ(FileFaultOf(trace.status), FileFault::kWrite) << trace.status;
  EXPECT_THAT(trace.status.message(), HasSubstr("lock' was taken by process "));
  EXPECT_TRUE(fs::exists(StepPath(1)));
  EXPECT_FALSE(fs::exists(StepPath(2)));
}

TEST_F(ResumeTest, WritesThatFailCostTheirCheckpointsAndInTheEndTheRun) {
  TrainConfig config = Saving(6);
  config.checkpoints.interval = 1;
  config.checkpoints.asynchronous = false;
  config.checkpoints.max_failures = 3;
  // A file where the folder of the step is to be written.
  const Trace trace = TrainIn(config, {}, [&](const StepMetrics& m) {
    std::ofstream(UnfinishedPath(folder_, m.step, Run())) << "in the way";
  });
  EXPECT_EQ(FileFaultOf(trace.status), FileFault::kWrite) << trace.status;
  EXPECT_THAT(trace.status.message(), HasSubstr("no checkpoint of step 3"));
  EXPECT_EQ(trace.loss.size(), 3u);
}

}  // namespace
}  // namespace moe::lm::testing
