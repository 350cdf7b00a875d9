#include "moe/cli/base/launch.h"

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>
#include <absl/strings/str_split.h>
#include <absl/strings/strip.h>
#include <sched.h>
#include <unistd.h>

#include "comm/mpi/mpi_run.h"
#include "comm/nccl/nccl_world.h"
#include "kernels/base/cuda_devices.h"
#include "kernels/base/machine_limits.h"
#include "kernels/base/status_macros.h"
#include "moe/cli/base/exit_code.h"
#include "moe/cli/base/terminal.h"
#include "moe/io/file.h"
#include "moe/run/session.h"

namespace moe::cli {
namespace {

// The value of a variable, nullptr if it is not there.
const char* Lookup(absl::Span<const std::string> environment, absl::string_view name) {
  for (const std::string& entry : environment) {
    absl::string_view rest = entry;
    if (absl::ConsumePrefix(&rest, name) && absl::ConsumePrefix(&rest, "=")) return rest.data();
  }
  return nullptr;
}

// Never a flag: every user of a machine can read the flags of all processes.
absl::StatusOr<std::string> SecretOf(absl::Span<const std::string> environment) {
  constexpr char kName[] = "MOE_NCCL_SECRET";
  std::string secret = VariableOf(environment, kName);
  if (!secret.empty()) return secret;
  return absl::InvalidArgumentError(
      absl::StrCat(kName,
                   " is not set, by which ranks of a launch without MPI know each other: "
                   "export the same on all of them, as openssl rand -hex 16 makes it"));
}

// Messages of the library name functions and fields; users know flags.
absl::Status InFlags(const absl::Status& status) {
  const std::string words =
      absl::StrReplaceAll(status.message(), {{"or backend local", "or --backend local"}});
  absl::string_view message = words;
  for (const absl::string_view prefix : {"DetectLaunch: ", "PlanWorld: "}) {
    message = absl::StripPrefix(message, prefix);
  }
  const bool field =
      absl::StartsWith(message, "ranks is") || absl::StartsWith(message, "backend is");
  return absl::Status(status.code(), absl::StrCat(field ? "--" : "", message));
}

void ReportOfStart(const absl::Status& status) {
  Say(stderr, "moe: {}\n", std::string(status.message()));
}

int CodeOf(const absl::Status& status) {
  return static_cast<int>(ExitCodeOf(status));
}

WorldRequest RequestOf(const Settings& settings) {
  WorldRequest request;
  request.default_ranks = settings.integer("ranks");
  if (settings.given("ranks")) request.ranks = settings.integer("ranks");
  if (!settings.is("backend", "auto")) request.backend = settings.choice("backend", kBackendWords);
  request.device = settings.choice("device", kDeviceWords);
  return request;
}

bool Runs(const std::string& path) {
  return ::access(path.c_str(), X_OK) == 0 && !std::filesystem::is_directory(path);
}

}  // namespace

absl::StatusOr<Device> DeviceOf(const Settings& settings, ComputesOn computes_on) {
  if (!settings.is("device", "cuda")) return Device{};
  if (computes_on == ComputesOn::kCpu) {
    return absl::UnimplementedError(
        "--device is cuda, expected cpu, on which this command computes");
  }
  absl::Status status = CudaDeviceCount().status();
  if (status.ok()) {
    MOE_ASSIGN_OR_RETURN(const CudaDevice first, CudaDeviceAt(0));
    status = first.usable;
  }
  if (status.ok()) return Device{DeviceKind::kCuda, 0};
  return Prefixed("--device is cuda", status);
}

int ThreadsOf(const Settings& settings, const World& world) {
  if (!settings.is("threads", "auto")) return settings.integer("threads");
  return std::clamp(world.cores / std::max(1, world.local_ranks), 1, world.own_cores);
}

absl::StatusOr<LaunchInfo> LaunchOf(absl::Span<const std::string> environment) {
  absl::StatusOr<LaunchInfo> info =
      DetectLaunch({}, [&](const char* name) { return Lookup(environment, name); });
  if (info.ok()) return info;
  const absl::Status status = InFlags(info.status());
  return absl::Status(status.code(), absl::StrCat(status.message(), ", or --backend local"));
}

// The launcher's daemon, the parent of its ranks, may run on all CPUs that its ranks share; it may
// have bound each rank to a part of them.
void ShareCores(Launch& launch) {
  World& world = launch.world;
  world.cores = std::max(world.own_cores, WithinQuota(AllowedCpus(::getppid())));
  const int share = world.cores / std::max(1, world.local_ranks);
  if (world.own_cores >= share) return;
  launch.plan.launch.warnings.push_back(absl::StrCat(
      "the launcher keeps this rank on ", Counted(world.own_cores, "CPU"), ", its share is ", share,
      " of ", world.cores, ": mpirun --bind-to none, or srun --cpu-bind=none, lets it use them"));
}

// Memory between ranks of one process grows with their square: 2000 take 24 GB.
constexpr int kMostLocalRanks = 512;

namespace {

absl::StatusOr<WorldPlan> PlanOf(const WorldRequest& request,
                                 absl::Span<const std::string> environment) {
  LaunchInfo info;
  if (request.backend != Backend::kLocal) {
    MOE_ASSIGN_OR_RETURN(info, LaunchOf(environment));
  }
  absl::StatusOr<WorldPlan> plan = PlanWorld(request, info);
  return plan.ok() ? plan : InFlags(plan.status());
}

}  // namespace

absl::StatusOr<Launch> PlanLaunch(const Settings& settings,
                                  absl::Span<const std::string> environment,
                                  ComputesOn computes_on) {
  const WorldRequest request = RequestOf(settings);
  absl::StatusOr<WorldPlan> plan = PlanOf(request, environment);
  // DeviceOf makes the first CUDA call.
  if (plan.ok() && plan->backend == Backend::kNccl) PrepareForNccl();
  MOE_ASSIGN_OR_RETURN(const Device device, DeviceOf(settings, computes_on));
  if (!plan.ok()) return plan.status();
  Launch launch{.device = device};
  launch.plan = *std::move(plan);
  if (launch.plan.backend == Backend::kNccl) {
    MOE_RETURN_IF_ERROR(Prefixed("--backend is nccl", NcclVersion().status()));
  }
  if (launch.plan.meeting == Meeting::kTcp) {
    MOE_ASSIGN_OR_RETURN(launch.secret, SecretOf(environment));
  }
  // PMIX_RANK may come without a size: then --ranks gives it, and the ranks check it once MPI runs.
  int ranks = launch.plan.ranks > 0 ? launch.plan.ranks : request.ranks.value_or(0);
  if (ranks < 1) {
    MOE_ASSIGN_OR_RETURN(ranks, AskMpiSize({.report = ReportOfStart, .exit_code = CodeOf}));
  }
  if (!launch.plan.processes() && ranks > kMostLocalRanks) {
    return WrongFlag(
        "--ranks", absl::StrCat(ranks),
        absl::StrCat("at most ", kMostLocalRanks, " threads of one process; mpirun starts more"));
  }
  launch.world = {
      .ranks = ranks,
      .local_ranks = launch.plan.launch.local_size > 0 ? launch.plan.launch.local_size : ranks,
      .own_cores = UsableCpus(),
      .backend = launch.plan.backend};
  launch.world.cores = launch.world.own_cores;
  if (launch.plan.processes()) ShareCores(launch);
  return launch;
}

absl::Status CheckAllReduce(const Settings& settings, Backend backend) {
  const std::string& name = settings.text("all-reduce");
  const bool local = backend == Backend::kLocal;
  if (name != (local ? "library" : "direct")) return absl::OkStatus();
  return WrongFlag("--all-reduce", name,
                   local ? "ring or direct on backend local, which has no library"
                         : absl::StrCat("ring or library on backend ", moe::NameOf(backend),
                                        ", where the host's memory is not shared"));
}

absl::Status CheckTwoHops(const Settings& settings, Device device) {
  if (device.kind != DeviceKind::kCuda || !settings.is("dispatch", "hierarchical")) {
    return absl::OkStatus();
  }
  return WrongFlag("--dispatch", "hierarchical", "staged: two hops move memory of the host");
}

absl::Status CheckWorldSize(const Launch& launch, const Communicator& world) {
  if (world.size() == launch.world.ranks) return absl::OkStatus();
  return WrongFlag("--ranks", absl::StrCat(launch.world.ranks),
                   absl::StrCat("the ", world.size(), " that the launcher started"));
}

std::string LauncherText(const Launch& launch) {
  if (!launch.plan.processes()) return "";
  if (launch.plan.meeting == Meeting::kMpi) {
    // Open MPI refuses more ranks than cores without --oversubscribe.
    const bool crowded = LinkedMpi() == "openmpi" && launch.world.local_ranks > launch.world.cores;
    return absl::StrCat("mpirun -n ", launch.world.ranks, crowded ? " --oversubscribe " : " ");
  }
  const int nodes = launch.world.ranks / launch.world.local_ranks;
  return absl::StrCat("torchrun --no-python ",
                      nodes > 1 ? absl::StrCat("--nnodes ", nodes, " ") : "", "--nproc-per-node ",
                      launch.world.local_ranks, " ");
}

absl::Status CheckDevices(const Launch& launch, const Settings& settings) {
  const bool share = settings.on("share-device");
  if (launch.device.kind == DeviceKind::kCpu) {
    return share ? WrongFlag("--share-device", "given", "--device cuda beside it")
                 : absl::OkStatus();
  }
  const bool exclusive = launch.plan.backend == Backend::kNccl && !launch.plan.processes();
  if (share && exclusive) {
    return WrongFlag("--share-device", "given",
                     "--backend local beside it: NCCL takes one GPU for one thread");
  }
  if (share) return absl::OkStatus();
  // If the launcher does not report the ranks of this host, NCCL refuses a GPU to two of them.
  const bool told = !launch.plan.processes() || launch.plan.launch.local_size > 0;
  if (!told && launch.plan.backend == Backend::kNccl) return absl::OkStatus();
  MOE_ASSIGN_OR_RETURN(const int count, CudaDeviceCount());
  if (launch.world.local_ranks <= count) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--ranks: ", launch.world.local_ranks, " on this machine, expected at most its ",
                   Counted(count, "GPU"), exclusive ? "" : ", or --share-device"));
}

std::string VariableOf(absl::Span<const std::string> environment, absl::string_view name) {
  const char* const value = Lookup(environment, name);
  return value == nullptr ? "" : value;
}

std::string FindProgram(const std::string& name, absl::string_view path) {
  if (absl::StrContains(name, "/")) return Runs(name) ? name : "";
  for (const absl::string_view folder : absl::StrSplit(path, ':', absl::SkipEmpty())) {
    const std::string candidate = absl::StrCat(folder, "/", name);
    if (Runs(candidate)) return candidate;
  }
  return "";
}

std::string FindMpiLauncher(absl::string_view path) {
  for (const std::string& name :
       {absl::StrCat("mpirun.", LinkedMpi()), std::string("mpirun"), std::string("mpiexec")}) {
    const std::string program = FindProgram(name, path);
    if (!program.empty()) return program;
  }
  return "";
}

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
