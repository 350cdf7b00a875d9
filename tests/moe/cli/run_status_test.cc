// status.json, and what moe status concludes from it.
#include "moe/cli/base/run_status.h"

#include <filesystem>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "moe/cli/base/exit_code.h"
#include "moe/cli/status/run_view.h"
#include "tests/moe/io/io_test.h"

namespace moe::cli {
namespace {

using Json = nlohmann::ordered_json;
using ::testing::HasSubstr;

RunStatus Example() {
  RunStatus status;
  status.step = 7;
  status.first_step = 5;
  status.steps = 20;
  status.loss = 3.5;
  status.tokens_per_s = 1000;
  status.step_ms = 40;
  status.updated = absl::FromUnixSeconds(1700000000);
  status.process = ThisRun();
  status.user = "ana";
  status.ranks = 4;
  status.hosts = 2;
  status.backend = "mpi";
  status.save = "/data/run";
  status.command = "moe train --data 'a \xff b'";
  return status;
}

TEST(RunStatus, IsReadAsItWasWritten) {
  const std::string text = StatusText(Example());
  const auto read = ParseStatus(text);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(StatusText(*read), text);
  EXPECT_EQ(read->step, 7);
  EXPECT_EQ(read->updated, Example().updated);
  EXPECT_FALSE(read->val_loss.has_value());
}

TEST(RunStatus, EveryMemberThatIsMissingOrOfAnotherTypeIsNamed) {
  RunStatus ended = Example();
  ended.state = RunState::kFailed;
  const Json whole = Json::parse(StatusText(ended));
  for (const auto& [key, value] : whole.items()) {
    Json damaged = whole;
    damaged.erase(key);
    EXPECT_THAT(std::string(ParseStatus(damaged.dump()).status().message()),
                HasSubstr("'" + key + "'"));
    damaged = whole;
    damaged[key] = Json::array();
    EXPECT_THAT(std::string(ParseStatus(damaged.dump()).status().message()),
                HasSubstr("'" + key + "'"));
  }
  const std::string text = StatusText(ended);
  for (size_t size = 0; size + 2 < text.size(); ++size) {
    EXPECT_FALSE(ParseStatus(text.substr(0, size)).ok()) << size;
  }
}

TEST(RunStatus, AnotherSchemaIsNamed) {
  EXPECT_THAT(std::string(ParseStatus(R"({"schema": "moe.status/2"})").status().message()),
              HasSubstr("moe.status/2"));
}

class StatusFileTest : public IoTest {
 protected:
  RunStatus Written() const {
    const auto status = ParseStatus(Read(Path("status.json")));
    EXPECT_TRUE(status.ok()) << status.status();
    return status.ok() ? *status : RunStatus();
  }
  std::string Folder() const { return root_.string(); }
};

TEST_F(StatusFileTest, ARunThatDoesNotBeginLeavesTheStatusOfTheOneBefore) {
  Write("status.json", "before");
  StatusFile(Example(), {Folder()}).End(absl::InvalidArgumentError("refused"));
  EXPECT_EQ(Read(Path("status.json")), "before");
}

TEST_F(StatusFileTest, TheFirstEndStays) {
  StatusFile file(Example(), {Folder(), "", Folder() + "/."});
  file.Begin(/*first_step=*/5, /*hosts=*/3, /*rank=*/0);
  EXPECT_EQ(Written().state, RunState::kRunning);
  EXPECT_EQ(Written().hosts, 3);
  EXPECT_EQ(Written().step, 5);
  file.Show({.step = 9, .loss = 2});  // less than a second after the last
  EXPECT_EQ(Written().step, 5);
  file.End(absl::DeadlineExceededError("rank 1 waits"));
  file.End(absl::AbortedError("an echo"));
  EXPECT_EQ(Written().state, RunState::kFailed);
  EXPECT_EQ(Written().exit_code, 8);
  EXPECT_EQ(Written().error, "rank 1 waits");
  EXPECT_EQ(Written().step, 9);
  EXPECT_EQ(Written().loss, 2);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(root_), {}), 1);
}

