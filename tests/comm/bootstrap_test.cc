// comm/bootstrap.h and comm/create.h: who started us, where ranks run, how failures come together.
#include "comm/bootstrap.h"

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <absl/strings/cord.h>
#include <absl/strings/str_cat.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "comm/create.h"
#include "comm/descriptor.h"
#include "comm/mpi/mpi_world.h"
#include "comm/patience.h"
#include "kernels/base/status_macros.h"

#ifdef __SANITIZE_THREAD__
// Threads that do not return are what some tests here are about.
extern "C" const char* __tsan_default_options() {
  return "report_thread_leaks=0";
}
#endif

namespace moe {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Variables = std::map<std::string, std::string>;

absl::StatusOr<LaunchInfo> Detect(const Variables& variables, const LaunchFlags& flags = {}) {
  return DetectLaunch(flags, [&](const char* name) -> const char* {
    const auto at = variables.find(name);
    return at == variables.end() ? nullptr : at->second.c_str();
  });
}

const Variables kTorchrun = {{"RANK", "2"},
                             {"WORLD_SIZE", "4"},
                             {"LOCAL_RANK", "0"},
                             {"MASTER_ADDR", "node7"},
                             {"MASTER_PORT", "29500"}};
// A step of srun --mpi=pmix; without PMIX_* one of srun alone.
const Variables kStep = {{"SLURM_STEP_ID", "0"},
                         {"SLURM_PROCID", "1"},
                         {"SLURM_NTASKS", "4"},
                         {"SLURM_LOCALID", "1"},
                         {"SLURM_TASK_PID", "77"}};
const Variables kStepPmix = {{"PMIX_RANK", "1"}, {"PMIX_NAMESPACE", "slurm.pmix.9.0"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "3"},
                            {"OMPI_COMM_WORLD_SIZE", "8"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};

Variables With(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

void ExpectRefused(const Variables& variables, const char* one, const char* other) {
  const absl::Status status = Detect(variables).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(one), HasSubstr(other)));
}

TEST(DetectLaunchTest, ReadsWhatEachLauncherSets) {
  const Variables batch = {
      {"SLURM_JOB_ID", "9"}, {"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"SLURM_LOCALID", "1"}};
  const Variables of_one =
      With(batch, {{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}});
  const std::pair<Variables, LaunchInfo> cases[] = {
      {{{"HOME", "/root"}, {"RANK", ""}}, {}},
      {kTorchrun,
       {.source = LaunchSource::kTorchrun,
        .rank = 2,
        .size = 4,
        .address = "node7",
        .port = 29500}},
      {kOpenMpi,
       {.source = LaunchSource::kOpenMpi, .rank = 3, .size = 8, .local_rank = 1, .local_size = 2}},
      {{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}},
       {.source = LaunchSource::kPmi, .rank = 1, .size = 2, .local_rank = 1}},
      {{{"PMIX_RANK", "5"}}, {.source = LaunchSource::kPmix, .rank = 5, .size = 0}},  // MPI knows
      // Of another launcher than srun the tasks are its daemons.
      {With(kStep, {{"PMIX_RANK", "5"}, {"PMIX_NAMESPACE", "prterun-host-9@1"}}),
       {.source = LaunchSource::kPmix, .rank = 5, .size = 0}},
      {With(kStep, kStepPmix),
       {.source = LaunchSource::kPmix, .rank = 1, .size = 4, .local_rank = 1}},
      {With(batch, {{"SLURM_STEP_ID", "0"}}),
       {.source = LaunchSource::kSlurm, .rank = 1, .size = 2, .local_rank = 1}},
      {batch, {}},  // in no step
      {of_one, {}},
      {With(With(of_one, kStepPmix), {{"PMIX_RANK", "0"}}), {}}};
  for (const auto& [variables, want] : cases) {
    const LaunchInfo info = Detect(variables).value();
    const auto all = [](const LaunchInfo& i) {
      return std::tie(i.source, i.rank, i.size, i.local_rank, i.local_size, i.address, i.port);
    };
    EXPECT_TRUE(all(info) == all(want)) << NameOf(want.source);
  }
}

TEST(DetectLaunchTest, TheFirstCompleteSetWins) {
  const Variables slurm = {{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}};
  // mpirun inside a Slurm step: its daemons are the step's tasks, its ranks are not.
  EXPECT_EQ(Detect(With(kOpenMpi, slurm)).value().source, LaunchSource::kOpenMpi);
  EXPECT_EQ(Detect(With(kOpenMpi, kStepPmix)).value().source, LaunchSource::kOpenMpi);
  // torchrun inside a step says so; variables that a script exported do not.
  const Variables elastic = With(kTorchrun, {{"TORCHELASTIC_RUN_ID", "none"}});
  for (const Variables& step : {kStep, With(kStep, kStepPmix)}) {
    EXPECT_EQ(Detect(With(elastic, step)).value().source, LaunchSource::kTorchrun);
    const Variables agrees = With(With(kTorchrun, step), {{"RANK", "1"}});
    EXPECT_EQ(Detect(agrees).value().source, Detect(step).value().source);
  }
  EXPECT_EQ(Detect(With(kOpenMpi, {{"PMIX_RANK", "3"}})).value().source, LaunchSource::kOpenMpi);
  const LaunchInfo info = Detect(kOpenMpi, {.rank = 1, .size = 2}).value();
  EXPECT_EQ(info.source, LaunchSource::kFlags);
  EXPECT_EQ(info.rank, 1);
  // What agrees leaves the MPI launcher.
  const Variables same = With(kOpenMpi, {{"RANK", "3"},
                                         {"WORLD_SIZE", "8"},
                                         {"LOCAL_RANK", "1"},
                                         {"MASTER_ADDR", "a"},
                                         {"MASTER_PORT", "1"}});
  EXPECT_EQ(Detect(same).value().source, LaunchSource::kOpenMpi);
}

// What pods and shells of other programs have.
TEST(DetectLaunchTest, APartialSetIsAWarningAndNoLaunch) {
  const std::pair<Variables, const char*> cases[] = {
      {{{"WORLD_SIZE", "4"}, {"RANK", "0"}, {"MASTER_ADDR", "job-0"}},
       "RANK, WORLD_SIZE, MASTER_ADDR are set without LOCAL_RANK, MASTER_PORT,"},
      {{{"WORLD_SIZE", "2"}}, "WORLD_SIZE is set without RANK, LOCAL_RANK,"},
      {{{"RANK", "an"}}, "RANK is set without WORLD_SIZE,"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}},
       "RANK, WORLD_SIZE, LOCAL_RANK are set without MASTER_ADDR, MASTER_PORT,"},
      {{{"OMPI_COMM_WORLD_SIZE", "2"}},
       "OMPI_COMM_WORLD_SIZE is set without OMPI_COMM_WORLD_RANK,"},
      {{{"PMI_RANK", "2"}}, "PMI_RANK is set without PMI_SIZE,"},
      {{{"SLURM_STEP_ID", "1"}, {"SLURM_PROCID", "2"}},
       "SLURM_PROCID is set without SLURM_NTASKS,"}};
  for (const auto& [variables, warning] : cases) {
    const LaunchInfo alone = Detect(variables).value();
    EXPECT_EQ(alone.source, LaunchSource::kNone) << warning;
    EXPECT_THAT(alone.warnings, ElementsAre(HasSubstr(warning)));
    if (variables.count("OMPI_COMM_WORLD_SIZE") > 0) continue;
    const LaunchInfo beside = Detect(With(kOpenMpi, variables)).value();  // a whole set
    EXPECT_EQ(beside.rank, 3) << warning;
    EXPECT_THAT(beside.warnings, ElementsAre(HasSubstr(warning)));
  }
  EXPECT_THAT(Detect(kOpenMpi).value().warnings, IsEmpty());
  EXPECT_THAT(std::string(Detect({}, {.rank = 0}).status().message()),
              AllOf(HasSubstr("--rank"), HasSubstr("--world-size")));
}

