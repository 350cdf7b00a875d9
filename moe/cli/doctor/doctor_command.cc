// moe doctor: what this build and machine have, and what will be slow on them.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <fmt/format.h>

#include "kernels/base/choice.h"
#include "kernels/base/status_macros.h"
#include "kernels/grouped_gemm/simd_targets.h"
#include "moe/checkpoint/run_folder.h"
#include "moe/cli/base/agreed_ranks.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/launch.h"
#include "moe/cli/base/program.h"
#include "moe/cli/base/settings.h"
#include "moe/cli/base/terminal.h"
#include "moe/cli/doctor/machine_facts.h"
#include "moe/cli/doctor/world_check.h"
#include "moe/cli/measure/tables.h"

namespace moe::cli {
namespace {

constexpr char kHead[] =
    R"(usage: moe doctor [--ranks R] [--seconds S [--save DIR]] [--strict] [-o FORM]

What this build and this machine have, and what will be slow or fail with R ranks here, each with a
remedy. Starts nothing but mpirun --version.

With --seconds it also starts the ranks, as moe train does, and measures each of them and each pair
for about S seconds: under a launcher on all its hosts, which must have the same version and commit.
It names the ranks and links that are slow.

  ok    as it should be
  note  worth knowing
  slow  works, but slower than it could
  bad   something will not work

  moe doctor
  moe doctor --ranks 8 -o json
  mpirun -n 16 moe doctor --seconds 5 --save /shared/run --strict
)";

constexpr char kTail[] = R"(
Measured, with what a rank or link must be worse than to be slow:
  core speed  multiply-adds of a fixed loop, one thread a rank, all at once; median / 1.5
  memcpy      copies of 16 MiB, likewise; median / 1.5
  latency     median time of 8 bytes from rank to rank, all others waiting; 2 medians
  links       likewise of 1 MiB; median / 2
  rank cores  cores that the rank's process may use; the same for all
Pairs inside of a host and pairs between hosts have medians of their own. Beyond some tens of ranks
it takes longer than S: R (R - 1) pairs of at least 10 transfers of each size.

Exit codes: 0 no finding is bad, 1 one is, or with --strict slow, 2 usage, or ranks that differ in
version or commit or do not see one --save, 7 to 10 as of moe train.
)";

Table DoctorSettings() {
  Table t;
  t.Group("Flags");
  AddRankSettings(t);
  t.Add("--seconds S", {Kind::kReal, "0"},
        "also start the ranks and measure them; 0: start nothing")
      .Most(kMostSeconds);
  t.Add("--save DIR", Kind::kText,
        "with --seconds: also check that all ranks see this folder and can write there")
      .Roles(kOneFolder);
  t.Add("--strict", Kind::kSwitch, "exit code 1 also for what is slow");
  AddTimeoutSetting(t);
  AddQuietSetting("no warnings", t);
  AddFormSettings(t);
  AddHelpSettings(t);
  return t;
}

// Judgements of the facts.

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

// Products of bfloat16: on AMX tiles, or why not.
Finding BFloat16Products(const MachineFacts& f) {
  const std::string automatic =
      absl::StrCat("--bf16-order auto is ", NameOf(f.fastest_order, kBFloat16OrderWords));
  if (f.uses_amx) {
    return {.subject = "bf16", .what = absl::StrCat("products on AMX tiles; ", automatic)};
  }
  switch (f.amx) {
    case gemm::AmxState::kReady:
      return {.verdict = Verdict::kSlow,
              .subject = "bf16",
              .what = absl::StrCat("products without AMX tiles, which ", gemm::kSimdVariable,
                                   " forbids; ", automatic),
              .remedy = absl::StrCat("unset ", gemm::kSimdVariable)};
    case gemm::AmxState::kRefused:
      return {.verdict = Verdict::kSlow,
              .subject = "bf16",
              .what = absl::StrCat(
                  "products without AMX tiles: the processor has them, and the kernel or the "
                  "container refuses the permission to use them; ",
                  automatic),
              .remedy =
                  "use a container whose seccomp profile allows "
                  "arch_prctl(ARCH_REQ_XCOMP_PERM)"};
    case gemm::AmxState::kNoCpu:
      break;
  }
  return {.verdict = Verdict::kNote,
          .subject = "bf16",
          .what = absl::StrCat(
              "products without AMX tiles, which this processor or its operating system (Linux "
              "before 5.16) lacks; ",
              automatic)};
}

// Cores that may run at once.
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
  // Under Debian's own name for it mpirun calls itself OpenRTE.
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

// A missing GPU is not a problem: everything runs on CPUs.
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

const char* NameOf(Verdict verdict) {
  constexpr const char* kNames[] = {"ok", "note", "slow", "bad"};
  return kNames[static_cast<int>(verdict)];
}

std::string Text(const std::vector<Finding>& findings, const std::string& form, std::FILE* out) {
  if (const auto machine_form = measure::TableFormOf(form)) {
    std::vector<measure::Fields> rows;
    for (const Finding& f : findings) {
      rows.push_back({{"verdict", NameOf(f.verdict)},
                      {"subject", f.subject},
                      {"finding", f.what},
                      {"remedy", f.remedy}});
    }
    return measure::WriteTable(*machine_form, measure::KeysOf(rows.front()), rows);
  }
  std::string text;
  for (const Finding& f : findings) {
    const std::string verdict = fmt::format("{:<5}", NameOf(f.verdict));
    const Color color = f.verdict == Verdict::kBad    ? Color::kRed
                        : f.verdict == Verdict::kSlow ? Color::kYellow
                                                      : Color::kGreen;
    text += fmt::format("{} {:<10} {}\n", Painted(verdict, color, out), f.subject, f.what);
    if (!f.remedy.empty()) text += fmt::format("{:16} -> {}\n", "", f.remedy);
  }
  return text;
}

