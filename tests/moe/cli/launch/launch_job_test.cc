// Hosts, lines of launchers and restarts of moe launch.
#include <algorithm>
#include <csignal>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <absl/strings/str_join.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moe/cli/launch/engine.h"
#include "moe/cli/launch/hosts.h"
#include "moe/cli/launch/process.h"
#include "moe/cli/launch/restarts.h"

namespace moe::launch {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Hosts, ReadsTheFormsOfBothMpis) {
  const auto hosts = ParseHosts(
      "# two racks\nnode1 slots=8 max_slots=16\n\n  node2:4  # by Hydra\nnode3\r\nfe80-x slots=1");
  ASSERT_TRUE(hosts.ok()) << hosts.status();
  EXPECT_THAT(*hosts,
              ElementsAre(Host{"node1", 8}, Host{"node2", 4}, Host{"node3", 0}, Host{"fe80-x", 1}));
}

TEST(Hosts, NamesTheLineThatIsWrong) {
  const struct {
    const char* text;
    const char* message;
  } cases[] = {{"a\na:2", "line 2: 'a' is there already"},
               {"a\n\nb slots=0", "line 3: slots are '0'"},
               {"a:", "line 1: slots are ''"},
               {"a:99999999999", "line 1: slots are '99999999999'"},
               {"a slot=2", "line 1: 'slot=2'"},
               {"-oProxyCommand=x", "line 1: '-oProxyCommand=x'"},
               {":4", "line 1: ':4'"},
               {"a,b:2", "line 1: 'a,b:2'"},
               {"n[1-4] slots=2", "line 1: 'n[1-4] slots=2'"},
               {"a:65537", "line 1: slots are '65537'"},
               {"# nobody\n", "no host"}};
  for (const auto& c : cases) {
    const auto hosts = ParseHosts(c.text);
    ASSERT_FALSE(hosts.ok()) << c.text;
    EXPECT_EQ(hosts.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(hosts.status().message()), HasSubstr(c.message));
  }
}

TEST(Hosts, AnswerWhereTheProbeDoes) {
  // The probe is a script whose first operand is the host's name.
  const std::vector<Host> hosts = {{"up", 1}, {"down", 1}, {"hangs", 1}, {"localhost", 1}};
  std::vector<std::string> silent;
  const std::vector<std::string> probe = {
      "sh", "-c", "case $0 in up) exit 0 ;; down) exit 3 ;; *) sleep 9 ;; esac"};
  EXPECT_THAT(HostsThatAnswer(hosts, probe, 1, silent), ElementsAre(hosts[0], hosts[3]));
  EXPECT_THAT(silent, ElementsAre("down", "hangs"));
}

std::string LineOf(const Job& job) {
  return absl::StrJoin(CommandLine(job), " ");
}

TEST(Engine, ComposesTheLineOfEachLauncher) {
  Job job{.program = "/usr/bin/mpirun", .ranks_per_node = 2, .command = {"moe", "train"}};
  EXPECT_EQ(LineOf(job), "/usr/bin/mpirun --host localhost:2 -n 2 --bind-to none moe train");
  job.hosts = {{"a", 8}, {"b", 4}};
  job.remote_shell = "/opt/rsh";
  job.variables = {"MOE_SEED"};
  EXPECT_EQ(LineOf(job),
            "/usr/bin/mpirun --host a:8,b:4 -n 12 --bind-to none --mca plm_rsh_agent /opt/rsh "
            "-x MOE_SEED moe train");
  job.engine = Engine::kHydra;
  job.program = "mpiexec";
  EXPECT_EQ(LineOf(job),
            "mpiexec -hosts a:8,b:4 -n 12 -launcher ssh -launcher-exec /opt/rsh moe train");
  job.engine = Engine::kSrun;
  job.program = "srun";
  job.pmi = "pmix";
  job.hosts.clear();
  EXPECT_EQ(LineOf(job), "srun --ntasks-per-node=2 --mpi=pmix moe train");
  job.ranks_per_node = 0;
  EXPECT_EQ(LineOf(job), "srun --mpi=pmix moe train");
  job.engine = Engine::kTorchrun;
  job.program = "torchrun";
  job.ranks_per_node = 8;
  EXPECT_EQ(LineOf(job), "torchrun --standalone --no-python --nproc-per-node=8 moe train");
  job.engine = Engine::kLocal;
  EXPECT_EQ(LineOf(job), "moe train");
}