TEST(DetectLaunchTest, AStepWithoutPmiIsAWarning) {
  const LaunchInfo info = Detect(kStep).value();
  EXPECT_EQ(info.source, LaunchSource::kSlurm);
  EXPECT_THAT(info.warnings, ElementsAre(AllOf(HasSubstr("SLURM_PROCID"), HasSubstr("4 tasks"))));
  EXPECT_THAT(Detect(With(kStep, kStepPmix)).value().warnings, IsEmpty());
}

// Variables that were exported by hand are no launcher that has started the other ranks.
TEST(DetectLaunchTest, ALaunchersOwnVariablesTellThatItRuns) {
  const Variables pmi = {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}};
  for (const Variables& by_hand : {kTorchrun, kOpenMpi, pmi}) {
    EXPECT_FALSE(Detect(by_hand).value().launcher_runs);
  }
  EXPECT_TRUE(Detect(With(kTorchrun, {{"TORCHELASTIC_RUN_ID", "9"}})).value().launcher_runs);
  EXPECT_TRUE(Detect(With(kOpenMpi, {{"PMIX_NAMESPACE", "9"}})).value().launcher_runs);
  EXPECT_TRUE(Detect(With(pmi, {{"PMI_FD", "6"}})).value().launcher_runs);
  EXPECT_TRUE(Detect(kStep).value().launcher_runs);
}

