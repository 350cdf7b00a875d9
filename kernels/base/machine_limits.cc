#include "kernels/base/machine_limits.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <thread>

#include <absl/algorithm/container.h>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <sched.h>
#include <unistd.h>

namespace moe {
namespace {

// Appends the group at `path` ("/a/b") of the hierarchy at `mount`, its ancestors, and the mount's
// top.
void AddGroups(const std::string& mount, std::string path, bool version_2,
               std::vector<ControlGroup>& groups) {
  while (path.size() > 1) {
    groups.push_back({absl::StrCat(mount, path), version_2});
    path.resize(path.rfind('/'));
  }
  groups.push_back({mount, version_2});
}

// The first `count` numbers of a file; fewer if it has fewer ("max 100000") or is missing.
std::vector<double> NumbersIn(const std::string& path, size_t count) {
  std::vector<double> numbers;
  std::ifstream file(path);
  for (double number = 0; numbers.size() < count && file >> number;) numbers.push_back(number);
  return numbers;
}

// {quota, period} of one group; fewer numbers, or a negative quota, if it has none.
std::vector<double> QuotaOf(const ControlGroup& group) {
  if (group.version_2) return NumbersIn(absl::StrCat(group.folder, "/cpu.max"), 2);
  std::vector<double> quota = NumbersIn(absl::StrCat(group.folder, "/cpu.cfs_quota_us"), 1);
  for (const double period : NumbersIn(absl::StrCat(group.folder, "/cpu.cfs_period_us"), 1)) {
    quota.push_back(period);
  }
  return quota;
}

}  // namespace

std::vector<ControlGroup> ControlGroupsOf(absl::string_view controller, const std::string& root) {
  const std::string mounts = absl::StrCat(root, "/sys/fs/cgroup");
  std::vector<ControlGroup> groups;
  std::ifstream lines(absl::StrCat(root, "/proc/self/cgroup"));
  for (std::string line; std::getline(lines, line);) {  // "9:cpu,cpuacct:/a", "0::/a"
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3 || !absl::StartsWith(parts[2], "/")) continue;
    const std::vector<std::string> controllers = absl::StrSplit(parts[1], ',');
    if (parts[1].empty()) {
      AddGroups(mounts, parts[2], true, groups);
    } else if (absl::c_linear_search(controllers, controller)) {
      // Controllers that are mounted together each have a link to the mount.
      AddGroups(absl::StrCat(mounts, "/", controller), parts[2], false, groups);
    }
  }
  return groups;
}

double CpuQuota(const std::string& root) {
  double least = 0;
  for (const ControlGroup& group : ControlGroupsOf("cpu", root)) {
    const std::vector<double> quota = QuotaOf(group);
    if (quota.size() < 2 || quota[0] <= 0 || quota[1] <= 0) continue;
    const double cores = quota[0] / quota[1];
    least = least > 0 ? std::min(least, cores) : cores;
  }
  return least;
}

int AllowedCpus(pid_t process) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(process, sizeof(allowed), &allowed) == 0) {
    return std::max(1, CPU_COUNT(&allowed));
  }
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

int WithinQuota(int cpus) {
  const double quota = CpuQuota();
  return std::max(1, quota > 0 && quota < cpus ? static_cast<int>(std::ceil(quota)) : cpus);
}

int UsableCpus() {
  static const int usable = WithinQuota(AllowedCpus(::getpid()));
  return usable;
}

}  // namespace moe
