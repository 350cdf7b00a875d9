// What `moe doctor` thinks of the facts.
#include <algorithm>
#include <cmath>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <fmt/format.h>

#include "moe/cli/base/terminal.h"
#include "moe/cli/doctor/machine_facts.h"

namespace moe::cli {
namespace {

std::string Mebibytes(int64_t bytes) {
  return fmt::format("{:.0f} MiB", static_cast<double>(bytes) / (1 << 20));
}
std::string Kibibytes(int64_t bytes) {
  return fmt::format("{} KiB", bytes >> 10);
}

Finding Build(const MachineFacts& f) {
  Finding finding = {
      .subject = "build",
      .what = absl::StrCat("moe ", f.version, ", ", f.build_type, ", compiler ", f.compiler)};
  if (f.build_type != "optimised") {
    finding.verdict = Verdict::kSlow;
    finding.remedy = "build with cmake --preset release before you measure anything";
  }
  return finding;
}

Finding Simd(const MachineFacts& f) {
  const std::string best = f.simd_targets.empty() ? "none" : f.simd_targets.front();
  Finding finding = {.subject = "SIMD",
                     .what = absl::StrCat(best, " of ", absl::StrJoin(f.simd_targets, ", "))};
  if (best == "none" || absl::StartsWith(best, "EMU")) {
    finding.verdict = Verdict::kSlow;
    finding.what = "no fused multiply-add that this build knows: products run as plain loops";
    finding.remedy = "use a processor with AVX2, AVX-512 or NEON; expect a tenth of the speed";
  }
  return finding;
}

// Cores that may really run at once.
double Cores(const MachineFacts& f) {
  return f.cpu_quota > 0 ? std::min<double>(f.usable_cores, f.cpu_quota) : f.usable_cores;
}

Finding CoresForRanks(const MachineFacts& f, int ranks) {
  Finding finding = {.subject = "cores",
                     .what = absl::StrCat(f.cpu_model, f.cpu_model.empty() ? "" : ": ",
                                          Counted(f.usable_cores, "core"), " for this process, ",
                                          Counted(f.usable_threads, "hardware thread"), ", ",
                                          Counted(f.numa_nodes, "NUMA node"))};
  if (f.cpu_quota > 0) {
    absl::StrAppend(&finding.what, fmt::format(", a quota of {:.1f} cores", f.cpu_quota));
  }
  if (Cores(f) >= ranks) return finding;
  finding.verdict = Verdict::kSlow;
  finding.remedy = fmt::format(
      "{} want {} cores: most of a step will be waiting for a core; use --ranks {} to measure "
      "speed",
      Counted(ranks, "rank"), ranks, std::max(1, static_cast<int>(std::floor(Cores(f)))));
  return finding;
}

Finding Load(const MachineFacts& f, int ranks) {
  const std::string busy = BusyText(f.load, /*own=*/1, ranks);
  if (busy.empty()) {
    return {.subject = "load",
            .what = fmt::format("nothing else needs the cores now (load average {:.2f})",
                                f.load.average)};
  }
  return {.verdict = Verdict::kSlow,
          .subject = "load",
          .what = busy,
          .remedy =
              "wait for it, or stop it, before you measure anything: times are of what it "
              "leaves"};
}

Finding Caches(const MachineFacts& f) {
  return {.verdict = Verdict::kNote,
          .subject = "caches",
          .what = absl::StrCat("L2 ", Kibibytes(f.l2_bytes), " a core, L3 ", Mebibytes(f.l3_bytes),
                               ": exchanges below that move at cache speed, not memory speed")};
}

Finding Memory(const MachineFacts& f) {
  Finding finding = {.subject = "memory",
                     .what = absl::StrCat(Mebibytes(f.memory_bytes), ", ",
                                          Mebibytes(f.available_bytes), " available")};
  if (f.memory_limit_bytes > 0 && f.memory_limit_bytes < f.memory_bytes) {
    absl::StrAppend(&finding.what, ", limited to ", Mebibytes(f.memory_limit_bytes));
  }
  constexpr int64_t kLittle = int64_t{1} << 30;
  if (f.available_bytes < kLittle) {
    finding.verdict = Verdict::kBad;
    finding.remedy = "free some: a run that does not fit ends with exit code 5 or is killed";
  }
  return finding;
}

Finding Mpi(const MachineFacts& f) {
  if (f.linked_mpi.empty()) {
    return {.verdict = Verdict::kNote,
            .subject = "MPI",
            .what = "not in this build: ranks are threads of one process",
            .remedy =
                "to use processes: apt-get install libopenmpi-dev openmpi-bin, then cmake "
                "--preset release -DMOE_ENABLE_MPI=ON"};
  }
  Finding finding = {.subject = "MPI",
                     .what = absl::StrCat("linked with ", f.linked_mpi, ", ",
                                          f.mpirun.empty() ? "no launcher in PATH" : f.mpirun,
                                          f.mpirun_version.empty() ? "" : ": ", f.mpirun_version)};
  if (f.mpirun.empty()) {
    finding.verdict = Verdict::kBad;
    finding.remedy = absl::StrCat("install ", f.linked_mpi == "mpich" ? "mpich" : "openmpi-bin");
    return finding;
  }
  // Called by Debian's own name it says OpenRTE.
  const bool open = absl::StrContains(f.mpirun_version, "Open MPI") ||
                    absl::StrContains(f.mpirun_version, "OpenRTE");
  if (!f.mpirun_version.empty() && open != (f.linked_mpi == "openmpi")) {
    finding.verdict = Verdict::kBad;
    finding.remedy = absl::StrCat(
        "this launcher is of another MPI: every process would be a world "
        "of its own (exit code 9); call mpirun.",
        f.linked_mpi);
  } else if (open && f.root && !f.root_allowed) {
    finding.verdict = Verdict::kBad;
    finding.remedy =
        "Open MPI refuses root: OMPI_ALLOW_RUN_AS_ROOT=1 "
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, or another user";
  }
  return finding;
}

Finding MpiOversubscribed(const MachineFacts& f, int ranks) {
  return {.verdict = Verdict::kSlow,
          .subject = "MPI ranks",
          .what = absl::StrCat(ranks, ranks == 1 ? " process on " : " processes on ",
                               Counted(std::lround(Cores(f)), "core")),
          .remedy = f.linked_mpi == "mpich"
                        ? "MPICH spins while it waits: multiples of 8 ms per collective; use fewer "
                          "ranks, or threads (no mpirun)"
                        : "mpirun --oversubscribe, and OMPI_MCA_mpi_yield_when_idle=1 so that "
                          "waiting ranks give way"};
}

Finding SharedMemory(const MachineFacts& f) {
  if (!f.shm_bytes.has_value()) {
    return {.verdict = Verdict::kBad,
            .subject = "/dev/shm",
            .what = "is not there: MPI processes of one host have no shared memory",
            .remedy = "mount -t tmpfs tmpfs /dev/shm"};
  }
  Finding finding = {
      .subject = "/dev/shm",
      .what = absl::StrCat(Mebibytes(*f.shm_bytes), ", ", Mebibytes(*f.shm_free_bytes), " free")};
  constexpr int64_t kLittle = int64_t{256} << 20;
  if (*f.shm_free_bytes < kLittle) {
    finding.verdict = Verdict::kSlow;
    finding.remedy =
        "containers give 64 MiB by default: --shm-size=1g; a full one ends MPI with a "
        "bus error";
  }
  return finding;
}

// A GPU that is missing is no problem: everything runs on CPUs.
std::vector<Finding> Gpus(const MachineFacts& f) {
  if (f.gpus.empty()) {
    return {{.verdict = Verdict::kNote,
             .subject = "GPU",
             .what = "none that this build can use",
             .remedy = f.no_gpus}};
  }
  std::vector<Finding> findings;
  for (size_t i = 0; i < f.gpus.size(); ++i) {
    const CudaDevice& gpu = f.gpus[i];
    findings.push_back({.verdict = Verdict::kNote,
                        .subject = absl::StrCat("GPU ", i),
                        .what = absl::StrCat(gpu.name, ", sm_", gpu.major, gpu.minor, ", ",
                                             Mebibytes(gpu.memory_bytes), ", ",
                                             Mebibytes(gpu.free_bytes), " free"),
                        .remedy = std::string(gpu.usable.message())});
  }
  findings.push_back({.verdict = Verdict::kNote,
                      .subject = "NCCL",
                      .what = f.nccl.empty()
                                  ? "none that this build can use: ranks on GPUs exchange "
                                    "through the host"
                                  : absl::StrCat(f.nccl, ", with --backend nccl"),
                      .remedy = f.no_nccl});
  return findings;
}

}  // namespace

std::vector<Finding> Diagnose(const MachineFacts& f, int ranks) {
  std::vector<Finding> findings = {
      Build(f), CoresForRanks(f, ranks), Load(f, ranks), Simd(f), Caches(f), Memory(f), Mpi(f)};
  if (!f.linked_mpi.empty()) {
    if (Cores(f) < ranks) findings.push_back(MpiOversubscribed(f, ranks));
    findings.push_back(SharedMemory(f));
  }
  if (f.stale_segments > 0) {
    findings.push_back({.verdict = Verdict::kNote,
                        .subject = "leftovers",
                        .what = absl::StrCat(Counted(f.stale_segments, "segment"),
                                             " of killed Open MPI jobs in /dev/shm"),
                        .remedy = "with no MPI job running: rm /dev/shm/vader_segment.*"});
  }
  if (!f.launcher.empty()) {
    findings.push_back(
        {.verdict = Verdict::kNote,
         .subject = "launcher",
         .what = absl::StrCat(f.launcher,
                              " is set: a launcher started this process or "
                              "its shell, and moe takes its ranks from it"),
         .remedy = absl::StrCat("to run threads: without the launcher, or unset ", f.launcher)});
  }
  for (Finding& gpu : Gpus(f)) findings.push_back(std::move(gpu));
  return findings;
}

}  // namespace moe::cli