TEST(DetectLaunchTest, AContradictingSetNamesBothVariables) {
  ExpectRefused(With(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "8"}}), "OMPI_COMM_WORLD_RANK is 8",
                "OMPI_COMM_WORLD_SIZE is 8");
  ExpectRefused(With(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "8"}}), "or unset OMPI_COMM_WORLD_RANK",
                "OMPI_COMM_WORLD_SIZE");
  ExpectRefused(With(kTorchrun, kOpenMpi), "WORLD_SIZE is 4", "OMPI_COMM_WORLD_SIZE is 8");
  ExpectRefused(With(kTorchrun, kOpenMpi), "unset RANK WORLD_SIZE, or OMPI_COMM_WORLD_RANK", "");
  ExpectRefused(With(kTorchrun, {{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}}), "RANK is 2",
                "PMI_RANK is 1");
  ExpectRefused(With(kTorchrun, kStep), "RANK is 2", "SLURM_PROCID is 1");
  ExpectRefused(With(kTorchrun, {{"PMIX_RANK", "0"}}), "RANK is 2", "PMIX_RANK is 0");
}

TEST(DetectLaunchTest, ValuesThatAreNoNumbersAreRefused) {
  for (const char* bad : {"x", "-1", "1.5", "99999999999"}) {
    ExpectRefused({{"PMI_RANK", bad}, {"PMI_SIZE", "4"}}, "PMI_RANK is", bad);
  }
  ExpectRefused({{"PMI_RANK", "0"}, {"PMI_SIZE", "0"}}, "PMI_SIZE is '0'", "integer >= 1");
}

TEST(CheckMpiSizeTest, AWorldOfOneBelowALauncherIsTheOtherMpi) {
  const LaunchInfo open_mpi = {.source = LaunchSource::kOpenMpi, .rank = 1, .size = 4};
  EXPECT_TRUE(CheckMpiSize(open_mpi, "openmpi", 4).ok());
  const absl::Status status = CheckMpiSize(open_mpi, "mpich", 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("launch of 4 ranks, MPI sees 1"), HasSubstr("mpiexec.mpich")));
  const LaunchInfo pmi = {.source = LaunchSource::kPmi, .size = 2};
  EXPECT_THAT(std::string(CheckMpiSize(pmi, "openmpi", 1).message()), HasSubstr("mpiexec.openmpi"));
  const LaunchInfo step = {.source = LaunchSource::kSlurm, .size = 4};
  EXPECT_THAT(std::string(CheckMpiSize(step, "openmpi", 1).message()),
              AllOf(HasSubstr("SLURM_PROCID belongs to"), HasSubstr("srun --mpi=list")));
  EXPECT_TRUE(CheckMpiSize({}, "mpich", 1).ok());
  EXPECT_TRUE(CheckMpiSize({.source = LaunchSource::kPmix, .size = 0}, "openmpi", 3).ok());
}

