#include "moe/cli/base/launch.h"

#include <algorithm>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <sched.h>

#include "moe/cli/base/exit_code.h"

namespace moe::cli {
namespace {

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