TEST(Engine, IsThatOfTheLinkedMpi) {
  EXPECT_EQ(*EngineFor("auto", {.linked_mpi = "openmpi"}), Engine::kMpirun);
  EXPECT_EQ(*EngineFor("auto", {.linked_mpi = "mpich"}), Engine::kHydra);
  EXPECT_EQ(*EngineFor("auto", {.linked_mpi = "mpich", .in_allocation = true}), Engine::kSrun);
  EXPECT_EQ(*EngineFor("auto", {.linked_mpi = "", .in_allocation = true}), Engine::kLocal);
  EXPECT_EQ(*EngineFor("auto", {.linked_mpi = "", .has_nccl = true}), Engine::kTorchrun);
  EXPECT_EQ(*EngineFor("local", {.linked_mpi = "mpich"}), Engine::kLocal);
  const auto other = EngineFor("hydra", {.linked_mpi = "openmpi"});
  EXPECT_EQ(other.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(other.status().message()), HasSubstr("--engine mpirun"));
  for (const char* word : {"mpirun", "hydra", "srun"}) {
    EXPECT_EQ(EngineFor(word, {.linked_mpi = ""}).status().code(),
              absl::StatusCode::kUnimplemented);
  }
}

TEST(Restarts, FollowTheExitCode) {
  for (const int code : {0, 1, 2, 3, 6, 9, 10, 11, 126, 127}) {
    EXPECT_FALSE(Restarts({}, -1).After({.code = code}).again) << code;
  }
  for (const int code : {4, 5, 7, 8, 134, 137, 143, 205, 255}) {
    EXPECT_TRUE(Restarts({}, -1).After({.code = code}).again) << code;
  }
  EXPECT_TRUE(Restarts({.after_stop = true}, -1).After({.code = 11}).again);
  EXPECT_FALSE(Restarts({.most = 0}, -1).After({.code = 7}).again);
  EXPECT_TRUE(Restarts({.nine_is_loss = true}, -1).After({.code = 9}).again);
}

TEST(Restarts, EndAfterTwoWithoutANewerCheckpoint) {
  Restarts restarts({}, 100);
  EXPECT_TRUE(restarts.After({.code = 7, .newest = 100}).again);  // the first start: no restart
  EXPECT_TRUE(restarts.After({.code = 7, .newest = 100}).again);
  EXPECT_TRUE(restarts.After({.code = 7, .newest = 120}).again);
  EXPECT_TRUE(restarts.After({.code = 7, .newest = 120}).again);
  EXPECT_FALSE(restarts.After({.code = 7, .newest = 120}).again);
}

TEST(Restarts, OfARequeuedJobGoOnCounting) {
  // The second start of a job that left a checkpoint in neither.
  Restarts third({.already = 2, .note = {.barren = 1}}, 100);
  EXPECT_FALSE(third.After({.code = 7, .newest = 100}).again);
  EXPECT_EQ(third.note().barren, 2);
  Restarts second({.already = 1}, 100);
  EXPECT_TRUE(second.After({.code = 7, .newest = 100}).again);
  EXPECT_EQ(second.note().barren, 1);
  EXPECT_TRUE(
      Restarts({.already = 2, .note = {.barren = 1}}, 100).After({.code = 7, .newest = 120}).again);

  const std::string folder = ::testing::TempDir();
  const RequeueNote note = {.barren = 1, .lacked_memory = true};
  ASSERT_TRUE(WriteRequeueNote(folder, "17", 100, note).ok());
  EXPECT_EQ(ReadRequeueNote(folder, "17", 100), note);
  EXPECT_EQ(ReadRequeueNote(folder, "17", 120), (RequeueNote{.lacked_memory = true}));
  EXPECT_EQ(ReadRequeueNote(folder, "18", 100), RequeueNote{});
  EXPECT_EQ(ReadRequeueNote(folder + "/none", "17", 100), RequeueNote{});
}

TEST(CodeOfRun, IsWhatTheRunItselfHasLeft) {
  const auto left = [](cli::RunState state, int code = 0) {
    return std::optional(cli::RunStatus{.state = state, .exit_code = code});
  };
  const auto lost = left(cli::RunState::kRunning);
  const struct {
    Engine engine;
    int launcher;
    std::optional<cli::RunStatus> status;
    int code;
  } cases[] = {
      {Engine::kHydra, 11, lost, 7},  // a segmentation fault
      {Engine::kHydra, 11, left(cli::RunState::kStopped, 11), 11},
      {Engine::kHydra, 0, left(cli::RunState::kStopped, 11), 11},
      {Engine::kHydra, 15, lost, 7},  // an abort, and SIGKILL for the others
      {Engine::kHydra, 15, left(cli::RunState::kFailed, 6), 6},
      {Engine::kHydra, 0, left(cli::RunState::kComplete), 0},
      {Engine::kHydra, 11, left(cli::RunState::kComplete), 0},  // a fault at the end of MPI
      {Engine::kHydra, 0, lost, 7},
      {Engine::kHydra, 11, std::nullopt, 7},
      {Engine::kHydra, 6, std::nullopt, 7},
      {Engine::kHydra, 9, std::nullopt, 7},
      {Engine::kHydra, 2, std::nullopt, 2},
      {Engine::kHydra, 0, std::nullopt, 0},
      {Engine::kTorchrun, 1, lost, 7},
      {Engine::kTorchrun, 1, left(cli::RunState::kFailed, 8), 8},
      {Engine::kTorchrun, 1, std::nullopt, 1},  // no GPU: 10, which torchrun does not pass on
      {Engine::kMpirun, 11, std::nullopt, 11},
      {Engine::kMpirun, 139, lost, 139},
      {Engine::kMpirun, 8, left(cli::RunState::kComplete), 0},  // ended after its ranks
      {Engine::kSrun, 143, left(cli::RunState::kFailed, 6), 6},
  };
  for (const auto& c : cases) {
    EXPECT_EQ(CodeOfRun(c.launcher, c.engine, c.status), c.code)
        << NameOf(c.engine, kEngineWords) << " " << c.launcher;
  }
}