TEST(PlanWorldTest, WithoutALauncherRanksAreThreads) {
  const WorldPlan plan = PlanWorld({}, {}).value();
  EXPECT_EQ(plan.backend, Backend::kLocal);
  EXPECT_EQ(plan.ranks, 4);
  EXPECT_EQ(PlanWorld({.ranks = 7}, {}).value().ranks, 7);
}

TEST(PlanWorldTest, UnderALauncherTheEnvironmentDecides) {
  const LaunchInfo launch = {.source = LaunchSource::kOpenMpi, .rank = 1, .size = 2};
  const auto plan = PlanWorld({}, launch);
  if (HasBackend(Backend::kMpi)) {
    EXPECT_EQ(plan->backend, Backend::kMpi);
    EXPECT_EQ(plan->ranks, 2);
    EXPECT_EQ(plan->launch.rank, 1);
    EXPECT_TRUE(PlanWorld({.ranks = 2}, launch).ok());
  } else {
    EXPECT_EQ(plan.status().code(), absl::StatusCode::kUnimplemented);
  }
  const absl::Status other = PlanWorld({.ranks = 3}, launch).status();
  EXPECT_EQ(other.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(other.message()),
              HasSubstr("or unset OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE, or backend local"));
}

TEST(PlanWorldTest, LocalLooksAtNoLauncher) {
  for (const LaunchSource source : {LaunchSource::kOpenMpi, LaunchSource::kTorchrun}) {
    const LaunchInfo launch = {.source = source, .rank = 1, .size = 2, .warnings = {"half a set"}};
    const WorldPlan plan = PlanWorld({.backend = Backend::kLocal, .ranks = 3}, launch).value();
    EXPECT_EQ(plan.ranks, 3);
    EXPECT_EQ(plan.rank(), 0);
    EXPECT_EQ(plan.launch.source, LaunchSource::kNone);
    EXPECT_THAT(plan.launch.warnings, IsEmpty());
  }
}

TEST(PlanWorldTest, ALaunchByTorchrunGetsTheMpirunLine) {
  const absl::Status status =
      PlanWorld({}, {.source = LaunchSource::kTorchrun, .rank = 0, .size = 6}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("mpirun -n 6 moe"), HasSubstr("or unset RANK WORLD_SIZE")));
}

TEST(PlanWorldTest, ImpossibleRankCountsAreRefused) {
  EXPECT_EQ(PlanWorld({.ranks = 0}, {}).status().code(), absl::StatusCode::kInvalidArgument);
  const absl::Status alone = PlanWorld({.backend = Backend::kMpi, .ranks = 2}, {}).status();
  EXPECT_EQ(alone.code(), HasBackend(Backend::kMpi) ? absl::StatusCode::kInvalidArgument
                                                    : absl::StatusCode::kUnimplemented);
}

TEST(PlanWorldTest, WhatTheBuildHasNotComesWithTheRemedy) {
  const auto refusal = [](const WorldRequest& request, LaunchSource source) {
    const LaunchInfo launch = {.source = source, .rank = 0, .size = 2};
    const absl::Status status = PlanWorld(request, launch).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
    return std::string(status.message());
  };
  if (!HasBackend(Backend::kNccl)) {
    const WorldRequest nccl = {.backend = Backend::kNccl, .device = DeviceKind::kCuda};
    EXPECT_EQ(refusal(nccl, LaunchSource::kOpenMpi),
              "PlanWorld: backend is nccl, but this build has no NCCL; rebuild where CUDA and "
              "nccl.h are");
  }
  if (HasBackend(Backend::kMpi)) return;
  EXPECT_EQ(refusal({}, LaunchSource::kOpenMpi),
            "PlanWorld: started by mpirun, but this build has no MPI; rebuild with "
            "-DMOE_ENABLE_MPI=ON; or take each process for a job of its own: unset "
            "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE, or backend local");
  EXPECT_THAT(refusal({}, LaunchSource::kSlurm), HasSubstr("started by srun, but"));
  EXPECT_THAT(refusal({.backend = Backend::kMpi}, LaunchSource::kPmi),
              HasSubstr("backend is mpi, but this build has no MPI; rebuild"));
}

