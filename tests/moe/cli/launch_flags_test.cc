#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include "moe/cli/base/exit_code.h"
#include "moe/cli/base/launch.h"
#include "moe/cli/base/train_options.h"

namespace moe::cli {
namespace {

using ::testing::HasSubstr;
using Strings = std::vector<std::string>;

absl::StatusOr<Launch> Plan(const Strings& args, const Strings& environment) {
  Strings warnings;
  auto settings = LoadTrainSettings(args, environment, warnings);
  if (!settings.ok()) return settings.status();
  return PlanLaunch(*settings, environment);
}

Strings OpenMpi(int rank, int size) {
  return {"OMPI_COMM_WORLD_RANK=" + std::to_string(rank),
          "OMPI_COMM_WORLD_SIZE=" + std::to_string(size), "OMPI_COMM_WORLD_LOCAL_RANK=0",
          "OMPI_COMM_WORLD_LOCAL_SIZE=2"};
}

// Expects a refusal of one line with this exit code.
std::string Refused(const Strings& args, const Strings& environment, ExitCode code) {
  const absl::Status status = Plan(args, environment).status();
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(ExitCodeOf(status), code) << status;
  const std::string message(status.message());
  EXPECT_THAT(message, ::testing::Not(HasSubstr("\n")));
  return message;
}

TEST(LaunchTest, WithoutALauncherRanksAreThreads) {
  const auto launch = Plan({}, {}).value();
  EXPECT_EQ(launch.plan.backend, Backend::kLocal);
  EXPECT_EQ(launch.world.ranks, 4);
  EXPECT_EQ(launch.world.backend, Backend::kLocal);
  EXPECT_EQ(Plan({"--ranks", "7"}, {})->world.ranks, 7);
  EXPECT_EQ(Plan({}, {"MOE_RANKS=6"})->world.ranks, 6);
  EXPECT_THAT(Refused({"--ranks", "0"}, {}, ExitCode::kUsage), HasSubstr("--ranks is 0"));
}

TEST(LaunchTest, ALauncherDecides) {
  if (!HasBackend(Backend::kMpi)) GTEST_SKIP() << "no MPI in this build";
  const auto launch = Plan({}, OpenMpi(1, 3)).value();
  EXPECT_EQ(launch.plan.backend, Backend::kMpi);
  EXPECT_EQ(launch.rank(), 1);
  EXPECT_EQ(launch.world.ranks, 3);
  EXPECT_EQ(launch.world.local_ranks, 2);
  EXPECT_EQ(launch.world.backend, Backend::kMpi);
  EXPECT_TRUE(Plan({"--ranks", "3"}, OpenMpi(1, 3)).ok());
}

// Refusals of comm/bootstrap are reported with the flag's name, in one line, with its exit code.
TEST(LaunchTest, RefusalsNameTheFlagAndHaveAnExitCode) {
  const Strings torchrun = {"RANK=1", "WORLD_SIZE=5", "LOCAL_RANK=1", "MASTER_ADDR=a",
                            "MASTER_PORT=1"};
  Strings both = OpenMpi(1, 3);
  both.insert(both.end(), torchrun.begin(), torchrun.end());
  const struct {
    Strings args, environment;
    ExitCode code;
    Strings parts;
  } cases[] = {
      {{"--ranks", "4"}, OpenMpi(1, 3), ExitCode::kUsage, {"--ranks is 4", "3"}},
      {{"--ranks", "4"}, torchrun, ExitCode::kUsage, {"--ranks is 4", "unset RANK WORLD_SIZE"}},
      {{"--ranks", "4"}, torchrun, ExitCode::kUsage, {"or --backend local"}},
      {{},
       both,
       ExitCode::kUsage,
       {"WORLD_SIZE is 5", "OMPI_COMM_WORLD_SIZE is 3", "unset RANK WORLD_SIZE",
        "--backend local"}},
      {{}, torchrun, ExitCode::kBackend, {"mpirun -n 5", "unset RANK", "or --backend local"}},
      {{"--backend", "nccl"}, {}, ExitCode::kUsage, {"--backend is nccl", "--device cuda"}},
      {{"--device", "cuda"}, {}, ExitCode::kBackend, {"--device is cuda, expected cpu"}}};
  for (const auto& [args, environment, code, parts] : cases) {
    const std::string message = Refused(args, environment, code);
    for (const std::string& part : parts) EXPECT_THAT(message, HasSubstr(part));
  }
}

// Variables that pods, shells of accelerate and launchers of other programs leave set.
TEST(LaunchTest, LocalIgnoresEveryLauncher) {
  const Strings environments[] = {
      {"RANK=0", "WORLD_SIZE=1", "LOCAL_RANK=0"},
      {"RANK=1", "WORLD_SIZE=2", "LOCAL_RANK=1", "MASTER_ADDR=a", "MASTER_PORT=1"},
      {"PMI_RANK=no", "PMI_SIZE=2"},
      OpenMpi(1, 3)};
  for (const Strings& environment : environments) {
    const auto launch = Plan({"--backend", "local", "--ranks", "2"}, environment);
    ASSERT_TRUE(launch.ok()) << launch.status();
    EXPECT_EQ(launch->world.ranks, 2);
    EXPECT_EQ(launch->rank(), 0);
    EXPECT_TRUE(launch->plan.launch.warnings.empty());
  }
}

TEST(LaunchTest, HalfASetRunsThreadsWithAWarning) {
  const auto pod = Plan({}, {"WORLD_SIZE=4", "RANK=0", "MASTER_ADDR=job-0"}).value();
  EXPECT_EQ(pod.world.ranks, 4);
  EXPECT_FALSE(pod.plan.processes());
  EXPECT_EQ(pod.plan.launch.warnings.size(), 1);
}

TEST(LaunchTest, MpiNeedsALauncherForMoreThanOneRank) {
  if (!HasBackend(Backend::kMpi)) {
    EXPECT_THAT(Refused({"--backend", "mpi"}, {}, ExitCode::kBackend), HasSubstr("mpi"));
    return;
  }
  EXPECT_THAT(Refused({"--backend", "mpi", "--ranks", "4"}, {}, ExitCode::kUsage),
              HasSubstr("mpirun -n 4"));
  EXPECT_EQ(Plan({"--backend", "mpi"}, {})->world.ranks, 1);
}

TEST(LaunchTest, APmixRankHasItsSizeFromSlurm) {
  if (!HasBackend(Backend::kMpi)) GTEST_SKIP() << "no MPI in this build";
  EXPECT_EQ(Plan({"--ranks", "3"}, {"PMIX_RANK=0"})->world.ranks, 3);
  const Strings step = {"PMIX_RANK=0", "PMIX_NAMESPACE=slurm.pmix.9.0", "SLURM_NTASKS=3"};
  EXPECT_EQ(Plan({}, step)->world.ranks, 3);
}

// One entry for each row of the interface's table.
TEST(ExitCodeTest, EveryKindHasItsCode) {
  EXPECT_EQ(ExitCodeOf(absl::OkStatus()), ExitCode::kOk);
  EXPECT_EQ(ExitCodeOf(absl::InternalError("")), ExitCode::kCheckFailed);
  EXPECT_EQ(ExitCodeOf(absl::InvalidArgumentError("")), ExitCode::kUsage);
  EXPECT_EQ(ExitCodeOf(absl::NotFoundError("")), ExitCode::kUsage);
  EXPECT_EQ(ExitCodeOf(absl::ResourceExhaustedError("")), ExitCode::kMemory);
  EXPECT_EQ(ExitCodeOf(absl::DataLossError("")), ExitCode::kNumerics);
  EXPECT_EQ(ExitCodeOf(absl::AbortedError("")), ExitCode::kPeer);
  EXPECT_EQ(ExitCodeOf(absl::UnavailableError("")), ExitCode::kPeer);
  EXPECT_EQ(ExitCodeOf(absl::DeadlineExceededError("")), ExitCode::kTimeout);
  EXPECT_EQ(ExitCodeOf(absl::UnauthenticatedError("")), ExitCode::kRendezvous);
  EXPECT_EQ(ExitCodeOf(absl::UnimplementedError("")), ExitCode::kBackend);
  EXPECT_EQ(ExitCodeOf(WithExitCode(absl::InternalError(""), ExitCode::kIo)), ExitCode::kIo);
  EXPECT_EQ(ExitCodeOf(WithExitCode(absl::DataLossError(""), ExitCode::kBadInput)),
            ExitCode::kBadInput);
}

// Ranks use CPUs of their own, one for each of their threads.

std::vector<int> Cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  EXPECT_EQ(sched_getaffinity(0, sizeof set, &set), 0);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

// On a thread of its own, whose affinity ends with it.
std::vector<int> CpusOf(int rank, int threads) {
  std::vector<int> cpus;
  std::thread([&] {
    EXPECT_TRUE(PinToCores(rank, threads).ok());
    cpus = Cpus();
  }).join();
  return cpus;
}

TEST(PinTest, RanksTakeCpusRoundRobin) {
  const std::vector<int> all = Cpus();
  const auto count = static_cast<int>(all.size());
  for (int rank = 0; rank < count; ++rank) {
    const std::vector<int> one = {all[static_cast<size_t>(rank)]};
    EXPECT_EQ(CpusOf(rank, 1), one);
    EXPECT_EQ(CpusOf(rank + count, 1), one);
  }
}

TEST(PinTest, ARankHasACpuForEachThread) {
  const std::vector<int> all = Cpus();
  const auto count = static_cast<int>(all.size());
  EXPECT_EQ(CpusOf(0, count), all);
  EXPECT_EQ(CpusOf(3, 2 * count), all);
  EXPECT_EQ(CpusOf(1, 2).size(), static_cast<size_t>(std::min(2, count)));
}

}  // namespace
}  // namespace moe::cli
