// A rank over NCCL that dies in the middle of a training step, in each phase of it: every other
// rank leaves within the deadline, with a message that says who waited, in what, for whom and how
// long.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/time/clock.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/dying_communicator.h"
#include "tests/nccl_ranks.h"
#include "tests/train_harness.h"

namespace moe {
namespace {

using ::testing::ContainsRegex;
using testing::Death;
using testing::DyingCommunicator;
using testing::Fates;

constexpr int kVictim = 1;
constexpr int64_t kStep = 1;
// Far above what ranks wait for one another in a step that goes well.
constexpr absl::Duration kTimeout = absl::Seconds(4);
constexpr absl::Duration kSlack = absl::Seconds(2);

struct Expected {
  const char* phase;
  const char* place;  // of the others, a regular expression
};

class NcclTrainFaultTest : public ::testing::TestWithParam<Expected> {};

TEST_P(NcclTrainFaultTest, EveryOtherRankNamesWhatItWaitedFor) {
  lm::TrainConfig config = lm::testing::SmallConfig();
  config.device = DeviceKind::kCuda;
  config.expert_parallel_size = 3;
  config.steps = 3;
  config.micro_batches = 3;
  config.eval_interval = 0;
  config.eval_sequences = 2;
  const lm::Corpus corpus = lm::testing::MakeCorpus();
  const auto death = std::make_shared<Death>();
  death->comes = [](const CommPhase& at) {
    return at.step == kStep && at.name == std::string(GetParam().phase);
  };
  std::vector<absl::Status> results(3);
  std::vector<int64_t> ended(3);
  testing::RunNcclRanks({.ranks = 3, .timeout = kTimeout, .fates = Fates::kOwn},
                        [&](absl::StatusOr<std::unique_ptr<Communicator>> comm, int rank) {
                          ASSERT_TRUE(comm.ok()) << comm.status();
                          std::unique_ptr<Communicator> world = *std::move(comm);
                          if (rank == kVictim) {
                            world = std::make_unique<DyingCommunicator>(std::move(world), death);
                          }
                          results[rank] = lm::Train(config, corpus, std::move(world), {}).status();
                          ended[rank] = absl::GetCurrentTimeNanos();
                        });
  ASSERT_TRUE(death->dead) << "no collective in " << GetParam().phase;
  for (const int rank : {0, 2}) {
    const absl::Status& status = results[rank];
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_THAT(std::string(status.message()),
                ContainsRegex(absl::StrCat("rank ", rank, " on host [^ ]+ in ", GetParam().place,
                                           ": waited [0-9.]+s for ranks? [0-9, ]*\\b1\\b")));
    EXPECT_LT(absl::Nanoseconds(ended[rank] - death->at_ns), kTimeout + kSlack) << status;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Phases, NcclTrainFaultTest,
    ::testing::Values(Expected{"dispatch", "AllToAllV \\(dispatch, layer 0, step 1\\)"},
                      Expected{"combine", "AllToAllV \\(combine, layer 0, step 1\\)"},
                      Expected{"dispatch backward",
                               "AllToAllV \\(dispatch backward, layer 1, step 1\\)"},
                      Expected{"all-reduce", "SendRecv \\(all-reduce, step 1\\)"}),
    [](const auto& test) {
      std::string name(test.param.phase);
      for (char& c : name) c = c == ' ' || c == '-' ? '_' : c;
      return name;
    });

}  // namespace
}  // namespace moe
