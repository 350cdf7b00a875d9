// What this process may use of its machine: CPUs, and the control groups that limit it.
#ifndef MOE_KERNELS_BASE_MACHINE_LIMITS_H_
#define MOE_KERNELS_BASE_MACHINE_LIMITS_H_

#include <string>
#include <vector>

#include <absl/strings/string_view.h>
#include <sys/types.h>

namespace moe {

struct ControlGroup {
  std::string folder;  // of its files
  bool version_2 = true;
};

// The groups by which `controller` ("cpu", "memory") may limit this process: its own of
// /proc/self/cgroup, those above it, and the top of the mount, which in a container is the
// container's own whatever path is read. Some may not exist. `root` stands before /proc and /sys.
std::vector<ControlGroup> ControlGroupsOf(absl::string_view controller,
                                          const std::string& root = "");

// Cores that the groups give this process in time: the least quota over period (cpu.max;
// cpu.cfs_quota_us of version 1). 0: no quota.
double CpuQuota(const std::string& root = "");

// Hardware threads that a process (its first thread; 0: the calling one) may run on: its affinity,
// in which taskset, cpusets and launchers that bind keep it. At least 1; where it cannot be read,
// those of the machine.
int AllowedCpus(pid_t process = 0);

// `cpus`, but no more than the quota feeds: 1.5 cores are 2 threads. At least 1.
int WithinQuota(int cpus);

// Threads of this process that can run at once: its allowed CPUs within the quota, as they were
// when first asked for. Threads are pinned later.
int UsableCpus();

}  // namespace moe

#endif  // MOE_KERNELS_BASE_MACHINE_LIMITS_H_
