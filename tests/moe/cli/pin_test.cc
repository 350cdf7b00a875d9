// Ranks keep to CPUs of their own, one for each of their threads.
#include "moe/cli/bench/pin.h"

#include <algorithm>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <sched.h>

namespace moe::cli {
namespace {

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

// On a thread of its own, whose CPUs end with it.
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
