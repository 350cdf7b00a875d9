// Findings of `moe doctor` on other machines.
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "moe/cli/base/launch.h"
#include "moe/cli/doctor/machine_facts.h"

namespace moe::cli {
namespace {

using ::testing::HasSubstr;

MachineFacts Healthy() {
  return {.version = "1.0",
          .compiler = "12",
          .build_type = "optimised",
          .linked_mpi = "openmpi",
          .cpu_model = "CPU",
          .usable_cores = 8,
          .usable_threads = 16,
          .numa_nodes = 1,
          .l2_bytes = 1 << 20,
          .l3_bytes = 32 << 20,
          .simd_targets = {"AVX2", "EMU128"},
          .memory_bytes = int64_t{64} << 30,
          .available_bytes = int64_t{60} << 30,
          .shm_bytes = int64_t{32} << 30,
          .shm_free_bytes = int64_t{32} << 30,
          .mpirun = "/usr/bin/mpirun.openmpi",
          .mpirun_version = "mpirun (Open MPI) 4.1.4",
          .gpus = {{.name = "NVIDIA H200",
                    .major = 9,
                    .minor = 0,
                    .memory_bytes = int64_t{141} << 30,
                    .free_bytes = int64_t{140} << 30}},
          .nccl = "2.28.9"};
}

Finding FindingOf(const MachineFacts& facts, const std::string& subject, int ranks = 4) {
  for (const Finding& finding : Diagnose(facts, ranks)) {
    if (finding.subject == subject) return finding;
  }
  ADD_FAILURE() << "no finding about " << subject;
  return {};
}

TEST(Doctor, HealthyMachineNeedsNothing) {
  for (const Finding& finding : Diagnose(Healthy(), 4)) {
    EXPECT_TRUE(finding.verdict == Verdict::kOk || finding.verdict == Verdict::kNote)
        << finding.subject;
    EXPECT_THAT(finding.remedy, ::testing::IsEmpty()) << finding.subject;
  }
}

TEST(Doctor, EveryProblemHasARemedy) {
  MachineFacts facts = Healthy();
  facts.build_type = "with assertions";
  facts.usable_cores = 2;
  facts.load = {.average = 9, .running = 9, .cores = 2};
  facts.simd_targets = {"EMU128"};
  facts.available_bytes = 1 << 20;
  facts.shm_free_bytes = 64 << 20;
  facts.stale_segments = 3;
  facts.root = true;
  facts.launch_refusal = "RANK is 8 and WORLD_SIZE is 4";
  int problems = 0;
  for (const Finding& finding : Diagnose(facts, 4)) {
    if (finding.verdict != Verdict::kSlow && finding.verdict != Verdict::kBad) continue;
    ++problems;
    EXPECT_FALSE(finding.remedy.empty()) << finding.subject;
  }
  // Build, cores, load, SIMD, memory, MPI, MPI ranks, /dev/shm, launcher.
  EXPECT_EQ(problems, 9);
}

TEST(Doctor, SaysWhetherProductsOfBFloat16RunOnTilesOrWhyNot) {
  MachineFacts facts = Healthy();
  Finding finding = FindingOf(facts, "bf16");
  EXPECT_EQ(finding.verdict, Verdict::kNote);
  EXPECT_EQ(
      finding.what,
      "products without AMX tiles, which this processor or its operating system (Linux before "
      "5.16) lacks; "
      "--bf16-order auto is dot");
  facts.amx = gemm::AmxState::kRefused;
  finding = FindingOf(facts, "bf16");
  EXPECT_EQ(finding.verdict, Verdict::kSlow);
  EXPECT_THAT(finding.what, HasSubstr("the kernel or the container refuses the permission"));
  EXPECT_THAT(finding.remedy, HasSubstr("ARCH_REQ_XCOMP_PERM"));
  facts.amx = gemm::AmxState::kReady;
  finding = FindingOf(facts, "bf16");
  EXPECT_EQ(finding.verdict, Verdict::kSlow);
  EXPECT_EQ(finding.what,
            "products without AMX tiles, which MOE_SIMD forbids; --bf16-order auto is dot");
  EXPECT_EQ(finding.remedy, "unset MOE_SIMD");
  facts.uses_amx = true;
  facts.fastest_order = BFloat16Order::kTile;
  finding = FindingOf(facts, "bf16");
  EXPECT_EQ(finding.verdict, Verdict::kOk);
  EXPECT_EQ(finding.what, "products on AMX tiles; --bf16-order auto is tile");
}

TEST(Doctor, SaysWhenOthersLeaveTooFewCores) {
  MachineFacts facts = Healthy();
  facts.load = ParseLoad("3.91 2.38 1.71 4/116 24695", 16);
  EXPECT_EQ(FindingOf(facts, "load", 8).verdict, Verdict::kOk);  // three others on 16
  const Finding finding = FindingOf(facts, "load", 14);
  EXPECT_EQ(finding.verdict, Verdict::kSlow);
  EXPECT_EQ(finding.what, "3 other threads run on 16 cores (load average 3.91)");
  EXPECT_EQ(FindingOf(facts, "load", 100).verdict, Verdict::kSlow);
  // the load has ended: only this process runs
  facts.load = ParseLoad("20.00 2.38 1.71 1/116 24695", 2);
  EXPECT_EQ(FindingOf(facts, "load", 100).verdict, Verdict::kOk);
  EXPECT_EQ(BusyText(ParseLoad("1.0 1.0 1.0 2/9 1", 1), 1, 1),
            "1 other thread runs on 1 core (load average 1.00)");
  for (const char* text : {"", "1 2 3", "1 2 3 x/y 4"}) {
    EXPECT_EQ(BusyText(ParseLoad(text, 2), 1, 4), "") << text;
  }
}

TEST(Doctor, CountsTheQuotaOfAContainer) {
  MachineFacts facts = Healthy();
  EXPECT_EQ(FindingOf(facts, "cores", 8).verdict, Verdict::kOk);
  facts.cpu_quota = 1.5;
  const Finding finding = FindingOf(facts, "cores", 2);
  EXPECT_EQ(finding.verdict, Verdict::kSlow);
  EXPECT_THAT(finding.what, HasSubstr("a quota of 1.5 cores"));
  EXPECT_THAT(finding.remedy, HasSubstr("--ranks 1 "));
}

TEST(Doctor, LauncherOfTheOtherMpiIsBad) {
  MachineFacts facts = Healthy();
  facts.mpirun = "/usr/bin/mpirun";
  facts.mpirun_version = "HYDRA build details:";
  EXPECT_EQ(FindingOf(facts, "MPI").verdict, Verdict::kBad);
  EXPECT_THAT(FindingOf(facts, "MPI").remedy, HasSubstr("mpirun.openmpi"));
  facts.linked_mpi = "mpich";
  EXPECT_EQ(FindingOf(facts, "MPI").verdict, Verdict::kOk);
  facts.mpirun_version = "mpirun.openmpi (OpenRTE) 4.1.4";
  EXPECT_EQ(FindingOf(facts, "MPI").verdict, Verdict::kBad);
  facts.mpirun = facts.mpirun_version = "";
  EXPECT_THAT(FindingOf(facts, "MPI").remedy, HasSubstr("mpich"));
}

TEST(Doctor, OpenMpiAsRootNeedsPermission) {
  MachineFacts facts = Healthy();
  facts.root = true;
  EXPECT_EQ(FindingOf(facts, "MPI").verdict, Verdict::kBad);
  facts.root_allowed = true;
  EXPECT_EQ(FindingOf(facts, "MPI").verdict, Verdict::kOk);
}

TEST(Doctor, WithoutMpiSharedMemoryDoesNotMatter) {
  MachineFacts facts = Healthy();
  facts.linked_mpi = "";
  facts.shm_bytes.reset();
  for (const Finding& finding : Diagnose(facts, 4)) EXPECT_NE(finding.verdict, Verdict::kBad);
  facts.linked_mpi = "mpich";
  facts.mpirun_version = "HYDRA build details:";
  EXPECT_EQ(FindingOf(facts, "/dev/shm").verdict, Verdict::kBad);
}

TEST(Doctor, DescribesEveryGpuAndNeverFailsForOne) {
  MachineFacts facts = Healthy();
  EXPECT_EQ(FindingOf(facts, "GPU 0").what, "NVIDIA H200, sm_90, 144384 MiB, 143360 MiB free");
  facts.gpus.push_back({.name = "old", .usable = absl::UnimplementedError("build for it")});
  EXPECT_EQ(FindingOf(facts, "GPU 1").remedy, "build for it");
  EXPECT_EQ(FindingOf(facts, "NCCL").what, "2.28.9, with --backend nccl");
  facts.nccl.clear();
  facts.no_nccl = "put libnccl.so.2 in LD_LIBRARY_PATH";
  EXPECT_EQ(FindingOf(facts, "NCCL").remedy, facts.no_nccl);
  facts.gpus.clear();
  facts.no_gpus = "no NVIDIA driver: install one";
  EXPECT_EQ(FindingOf(facts, "GPU").remedy, facts.no_gpus);
  for (const Finding& finding : Diagnose(facts, 4)) EXPECT_NE(finding.verdict, Verdict::kBad);
}

TEST(FindProgram, LooksInThePathAsExecvpDoes) {
  EXPECT_EQ(FindProgram("sh", "/nowhere:/bin"), "/bin/sh");
  EXPECT_EQ(FindProgram("sh", "/nowhere"), "");
  EXPECT_EQ(FindProgram("/bin/sh", ""), "/bin/sh");
  EXPECT_EQ(FindProgram("bin", "/"), "");  // a folder
  const std::vector<std::string> environment = {"PATHS=a", "PATH=b=c"};
  EXPECT_EQ(VariableOf(environment, "PATH"), "b=c");
}

TEST(Doctor, GathersWhatEveryMachineHas) {
  const MachineFacts facts = GatherMachineFacts({});
  EXPECT_GE(facts.usable_cores, 1);
  EXPECT_GE(facts.usable_threads, facts.usable_cores);
  EXPECT_GT(facts.memory_bytes, facts.available_bytes);
  EXPECT_FALSE(facts.simd_targets.empty());
  EXPECT_FALSE(facts.version.empty());
  EXPECT_NE(facts.gpus.empty(), facts.no_gpus.empty());
  EXPECT_TRUE(facts.mpirun.empty());  // no PATH was given
}

TEST(Doctor, TellsWhatCommandsMakeOfALaunchersVariables) {
  const auto gather = [](const std::vector<std::string>& environment) {
    return GatherMachineFacts(environment);
  };
  const MachineFacts launched = gather({"OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=2"});
  EXPECT_EQ(launched.launcher, "OMPI_COMM_WORLD_RANK");
  EXPECT_EQ(launched.unset_launcher, "unset OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE");
  const MachineFacts half = gather({"WORLD_SIZE=2"});
  EXPECT_EQ(half.launcher, "");
  EXPECT_THAT(half.launch_warnings, ::testing::ElementsAre(HasSubstr("WORLD_SIZE is set without")));
  EXPECT_THAT(gather({"PMI_RANK=2", "PMI_SIZE=2"}).launch_refusal,
              HasSubstr("PMI_RANK is 2 and PMI_SIZE is 2"));
}

}  // namespace
}  // namespace moe::cli
