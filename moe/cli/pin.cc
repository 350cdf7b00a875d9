#include "moe/cli/pin.h"

#include <absl/strings/str_cat.h>
#include <sched.h>

namespace moe::cli {

absl::Status PinToCore(int rank) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
    return absl::InternalError("--pin: the CPUs of this process are unknown");
  }
  int skip = rank % CPU_COUNT(&allowed);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed) || skip-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    if (sched_setaffinity(0, sizeof(one), &one) == 0) return absl::OkStatus();
    break;
  }
  return absl::InternalError(absl::StrCat("--pin: rank ", rank, " cannot be pinned"));
}

absl::Status PinRank(const Launch& launch, const Communicator& world) {
  return PinToCore(launch.plan.processes() ? launch.plan.launch.local_rank : world.rank());
}

}  // namespace moe::cli
