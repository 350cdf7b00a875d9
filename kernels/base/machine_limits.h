// What this process may use of its machine: CPUs, and the control groups that limit it.
#ifndef MOE_KERNELS_BASE_MACHINE_LIMITS_H_
#define MOE_KERNELS_BASE_MACHINE_LIMITS_H_

#include <string>
#include <vector>

#include <absl/strings/string_view.h>
#include <sys/types.h>

namespace moe {

struct ControlGroup {
  std::string folder;  // that holds its files
  bool version_2 = true;
};

// The groups by which `controller` ("cpu", "memory") may limit this process: its own from
// /proc/self/cgroup, their ancestors, and the top of the mount, which in a container is the
// container's own group whatever path /proc names. Some may not exist. `root` is prefixed to /proc
// and /sys.
std::vector<ControlGroup> ControlGroupsOf(absl::string_view controller,
                                          const std::string& root = "");

// Cores' worth of time that the groups grant this process: the least quota over period (cpu.max;
// cpu.cfs_quota_us of version 1). 0: no quota.
double CpuQuota(const std::string& root = "");

// Hardware threads that a process (its first thread; 0: the calling one) may run on: its affinity,
// which taskset, cpusets and binding launchers set. At least 1; where it cannot be read, the
// hardware threads of the machine.
int AllowedCpus(pid_t process = 0);

// `cpus`, limited by the quota, rounded up: 1.5 cores are 2 threads. At least 1.
int WithinQuota(int cpus);

// Threads of this process that can run at once: its allowed CPUs within the quota. Computed by the
// first call, because threads are pinned later.
int UsableCpus();

}  // namespace moe

#endif  // MOE_KERNELS_BASE_MACHINE_LIMITS_H_