TEST(PlanWorldTest, NcclIsOfGpusAndOfTheBuild) {
  const absl::Status on_cpus = PlanWorld({.backend = Backend::kNccl}, {}).status();
  EXPECT_EQ(on_cpus.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(on_cpus.message()), HasSubstr("--device cuda"));
  const WorldRequest request = {.backend = Backend::kNccl, .ranks = 2, .device = DeviceKind::kCuda};
  if (!HasBackend(Backend::kNccl)) {
    EXPECT_EQ(PlanWorld(request, {}).status().code(), absl::StatusCode::kUnimplemented);
    return;
  }
  const WorldPlan threads = PlanWorld(request, {}).value();
  EXPECT_EQ(threads.backend, Backend::kNccl);
  EXPECT_FALSE(threads.processes());
  EXPECT_EQ(threads.rank(), 0);
  const LaunchInfo torchrun = {.source = LaunchSource::kTorchrun, .rank = 1, .size = 2};
  const auto over_tcp = PlanWorld({.device = DeviceKind::kCuda}, torchrun).value();
  EXPECT_EQ(over_tcp.meeting, Meeting::kTcp);
  EXPECT_EQ(over_tcp.rank(), 1);
  EXPECT_EQ(
      PlanWorld({.backend = Backend::kMpi, .device = DeviceKind::kCuda}, torchrun).status().code(),
      absl::StatusCode::kInvalidArgument);
  const LaunchInfo launch = {.source = LaunchSource::kOpenMpi, .rank = 1, .size = 2};
  const auto processes = PlanWorld(request, launch);
  if (!HasBackend(Backend::kMpi)) {
    EXPECT_EQ(processes.status().code(), absl::StatusCode::kUnimplemented);
    return;
  }
  EXPECT_EQ(processes->meeting, Meeting::kMpi);
  EXPECT_EQ(processes->rank(), 1);
}

TEST(PatienceTest, IsOverAfterTheDeadlineWithoutProgress) {
  Patience::Clock::time_point now = {};
  Patience patience(absl::Seconds(1), now);
  const auto after = [&now](int ms) {
    return now += std::chrono::milliseconds(ms);
  };
  for (int i = 0; i < 4; ++i) EXPECT_FALSE(patience.IsOver(false, after(200))) << i;
  EXPECT_EQ(patience.waited(), absl::Milliseconds(800));
  EXPECT_FALSE(patience.IsOver(true, after(400)));  // something came in time
  EXPECT_EQ(patience.waited(), absl::ZeroDuration());
  for (int i = 0; i < 5; ++i) EXPECT_FALSE(patience.IsOver(false, after(200))) << i;
  EXPECT_TRUE(patience.IsOver(false, after(1)));
}

TEST(PatienceTest, AProcessThatStoodStillStartsAgain) {
  Patience::Clock::time_point now = {};
  Patience patience(absl::Seconds(60), now);
  EXPECT_FALSE(patience.IsOver(false, now += std::chrono::seconds(20)));
  EXPECT_FALSE(patience.IsOver(false, now += std::chrono::hours(1)));  // nobody looked: Ctrl-Z
  EXPECT_EQ(patience.waited(), absl::ZeroDuration());
  for (int i = 0; i < 60; ++i) {
    EXPECT_FALSE(patience.IsOver(false, now += std::chrono::seconds(1))) << i;
  }
  EXPECT_TRUE(patience.IsOver(false, now += std::chrono::seconds(1)));
}

