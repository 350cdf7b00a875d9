#include "moe/cli/bench/pin.h"

#include <cstddef>
#include <vector>

#include <absl/strings/str_cat.h>
#include <sched.h>

namespace moe::cli {

absl::Status PinToCores(int rank, int threads) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
    return absl::InternalError("--pin: the CPUs of this process are unknown");
  }
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &allowed)) cpus.push_back(cpu);
  }
  cpu_set_t mine;
  CPU_ZERO(&mine);
  const size_t first = static_cast<size_t>(rank) * static_cast<size_t>(threads);
  for (size_t i = first; i < first + static_cast<size_t>(threads); ++i) {
    CPU_SET(cpus[i % cpus.size()], &mine);
  }
  if (sched_setaffinity(0, sizeof(mine), &mine) == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("--pin: rank ", rank, " cannot be pinned"));
}

absl::Status PinRank(const Launch& launch, const Communicator& world, int threads) {
  return PinToCores(launch.plan.processes() ? launch.plan.launch.local_rank : world.rank(),
                    threads);
}

}  // namespace moe::cli
