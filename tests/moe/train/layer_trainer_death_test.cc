// A rank that dies at any collective of training steps ends all of them.
#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/strip.h>
#include <absl/time/clock.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "comm/create.h"
#include "moe/train/trainer.h"
#include "tests/comm/forwarding_communicator.h"
#include "tests/comm/local_ranks.h"
#include "tests/moe/layer_harness.h"

namespace moe {
namespace {

using testing::Death;
using testing::DyingCommunicator;
using testing::kOverlapping;
using testing::Layout;
using testing::RunSteps;

// Rank 1 dies at its at-th collective; false if it has fewer.
bool RunWithDeath(const Layout& layout, int at) {
  constexpr int kVictim = 1;
  const absl::Duration timeout = absl::Seconds(20);
  const auto death = std::make_shared<Death>();
  std::atomic<int> collectives{0};
  death->comes = [&](const Site&) {
    return ++collectives == at;
  };
  std::vector<absl::Status> results(layout.ranks);
  const absl::Time start = absl::Now();
  const RunOptions options = {.plan = {.ranks = layout.ranks}, .timeout = timeout};
  const absl::Status status = RunRanks(options, [&](std::unique_ptr<Communicator> world) {
    const int rank = world->rank();
    if (rank == kVictim) world = std::make_unique<DyingCommunicator>(std::move(world), death);
    results[rank] = RunSteps(layout, std::move(world), [](const Trainer&) {});
    return results[rank];
  });
  EXPECT_EQ(status, death->dead ? absl::AbortedError("this rank is dead") : absl::OkStatus());
  EXPECT_LT(absl::Now() - start, timeout) << "death " << at;  // told, not timed out
  for (int r = 0; r < layout.ranks; ++r) {
    EXPECT_EQ(results[r].ok(), !death->dead) << "death " << at << " rank " << r << results[r];
  }
  return death->dead;
}

// At every collective of three steps: memory that the streams still use must not go (sanitizers),
// and nobody waits for the deadline.
TEST(LayerTrainerTest, ARankThatDiesAtAnyCollectiveEndsAllRanks) {
  int deaths = 0;
  while (RunWithDeath(kOverlapping, deaths + 1)) ++deaths;
  EXPECT_GT(deaths, 50);
}

// Gathers of weights in parts among them.
TEST(LayerTrainerTest, ARankThatDiesAtAnyCollectiveOfWeightsInPartsEndsAllRanks) {
  Layout layout = kOverlapping;
  layout.zero = ZeroStage::kWeights;
  int deaths = 0;
  while (RunWithDeath(layout, deaths + 1)) ++deaths;
  EXPECT_GT(deaths, 70);
}

// The phases in which a rank meets others in the second step, in the order in which they come.
std::vector<std::string> PhasesOfAStep(const Layout& layout) {
  std::vector<std::string> phases;
  const auto probe = testing::NotePhases(2, phases);
  testing::RunLocalRanks(layout.ranks, [&](std::unique_ptr<Communicator> world) {
    if (world->rank() == 1) {
      world = std::make_unique<DyingCommunicator>(std::move(world), probe);
    }
    return RunSteps(layout, std::move(world), [](const Trainer&) {});
  });
  return phases;
}

// Ranks that are processes. The test starts itself under a launcher, once for each phase.
constexpr char kLauncher[] = "MOE_TEST_MPIEXEC", kDeath[] = "MOE_TEST_DEATH";
constexpr char kGathers[] = "weights";  // the phase that ZeRO-3 adds
constexpr absl::Duration kDeadline = absl::Seconds(20);

// One of the processes: rank 1 dies in the second step, in the phase that kDeath names, by SIGKILL
// or without a word.
TEST(LayerTrainerProcessTest, DISABLED_Rank) {
  const std::string phase = std::getenv(kDeath);
  const auto death = std::make_shared<Death>();
  death->comes = [&](const Site& at) {
    if (at.step != 2 || at.name != phase) return false;
    std::fprintf(stderr, "died %lld\n", static_cast<long long>(absl::GetCurrentTimeNanos()));
    if (phase.size() % 2 == 0) kill(getpid(), SIGKILL);
    _exit(3);
  };
  const auto launch = DetectLaunch({}, [](const char* name) { return std::getenv(name); });
  RunOptions options = {.plan = PlanWorld({}, launch.value()).value(), .timeout = kDeadline};
  options.report = [](const absl::Status& status) {
    std::fprintf(stderr, "reports %s\n", std::string(status.message()).c_str());
  };
  (void)RunRanks(options, [&](std::unique_ptr<Communicator> world) {
    if (world->rank() == 1) {
      world = std::make_unique<DyingCommunicator>(std::move(world), death);
    }
    Layout layout = kOverlapping;
    if (phase == kGathers) layout.zero = ZeroStage::kWeights;
    return RunSteps(layout, std::move(world), [](const Trainer&) {});
  });
}

// Reads all that `job` prints, and waits for it.
void ExpectOneLine(const std::string& phase, std::FILE* job) {
  int64_t died_at = 0;
  std::string all, reports;
  std::array<char, 4096> line = {};
  while (std::fgets(line.data(), line.size(), job) != nullptr) {
    const absl::string_view text = line.data();
    absl::StrAppend(&all, text);
    if (absl::StartsWith(text, "reports ")) absl::StrAppend(&reports, text);
    if (absl::StartsWith(text, "died ")) {
      EXPECT_TRUE(absl::SimpleAtoi(absl::StripSuffix(text.substr(5), "\n"), &died_at));
    }
  }
  EXPECT_NE(pclose(job), 0) << phase;
  EXPECT_LT(absl::Nanoseconds(absl::GetCurrentTimeNanos() - died_at), kDeadline / 2)
      << phase;  // told, not timed out
  EXPECT_THAT(reports, ::testing::MatchesRegex(
                           "reports on host [^\n]* rank 1 \\(process [0-9]+\\) (was killed by "
                           "signal 9|left with exit code 3|is gone)[^\n]*\n"))
      << phase << ": " << all;
}

TEST(LayerTrainerProcessTest, ARankThatDiesInAnyPhaseEndsTheJobWithOneLine) {
  const char* const launcher = std::getenv(kLauncher);
  if (launcher == nullptr) GTEST_SKIP() << "no " << kLauncher;
  std::array<char, 4096> self = {};
  ASSERT_GT(readlink("/proc/self/exe", self.data(), self.size() - 1), 0);
  std::vector<std::string> phases = PhasesOfAStep(kOverlapping);
  EXPECT_GE(phases.size(), 6);
  phases.push_back(kGathers);
  // Two jobs at once: most of the time launchers wait.
  for (size_t i = 0; i < phases.size(); i += 2) {
    std::vector<std::FILE*> jobs;
    for (size_t job = i; job < std::min(i + 2, phases.size()); ++job) {
      const std::string command = absl::StrCat(
          "unset ", kLauncher, "; ", kDeath, "='", phases[job], "' ", launcher, " -n 3 '",
          self.data(),
          "' --gtest_filter=LayerTrainerProcessTest.* --gtest_also_run_disabled_tests 2>&1");
      jobs.push_back(popen(command.c_str(), "r"));
      ASSERT_NE(jobs.back(), nullptr);
    }
    for (size_t job = 0; job < jobs.size(); ++job) ExpectOneLine(phases[i + job], jobs[job]);
  }
}

}  // namespace
}  // namespace moe