TEST_F(StatusFileTest, AnotherRankCompletesWhatRankZeroWrote) {
  StatusFile zero(Example(), {Folder()});
  zero.Begin(5, 2, /*rank=*/0);
  RunStatus of_other = Example();
  of_other.process.pid = 1;
  StatusFile other(of_other, {Folder()});
  other.Begin(5, 2, /*rank=*/1);
  EXPECT_EQ(Written().process.pid, Example().process.pid);
  other.End(absl::AbortedError("rank 1 fails"));
  EXPECT_EQ(Written().process.pid, Example().process.pid);
  EXPECT_EQ(Written().error, "rank 1 fails");
  EXPECT_EQ(Written().exit_code, 7);
  StatusFile third(of_other, {Folder()});
  third.Begin(5, 2, /*rank=*/2);
  third.End(absl::AbortedError("an echo"));
  EXPECT_EQ(Written().error, "rank 1 fails");
}

TEST_F(StatusFileTest, StatesOfEnds) {
  const auto state_after = [&](const absl::Status& status) {
    StatusFile file(Example(), {Folder()});
    file.Begin(0, 1, 0);
    file.End(status);
    return Written().state;
  };
  EXPECT_EQ(state_after(absl::OkStatus()), RunState::kComplete);
  EXPECT_EQ(state_after(WithExitCode(absl::CancelledError("asked"), ExitCode::kStopped)),
            RunState::kStopped);
  EXPECT_EQ(state_after(absl::DataLossError("NaN")), RunState::kFailed);
}

TEST_F(StatusFileTest, AFolderThatTakesNoFileIsOneWarning) {
  std::filesystem::create_directory(Path("status.json"));
  ::testing::internal::CaptureStderr();
  StatusFile file(Example(), {Folder()});
  file.Begin(0, 1, 0);
  file.End(absl::OkStatus());
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              ::testing::MatchesRegex("moe train: warning: cannot write '[^\n]*status.json'[^\n]*"
                                      ": moe status does not see this run\n"));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(root_), {}), 1);
}

Condition ConditionOf(const RunStatus& status, Sign sign, absl::Duration age,
                      std::optional<absl::Duration> limit = std::nullopt) {
  return ViewOf("run", status, sign, {}, limit, status.updated + age).condition;
}

TEST(RunView, SilenceBecomesStalledAndAnEndedProcessLost) {
  RunStatus status = Example();
  EXPECT_EQ(ConditionOf(status, Sign::kRuns, absl::Seconds(119)), Condition::kRunning);
  EXPECT_EQ(ConditionOf(status, Sign::kRuns, absl::Seconds(121)), Condition::kStalled);
  EXPECT_EQ(ConditionOf(status, Sign::kNone, absl::Seconds(121)), Condition::kStalled);
  EXPECT_EQ(ConditionOf(status, Sign::kEnded, absl::Seconds(0)), Condition::kLost);
  EXPECT_EQ(ConditionOf(status, Sign::kRuns, absl::Seconds(6), absl::Seconds(5)),
            Condition::kStalled);
  status.step_ms = 60e3;
  EXPECT_EQ(ConditionOf(status, Sign::kRuns, absl::Seconds(599)), Condition::kRunning);
  EXPECT_EQ(ConditionOf(status, Sign::kRuns, absl::Seconds(601)), Condition::kStalled);
  // A clock that is behind that of the run's host.
  EXPECT_EQ(ConditionOf(status, Sign::kNone, -absl::Hours(1)), Condition::kRunning);
  status.state = RunState::kComplete;
  EXPECT_EQ(ConditionOf(status, Sign::kEnded, absl::Hours(99)), Condition::kComplete);
}

TEST(RunView, TimeLeftIsOfARunThatGoesOn) {
  RunStatus status = Example();
  EXPECT_EQ(ViewOf("run", status, Sign::kRuns, {}, {}, status.updated).eta,
            absl::Milliseconds(13 * 40));
  EXPECT_EQ(ViewOf("run", status, Sign::kEnded, {}, {}, status.updated).eta,
            absl::InfiniteDuration());
  status.step_ms = 0;  // before the first step
  EXPECT_EQ(ViewOf("run", status, Sign::kRuns, {}, {}, status.updated).eta,
            absl::InfiniteDuration());
}

TEST(RunView, ThisProcessRunsAndAnotherOfItsNumberHasEnded) {
  LockHolder me = ThisRun();
  EXPECT_EQ(SignOf(me), Sign::kRuns);
  ++me.process_start;
  EXPECT_EQ(SignOf(me), Sign::kEnded);
  ++me.host_id;
  EXPECT_EQ(SignOf(me), Sign::kNone);
}

}  // namespace
}  // namespace moe::cli
