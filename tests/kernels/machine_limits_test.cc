// kernels/base/machine_limits.h on machines emulated by files, and on this one.
#include "kernels/base/machine_limits.h"

#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include "tests/moe/io/io_test.h"

namespace moe {
namespace {

using ::testing::ElementsAre;

class MachineLimitsTest : public IoTest {
 protected:
  double Quota() const { return CpuQuota(root_.string()); }
  std::vector<std::string> Groups(const std::string& controller) const {
    std::vector<std::string> folders;
    for (const ControlGroup& group : ControlGroupsOf(controller, root_.string())) {
      folders.push_back(group.folder.substr(root_.string().size()) +
                        (group.version_2 ? " 2" : " 1"));
    }
    return folders;
  }
};

TEST_F(MachineLimitsTest, GroupsAreItsOwnThoseAboveAndTheMount) {
  EXPECT_THAT(Groups("cpu"), ElementsAre());
  Put("/proc/self/cgroup", "9:name=systemd:/\n4:cpu,cpuacct:/job/task\n3:memory:/\n0::/a\n");
  EXPECT_THAT(Groups("cpu"),
              ElementsAre("/sys/fs/cgroup/cpu/job/task 1", "/sys/fs/cgroup/cpu/job 1",
                          "/sys/fs/cgroup/cpu 1", "/sys/fs/cgroup/a 2", "/sys/fs/cgroup 2"));
  EXPECT_THAT(Groups("memory"),
              ElementsAre("/sys/fs/cgroup/memory 1", "/sys/fs/cgroup/a 2", "/sys/fs/cgroup 2"));
}

TEST_F(MachineLimitsTest, TheLeastQuotaOfVersionTwoCounts) {
  Put("/proc/self/cgroup", "0::/a/b\n");
  Put("/sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  EXPECT_EQ(Quota(), 0);
  Put("/sys/fs/cgroup/a/cpu.max", "50000 100000\n");  // the parent group
  EXPECT_EQ(Quota(), 0.5);
  Put("/sys/fs/cgroup/a/b/cpu.max", "200000 50000\n");
  EXPECT_EQ(Quota(), 0.5);
  Put("/sys/fs/cgroup/a/cpu.max", "800000 100000\n");
  EXPECT_EQ(Quota(), 4);
}

TEST_F(MachineLimitsTest, TheLeastQuotaOfVersionOneCounts) {
  Put("/proc/self/cgroup", "4:cpuacct,cpu:/docker/9\n0::/\n");
  Put("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  Put("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(Quota(), 0);
  // A container shows its own group at the mount's top, and not at the path that /proc names.
  Put("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "150000\n");
  EXPECT_EQ(Quota(), 1.5);
  Put("/sys/fs/cgroup/cpu/docker/9/cpu.cfs_quota_us", "50000\n");
  EXPECT_EQ(Quota(), 1.5);  // no period
  Put("/sys/fs/cgroup/cpu/docker/9/cpu.cfs_period_us", "200000\n");
  EXPECT_EQ(Quota(), 0.25);
}

TEST_F(MachineLimitsTest, WhatIsNoQuotaIsNone) {
  Put("/proc/self/cgroup", "rubbish\n0:cpu\n0::relative\n0::/a\n");
  for (const char* text : {"", "x 1\n", "100000\n", "0 100000\n", "100000 0\n", "-5 100000\n"}) {
    Put("/sys/fs/cgroup/a/cpu.max", text);
    EXPECT_EQ(Quota(), 0) << text;
  }
}

TEST(AllowedCpusTest, AreThoseOfTheAffinity) {
  const int all = AllowedCpus(getpid());
  EXPECT_GE(all, UsableCpus());
  EXPECT_GE(UsableCpus(), 1);
  int bound = 0;
  std::thread([&] {  // affinity is a thread's, and ends with it
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    bound = AllowedCpus();
  })
      .join();
  EXPECT_EQ(bound, 1);
  EXPECT_EQ(AllowedCpus(getpid()), all);
}

}  // namespace
}  // namespace moe