TEST(Restarts, LackOfMemoryIsWorthOne) {
  Restarts restarts({}, -1);
  EXPECT_TRUE(restarts.After({.code = 5, .newest = 1}).again);
  EXPECT_TRUE(restarts.After({.code = 7, .newest = 2}).again);
  EXPECT_FALSE(restarts.After({.code = 5, .newest = 3}).again);
  Restarts requeued({.already = 1, .note = restarts.note()}, 2);
  EXPECT_FALSE(requeued.After({.code = 5, .newest = 3}).again);
}

TEST(Restarts, PauseGrowsWithTheCountAndHoursOfProgressLowerIt) {
  Restarts restarts({.most = 12, .first_pause = absl::Seconds(1)}, -1);
  int64_t newest = 0;
  for (const int seconds : {1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300}) {
    EXPECT_EQ(restarts.After({.code = 7, .newest = ++newest}).pause, absl::Seconds(seconds));
  }
  EXPECT_EQ(restarts.count(), 11);
  const auto later = restarts.After({.code = 7, .ran = absl::Minutes(630), .newest = ++newest});
  EXPECT_EQ(later.pause, absl::Seconds(2));
  EXPECT_EQ(restarts.count(), 2);
  // Hours that left nothing take nothing.
  restarts.After({.code = 7, .ran = absl::Hours(10), .newest = newest});
  EXPECT_EQ(restarts.count(), 3);
}

TEST(Process, EndsAsShellsHaveIt) {
  const struct {
    std::vector<std::string> argv;
    int code;
  } cases[] = {{{"sh", "-c", "exit 3"}, 3},
               {{"sh", "-c", "kill -9 $$"}, 137},
               {{"/there/is/no/such/program"}, 127}};
  for (const auto& c : cases) {
    auto process = Process::Start(c.argv, Process::Output::kNone);
    EXPECT_EQ(process.WaitUntil(absl::Now() + absl::Seconds(60)), c.code);
    EXPECT_FALSE(process.started());
    auto other = Process::Start(std::vector<std::string>{"true"}, Process::Output::kNone);
    EXPECT_EQ(process.WaitUntil(absl::InfiniteFuture()), 127);  // takes no other's end
    EXPECT_EQ(other.WaitUntil(absl::Now() + absl::Seconds(60)), 0);
  }
}

TEST(Process, LooksAmongProcessesThatEndMeanwhile) {
  auto process = Process::Start(
      std::vector<std::string>{"sh", "-c",
                               "i=0; while [ $i -lt 3000 ]; do (:) & i=$((i + 1)); done; wait"},
      Process::Output::kNone);
  while (!process.Ended().has_value()) DescendantsOf(process.id());
}

TEST(Process, FindsRanksByTheirVariableAndHandlers) {
  auto process = Process::Start(
      std::vector<std::string>{
          "sh", "-c",
          "A_RANK=0 sleep 60 & (A_RANK=1 sh -c 'trap : USR1; sleep 60 & wait') "
          "& A_RAN=2 sleep 60"},
      Process::Output::kNone);
  std::vector<pid_t> ranks;
  std::ptrdiff_t catching = 0;
  for (int i = 0; i < 3000 && (ranks.size() < 3 || catching == 0); ++i) {
    ranks = DescendantsWith("A_RANK", process.id());
    catching = std::count_if(ranks.begin(), ranks.end(),
                             [](pid_t rank) { return Catches(rank, SIGUSR1); });
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_EQ(ranks.size(), 3u);  // with the child of the second
  EXPECT_EQ(catching, 1);
  EXPECT_THAT(DescendantsWith("RANK", process.id()), ElementsAre());
  process.KillGroup();
  EXPECT_EQ(process.WaitUntil(absl::Now() + absl::Seconds(60)), 137);
}

}  // namespace
}  // namespace moe::launch
