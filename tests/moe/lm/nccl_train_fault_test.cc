// A rank over NCCL that dies in the middle of a step of moe::Trainer, in each phase of it: every
// other rank leaves within the deadline, with a message that says who waited, in what, for whom and
// how long.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/time/clock.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/comm/forwarding_communicator.h"
#include "tests/comm/nccl_ranks.h"
#include "tests/moe/layer_harness.h"

namespace moe {
namespace {

using ::testing::ContainsRegex;
using testing::Death;
using testing::DyingCommunicator;
using testing::Fates;

constexpr int kVictim = 1;
constexpr int64_t kStep = 2;
constexpr testing::Layout kLayout = {.ranks = 3, .expert_parallel = 3, .overlap = 2};
// Far above what ranks wait for one another in a step that goes well.
constexpr absl::Duration kTimeout = absl::Seconds(2);
constexpr absl::Duration kSlack = absl::Seconds(2);

struct Outcome {
  std::vector<absl::Status> results{3};
  std::vector<int64_t> ended_ns = std::vector<int64_t>(3);
};

Outcome RunWithDeath(const std::shared_ptr<Death>& death, absl::Duration timeout) {
  Outcome outcome;
  testing::RunNcclRanks({.ranks = 3, .timeout = timeout, .fates = Fates::kOwn},
                        [&](absl::StatusOr<std::unique_ptr<Communicator>> comm, int rank) {
                          ASSERT_TRUE(comm.ok()) << comm.status();
                          std::unique_ptr<Communicator> world = *std::move(comm);
                          if (rank == kVictim) {
                            world = std::make_unique<DyingCommunicator>(std::move(world), death);
                          }
                          outcome.results[rank] = testing::RunSteps(
                              kLayout, std::move(world), [](const Trainer&) {}, DeviceKind::kCuda);
                          outcome.ended_ns[rank] = absl::GetCurrentTimeNanos();
                        });
  return outcome;
}

// The phases in which a rank meets others in a step.
std::vector<std::string> Phases() {
  std::vector<std::string> phases;
  const auto probe = testing::NotePhases(kStep, phases);
  for (const absl::Status& status : RunWithDeath(probe, absl::Seconds(30)).results) {
    EXPECT_TRUE(status.ok()) << status;
  }
  return phases;
}

TEST(NcclTrainFaultTest, EveryOtherRankNamesWhatItWaitedFor) {
  const std::vector<std::string> phases = Phases();
  EXPECT_GE(phases.size(), 6);
  for (const std::string& phase : phases) {
    const auto death = std::make_shared<Death>();
    death->comes = [&](const Site& at) {
      return at.step == kStep && at.name == phase;
    };
    const Outcome outcome = RunWithDeath(death, kTimeout);
    EXPECT_TRUE(death->dead) << phase;
    for (const int rank : {0, 2}) {
      const absl::Status& status = outcome.results[rank];
      EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << phase << ": " << status;
      EXPECT_THAT(std::string(status.message()),
                  ContainsRegex(absl::StrCat("rank ", rank,
                                             " on host [^ ]+ in [A-Za-z]+ \\([a-z -]+.* step 2\\): "
                                             "waited [0-9.]+s for ranks? [0-9, ]*\\b1\\b")))
          << phase;
      EXPECT_LT(absl::Nanoseconds(outcome.ended_ns[rank] - death->at_ns), kTimeout + kSlack)
          << phase << ": " << status;
    }
  }
}

}  // namespace
}  // namespace moe