TEST(PatienceTest, AShortOrNoDeadlinePassesToo) {
  for (const absl::Duration longest : {absl::ZeroDuration(), absl::Milliseconds(1)}) {
    Patience::Clock::time_point now = {};
    Patience patience(longest, now);
    EXPECT_TRUE(patience.IsOver(false, now += std::chrono::milliseconds(5)));
  }
  Patience::Clock::time_point now = {};
  Patience on_a_busy_machine(absl::Milliseconds(200), now);
  EXPECT_TRUE(on_a_busy_machine.IsOver(false, now += std::chrono::milliseconds(300)));
  Patience for_ever(absl::InfiniteDuration(), now);
  EXPECT_FALSE(for_ever.IsOver(false, now += std::chrono::hours(24)));
}

RunOptions Threads(int ranks) {
  return {.plan = {.ranks = ranks}, .timeout = absl::Seconds(30)};
}

TEST(RunRanksTest, RunsTheBodyOnceOnEveryRank) {
  for (const int ranks : {1, 2, 5}) {
    std::vector<int> runs(ranks, 0);
    std::atomic<int> together{0};
    const absl::Status status = RunRanks(Threads(ranks), [&](std::unique_ptr<Communicator> world) {
      EXPECT_EQ(world->size(), ranks);
      ++runs[world->rank()];
      together += 1;
      MOE_RETURN_IF_ERROR(world->Barrier());
      EXPECT_EQ(together.load(), ranks);
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(runs, std::vector<int>(ranks, 1));
  }
}

TEST(RunRanksTest, TheRootCauseComesOutNotItsEchoes) {
  for (int culprit = 0; culprit < 4; ++culprit) {
    const absl::Status status =
        RunRanks(Threads(4), [&](std::unique_ptr<Communicator> world) -> absl::Status {
          if (world->rank() == culprit) {
            absl::Status loss = absl::DataLossError(absl::StrCat("loss is NaN on rank ", culprit));
            loss.SetPayload("moe/exit-code", absl::Cord("6"));
            return loss;
          }
          return world->Barrier();  // the others wait, and are woken
        });
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_EQ(status.message(), absl::StrCat("loss is NaN on rank ", culprit));
    EXPECT_TRUE(status.GetPayload("moe/exit-code").has_value());
  }
}

TEST(RunRanksTest, ARankThatStaysAwayIsNamed) {
  RunOptions options = Threads(3);
  options.timeout = absl::Milliseconds(150);
  const absl::Status status =
      RunRanks(options, [](std::unique_ptr<Communicator> world) -> absl::Status {
        if (world->rank() == 2) return absl::OkStatus();  // forgets the barrier
        return world->Barrier();
      });
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()), HasSubstr("Barrier"));
}

// Rank 1 does not come back; the others leave at their deadline.
[[noreturn]] void RunWithAStuckRank(std::function<void(const absl::Status&)> report) {
  RunOptions options = Threads(3);
  options.timeout = absl::Milliseconds(200);
  options.grace = absl::Milliseconds(100);
  options.report = std::move(report);
  options.exit_code = [](const absl::Status& status) {
    return absl::IsDeadlineExceeded(status) ? 8 : 1;
  };
  (void)RunRanks(options, [](std::unique_ptr<Communicator> world) {
    if (world->rank() == 1) absl::SleepFor(absl::Seconds(5));
    return world->Barrier();
  });
  _exit(2);
}

TEST(RunRanksTest, ARankThatDoesNotReturnIsReportedAndLeft) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(RunWithAStuckRank([](const absl::Status& status) {
                std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
              }),
              ::testing::ExitedWithCode(8), "in Barrier: waited .* for rank.* 1.*; rank 1 did not");
}

// Whoever should read it reads nothing: standard error is a full pipe.
TEST(RunRanksTest, AReportThatNobodyTakesIsNotWaitedForEither) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(RunWithAStuckRank([](const absl::Status&) { absl::SleepFor(absl::Seconds(5)); }),
              ::testing::ExitedWithCode(8), "");
}

