// comm/create.h: where ranks run, how failures come together.
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <absl/strings/cord.h>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/time/clock.h>
#include <absl/time/time.h>
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
using ::testing::HasSubstr;
using ::testing::IsEmpty;

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
  EXPECT_EQ(HasBackend(Backend::kMpi), absl::StrContains(alone.message(), "mpirun -n 2"));
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

// Rank 1 does not come back; the others leave at their deadline, and return `late` after it.
[[noreturn]] void RunWithAStuckRank(std::function<void(const absl::Status&)> report,
                                    absl::Duration late = absl::ZeroDuration()) {
  RunOptions options = Threads(3);
  options.timeout = absl::Milliseconds(200);
  options.grace = absl::Milliseconds(100);
  options.report = std::move(report);
  options.exit_code = [](const absl::Status& status) {
    return absl::IsDeadlineExceeded(status) ? 8 : 1;
  };
  (void)RunRanks(options, [late](std::unique_ptr<Communicator> world) {
    if (world->rank() == 1) absl::SleepFor(absl::Seconds(5));
    const absl::Status status = world->Barrier();
    absl::SleepFor(late);
    return status;
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

// As ranks over NCCL do, which abort their communicators before they return.
TEST(RunRanksTest, RanksThatReturnLongAfterTheirDeadlineAreReportedAtOnce) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const absl::Time begin = absl::Now();
  EXPECT_EXIT(RunWithAStuckRank(
                  [](const absl::Status& status) {
                    std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
                  },
                  absl::Seconds(4)),
              ::testing::ExitedWithCode(8), "in Barrier: waited .*; ranks 0, 1, 2 did not return");
  EXPECT_LT(absl::Now() - begin, absl::Seconds(3));  // 0.3 s, and the start of a process
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
