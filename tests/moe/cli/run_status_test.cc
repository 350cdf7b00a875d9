// status.json, and what moe status concludes from it.
#include "moe/cli/base/run_status.h"

#include <cstdint>
#include <filesystem>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <absl/time/clock.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "moe/cli/base/command.h"
#include "moe/cli/base/exit_code.h"
#include "moe/cli/status/run_view.h"
#include "tests/moe/checkpoint/faulty_files.h"
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

TEST(RunStatus, NumbersOutOfRangeAreNamed) {
  RunStatus ended = Example();
  ended.state = RunState::kFailed;
  const Json whole = Json::parse(StatusText(ended));
  const std::pair<const char*, Json> rows[] = {{"ranks", int64_t{1} << 40},
                                               {"ranks", 0},
                                               {"hosts", -1},
                                               {"hosts", (int64_t{1} << 32) + 1},
                                               {"exit_code", (int64_t{1} << 32) + 1},
                                               {"exit_code", -1},
                                               {"step", -1},
                                               {"first_step", -1},
                                               {"steps", std::numeric_limits<uint64_t>::max()},
                                               {"step_ms", -1},
                                               {"step_ms", 1e300},
                                               {"tokens_per_s", 1e300},
                                               {"updated", "infinite-future"}};
  for (const auto& [key, value] : rows) {
    Json wrong = whole;
    wrong[key] = value;
    EXPECT_THAT(std::string(ParseStatus(wrong.dump()).status().message()),
                HasSubstr(std::string("'") + key + "'"))
        << value;
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
  // Waits until the thread that writes has done so.
  bool Becomes(RunState state) const {
    for (int i = 0; i < 1000; ++i, absl::SleepFor(absl::Milliseconds(10))) {
      const auto status = ParseStatus(Read(Path("status.json")));
      if (status.ok() && status->state == state) return true;
    }
    return false;
  }
};

TEST_F(StatusFileTest, ARunThatDoesNotBeginLeavesTheStatusOfTheOneBefore) {
  Write("status.json", "before");
  StatusFile(Example(), {Folder()}).End(absl::InvalidArgumentError("refused"));
  EXPECT_EQ(Read(Path("status.json")), "before");
}

TEST_F(StatusFileTest, TheFirstEndStays) {
  StatusFile file(Example(), {Folder(), "", Folder() + "/."});
  file.Begin(/*first_step=*/5, /*hosts=*/3, /*rank=*/0);
  ASSERT_TRUE(Becomes(RunState::kRunning));
  EXPECT_EQ(Written().hosts, 3);
  EXPECT_EQ(Written().step, 5);
  file.Show({.step = 9, .loss = 2});  // less than a second after the last
  EXPECT_EQ(Written().step, 5);
  file.End(absl::DeadlineExceededError("rank 1 waits"));
  file.End(absl::AbortedError("an echo"));
  file.Show({.step = 10, .loss = 1});
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
  ASSERT_TRUE(Becomes(RunState::kRunning));
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
  zero.Show({.step = 9});
  zero.End(absl::AbortedError("an echo"));
  EXPECT_EQ(Written().error, "rank 1 fails");
  EXPECT_EQ(NumFiles(), 1);
}

TEST_F(StatusFileTest, ADiskThatHangsDelaysNeitherStepsNorTheEnd) {
  // Never destroyed: the thread may still be in a call.
  static auto* const files = new ::moe::testing::FaultyFiles("", ::moe::testing::Fault::kHang, 1);
  const absl::Time begin = absl::Now();
  {
    StatusFile file(Example(), {Folder()}, *files);
    file.Begin(5, 1, /*rank=*/0);
    for (int step = 6; step < 100; ++step) file.Show({.step = step});
    EXPECT_LT(absl::Now() - begin, StatusFile::kLongestEnd);
    file.End(absl::DataLossError("NaN"));
  }
  // No wait for the disk, which has no end, with time for a busy machine.
  EXPECT_LT(absl::Now() - begin, 10 * StatusFile::kLongestEnd);
  files->Mend();
  EXPECT_TRUE(Becomes(RunState::kFailed));
  EXPECT_EQ(Written().step, 99);
}

TEST_F(StatusFileTest, UnfinishedFilesOfKilledProcessesGo) {
  Write("status.json.0123456789abcdef", "{");
  Write("status.json.bak", "the user's");
  StatusFile file(Example(), {Folder()});
  file.Begin(0, 1, /*rank=*/0);
  file.End(absl::OkStatus());
  EXPECT_FALSE(std::filesystem::exists(Path("status.json.0123456789abcdef")));
  EXPECT_EQ(Read(Path("status.json.bak")), "the user's");
  EXPECT_EQ(NumFiles(), 2);
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

class StatusCommandTest : public IoTest {
 protected:
  void PutRun(const std::string& name, const RunStatus& status) const {
    std::filesystem::create_directory(Path(name));
    Write(name + "/status.json", StatusText(status));
  }
  // Runs the command; sets out_.
  ExitCode Status(std::vector<std::string> args) {
    ::testing::internal::CaptureStdout();
    ::testing::internal::CaptureStderr();
    const ExitCode code = StatusCommand({.program = "moe", .args = std::move(args)});
    out_ = ::testing::internal::GetCapturedStdout();
    (void)::testing::internal::GetCapturedStderr();
    return code;
  }

  std::string out_;
};

TEST_F(StatusCommandTest, AFolderWithoutARunIsARowBesideThoseOfOthers) {
  RunStatus status = Example();
  status.state = RunState::kComplete;
  PutRun("a", status);
  status.state = RunState::kStopped;
  PutRun("c", status);
  std::filesystem::create_directory(Path("b"));
  EXPECT_EQ(Status({Path("a"), Path("b"), Path("c"), "-o", "json"}), ExitCode::kUsage);
  const Json rows = Json::parse(out_);
  ASSERT_EQ(rows.size(), 3);
  EXPECT_EQ(rows[0]["state"], "complete");
  EXPECT_EQ(rows[1]["state"], "none");
  EXPECT_EQ(rows[1]["run"], Path("b"));
  EXPECT_THAT(rows[1]["error"].get<std::string>(), HasSubstr("has no status.json"));
  EXPECT_TRUE(rows[1]["step"].is_null());
  EXPECT_TRUE(rows[1]["user"].is_null());
  EXPECT_EQ(rows[2]["state"], "stopped");
  status.state = RunState::kFailed;
  PutRun("b", status);
  Write("c/status.json", "{");
  EXPECT_EQ(Status({Path("a"), Path("c")}), ExitCode::kBadInput);
  EXPECT_THAT(out_, HasSubstr("c: none: "));
  EXPECT_EQ(Status({Path("c"), Path("b")}), ExitCode::kCheckFailed);
  EXPECT_EQ(Status({Path("c")}), ExitCode::kBadInput);
  EXPECT_EQ(out_, "");
}

TEST_F(StatusCommandTest, NoTextOfTheFileControlsTheTerminal) {
  RunStatus status = Example();
  status.state = RunState::kFailed;
  const std::string evil = "x\x1b[2J\ny";
  status.user = status.backend = status.save = status.command = status.error = evil;
  status.process.host = status.process.since = evil;
  PutRun("a", status);
  EXPECT_EQ(Status({Path("a")}), ExitCode::kCheckFailed);
  EXPECT_EQ(out_.find('\x1b'), out_.npos) << out_;
  EXPECT_EQ(out_.find("\ny"), out_.npos) << out_;
  EXPECT_THAT(out_, HasSubstr("by x\\x1b[2J y since"));
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