TEST(RunRanksTest, ARankThatIsOnlyBusyWhenAnotherFailsIsWaitedFor) {
  RunOptions options = Threads(2);
  options.grace = absl::Milliseconds(1);
  options.exit_code = [](const absl::Status&) {
    return 1;
  };
  const absl::Status status = RunRanks(options, [](std::unique_ptr<Communicator> world) {
    if (world->rank() == 0) return absl::DataLossError("loss is NaN");
    absl::SleepFor(absl::Milliseconds(150));
    return absl::OkStatus();
  });
  EXPECT_EQ(status, absl::DataLossError("loss is NaN"));
}

// Ctrl-Z for longer than the deadline, and fg.
TEST(RunRanksTest, AProcessThatWasStoppedGoesOn) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto run = [] {
    const pid_t ranks = getpid();
    if (fork() == 0) {
      absl::SleepFor(absl::Milliseconds(50));
      kill(ranks, SIGSTOP);
      absl::SleepFor(absl::Milliseconds(700));
      kill(ranks, SIGCONT);
      _exit(0);
    }
    RunOptions options = Threads(2);
    options.timeout = absl::Milliseconds(500);
    const absl::Status status = RunRanks(options, [](std::unique_ptr<Communicator> world) {
      for (int i = 0; i < 20 && world->rank() == 0; ++i) absl::SleepFor(absl::Milliseconds(10));
      return world->Barrier();
    });
    _exit(status.ok() ? 0 : 8);
  };
  EXPECT_EXIT(run(), ::testing::ExitedWithCode(0), "");
}

TEST(RunRanksTest, ExceptionsBecomeStatuses) {
  const absl::Status memory =
      RunRanks(Threads(2), [](std::unique_ptr<Communicator> world) -> absl::Status {
        if (world->rank() == 1) throw std::bad_alloc();
        return world->Barrier();
      });
  EXPECT_EQ(memory.code(), absl::StatusCode::kResourceExhausted);
  const absl::Status other = RunRanks(
      Threads(1),
      [](std::unique_ptr<Communicator>) -> absl::Status { throw std::runtime_error("odd"); });
  EXPECT_EQ(other.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(other.message()), HasSubstr("odd"));
  const absl::Status kept = RunRanks(Threads(1), [](std::unique_ptr<Communicator>) -> absl::Status {
    throw absl::BadStatusOrAccess(absl::NotFoundError("no such layer"));
  });
  EXPECT_EQ(kept.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(kept.message()), HasSubstr("no such layer"));
}

TEST(MpiWorldTest, BeforeMpiIsInitialisedIsRefused) {
  const auto world = MakeMpiWorld({});
  EXPECT_EQ(world.status().code(), LinkedMpi().empty() ? absl::StatusCode::kUnimplemented
                                                       : absl::StatusCode::kFailedPrecondition);
}

// A launcher that ends a job drops what it has not read: the reason would be lost.
TEST(AwaitReaderTest, WaitsUntilThePipeIsEmpty) {
  std::array<int, 2> pipe_ends = {};
  ASSERT_EQ(pipe(pipe_ends.data()), 0);
  EXPECT_TRUE(AwaitReader(pipe_ends[1], absl::ZeroDuration()));  // nothing was written
  ASSERT_EQ(write(pipe_ends[1], "why", 3), 3);
  EXPECT_FALSE(AwaitReader(pipe_ends[1], absl::Milliseconds(20)));  // nobody reads

  std::atomic<bool> read_it = false;
  std::thread launcher([&] {
    absl::SleepFor(absl::Milliseconds(20));
    std::array<char, 8> text = {};
    read_it = true;
    EXPECT_EQ(read(pipe_ends[0], text.data(), text.size()), 3);
  });
  EXPECT_TRUE(AwaitReader(pipe_ends[1], absl::Seconds(30)));
  EXPECT_TRUE(read_it);
  launcher.join();
  close(pipe_ends[0]);
  close(pipe_ends[1]);
}

TEST(AwaitReaderTest, FilesHaveNoReader) {
  std::FILE* file = std::tmpfile();
  ASSERT_NE(file, nullptr);
  std::fputs("why", file);
  std::fflush(file);
  EXPECT_TRUE(AwaitReader(fileno(file), absl::ZeroDuration()));
  std::fclose(file);
}

}  // namespace
}  // namespace moe