// --ranks, else the number that a launcher started on this machine.
absl::StatusOr<int> RanksHere(const Settings& settings, const Invocation& invocation) {
  const int ranks = settings.integer("ranks");
  if (ranks < 1) {
    return WrongFlag("--ranks", absl::StrCat(ranks), "at least 1");
  }
  const LaunchInfo& launch = invocation.launch;
  if (settings.given("ranks") || launch.source == LaunchSource::kNone) return ranks;
  if (launch.local_size > 0) return launch.local_size;
  return launch.size > 0 ? launch.size : ranks;
}

absl::Status Report(const Settings& settings, const std::vector<Finding>& findings) {
  MOE_RETURN_IF_ERROR(Print(Text(findings, settings.text("output"), stdout)));
  if (!settings.empty("output-stderr")) {
    Say(stderr, "{}", Text(findings, settings.text("output-stderr"), stderr));
  }
  const auto count = [&](Verdict verdict) {
    return std::count_if(findings.begin(), findings.end(),
                         [&](const Finding& finding) { return finding.verdict == verdict; });
  };
  const auto refused = [](int64_t found, const char* what) {
    return CheckFailed(
        absl::StrCat(Counted(found, "finding"), found == 1 ? " is " : " are ", what));
  };
  if (const auto bad = count(Verdict::kBad); bad > 0) return refused(bad, "bad");
  const auto slow = count(Verdict::kSlow);
  return settings.on("strict") && slow > 0 ? refused(slow, "slow") : absl::OkStatus();
}

// Measures the ranks; the first has the findings, after those of its machine.
absl::Status Measure(const Settings& settings, const Launch& launch,
                     std::vector<Finding>& findings) {
  const auto body = [&](std::unique_ptr<Communicator> world) -> absl::Status {
    if (const std::string& folder = settings.text("save"); !folder.empty()) {
      const auto stream = MakeInlineStream();
      const auto held = RunFolder::Open({.folder = folder}, *world, *stream);
      MOE_RETURN_IF_ERROR(InputError("--save", held.status()));
    }
    MOE_ASSIGN_OR_RETURN(const WorldCheck check,
                         MeasureWorld(absl::Seconds(settings.real("seconds")), *world));
    if (world->rank() != 0) return absl::OkStatus();
    for (Finding& finding : DiagnoseWorld(check)) findings.push_back(std::move(finding));
    return absl::OkStatus();
  };
  return RunAgreedRanks({.launch = launch, .settings = settings, .command = "doctor"}, body);
}

absl::Status Run(const Invocation& invocation) {
  Settings settings(DoctorSettings());
  MOE_RETURN_IF_ERROR(LoadFlags(invocation.args, settings));
  if (settings.on("help")) return PrintOnce(invocation, HelpText(DoctorHelp()));
  if (settings.on("print-config")) return PrintOnce(invocation, PrintSettings(settings));
  const double seconds = settings.real("seconds");
  if (seconds < 0) return WrongFlag("--seconds", absl::StrCat(seconds), "0 or more");
  if (seconds == 0 && !settings.empty("save")) {
    return WrongFlag("--save", settings.text("save"), "--seconds beside it");
  }
  MOE_ASSIGN_OR_RETURN(const int ranks, RanksHere(settings, invocation));
  const auto diagnose = [&] {
    return Diagnose(GatherMachineFacts(invocation.environment), ranks);
  };
  if (seconds == 0) {  // one process does the work
    return invocation.first() ? Report(settings, diagnose()) : absl::OkStatus();
  }
  MOE_ASSIGN_OR_RETURN(const Launch launch, PlanLaunch(settings, invocation.environment));
  return RunLaunch("doctor", settings, launch, {}, [&]() -> absl::Status {
    std::vector<Finding> findings;
    if (launch.rank() == 0) findings = diagnose();
    MOE_RETURN_IF_ERROR(Measure(settings, launch, findings));
    return launch.rank() == 0 ? Report(settings, findings) : absl::OkStatus();
  });
}

}  // namespace

std::vector<Finding> Diagnose(const MachineFacts& f, int ranks) {
  std::vector<Finding> findings = {Build(f),
                                   CoresForRanks(f, ranks),
                                   Load(f, ranks),
                                   Simd(f),
                                   BFloat16Products(f),
                                   Caches(f),
                                   Memory(f),
                                   Mpi(f)};
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
         .remedy = absl::StrCat("to run threads: --backend local, or ", f.unset_launcher)});
  }
  if (!f.launch_refusal.empty()) {
    findings.push_back({.verdict = Verdict::kBad,
                        .subject = "launcher",
                        .what = "variables contradict each other: no command with ranks starts",
                        .remedy = f.launch_refusal});
  }
  for (const std::string& warning : f.launch_warnings) {
    findings.push_back({.verdict = Verdict::kNote, .subject = "launcher", .what = warning});
  }
  for (Finding& gpu : Gpus(f)) findings.push_back(std::move(gpu));
  return findings;
}

CommandHelp DoctorHelp() {
  return {.head = kHead, .settings = DoctorSettings().rows(), .tail = kTail};
}

ExitCode DoctorCommand(const Invocation& invocation) {
  return EndCommand(invocation, "doctor", Run(invocation));
}

}  // namespace moe::cli
