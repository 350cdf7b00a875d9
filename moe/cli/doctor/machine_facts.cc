#include "moe/cli/doctor/machine_facts.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <utility>

#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/strip.h>
#include <hwloc.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "comm/create.h"
#include "comm/nccl/nccl_world.h"
#include "kernels/base/machine_limits.h"
#include "kernels/grouped_gemm/simd_targets.h"
#include "moe/cli/base/launch.h"
#include "moe/cli/base/settings.h"
#include "moe/cli/measure/machine_memory.h"
#include "moe/io/file_system.h"

namespace moe::cli {
namespace {

namespace fs = std::filesystem;

int64_t KibibytesOf(absl::string_view key) {
  int64_t kib = 0;
  const std::string text = ProcValue("/proc/meminfo", key);
  return absl::SimpleAtoi(absl::StripSuffix(text, " kB"), &kib) ? kib * 1024 : 0;
}

void GatherProcessor(MachineFacts& facts) {
  facts.cpu_model = ProcValue("/proc/cpuinfo", "model name");
  facts.simd_targets = gemm::SimdTargets();
  facts.amx = gemm::AmxOfThisCpu();
  facts.uses_amx = gemm::UsesAmx();
  facts.fastest_order = gemm::FastestBFloat16Order();
  facts.cpu_quota = CpuQuota();
  hwloc_topology_t topology = nullptr;
  if (hwloc_topology_init(&topology) != 0) return;
  const std::unique_ptr<hwloc_topology, void (*)(hwloc_topology_t)> owner(topology,
                                                                          hwloc_topology_destroy);
  if (hwloc_topology_load(topology) != 0) return;
  hwloc_bitmap_t allowed = hwloc_bitmap_alloc();
  if (hwloc_get_cpubind(topology, allowed, HWLOC_CPUBIND_PROCESS) != 0) {
    hwloc_bitmap_copy(allowed, hwloc_topology_get_allowed_cpuset(topology));
  }
  const auto count = [&](hwloc_obj_type_t type) {
    return hwloc_get_nbobjs_inside_cpuset_by_type(topology, allowed, type);
  };
  facts.usable_threads = hwloc_bitmap_weight(allowed);
  // A mask of single hyperthreads contains no whole core.
  facts.usable_cores = 0;
  for (hwloc_obj_t core = nullptr;
       (core = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_CORE, core)) != nullptr;) {
    facts.usable_cores += hwloc_bitmap_intersects(core->cpuset, allowed);
  }
  facts.numa_nodes = std::max(1, count(HWLOC_OBJ_NUMANODE));
  const auto cache = [&](hwloc_obj_type_t type) -> int64_t {
    const hwloc_obj_t object = hwloc_get_next_obj_by_type(topology, type, nullptr);
    return object == nullptr ? 0 : static_cast<int64_t>(object->attr->cache.size);
  };
  facts.l2_bytes = cache(HWLOC_OBJ_L2CACHE);
  facts.l3_bytes = cache(HWLOC_OBJ_L3CACHE);
  hwloc_bitmap_free(allowed);
}

void GatherMemory(MachineFacts& facts) {
  facts.memory_bytes = KibibytesOf("MemTotal");
  facts.available_bytes = measure::AvailableMemoryBytes();
  facts.memory_limit_bytes = measure::MemoryLimitBytes();
  struct statvfs shm = {};
  if (::statvfs("/dev/shm", &shm) == 0) {
    facts.shm_bytes = static_cast<int64_t>(shm.f_blocks * shm.f_frsize);
    facts.shm_free_bytes = static_cast<int64_t>(shm.f_bavail * shm.f_frsize);
  }
  std::vector<std::string> names;
  (void)RealFileSystem().List("/dev/shm", names);
  for (const std::string& name : names) {
    facts.stale_segments += absl::StartsWith(name, "vader_segment.");
  }
}

// The first line with a digit that `program --version` prints: MPICH begins with a heading.
std::string VersionOf(const std::string& program) {
  const std::string command = absl::StrCat(ShellQuote(program), " --version 2>/dev/null");
  FILE* const pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return "";
  std::array<char, 256> line = {};
  std::string version;
  while (std::fgets(line.data(), line.size(), pipe) != nullptr) {
    const std::string text = line.data();
    const bool numbered = std::any_of(text.begin(), text.end(),
                                      [](unsigned char c) { return absl::ascii_isdigit(c); });
    if (version.empty() && numbered) version = text;
  }
  ::pclose(pipe);
  absl::RemoveExtraAsciiWhitespace(&version);
  return version;
}

void GatherMpi(absl::Span<const std::string> environment, MachineFacts& facts) {
  facts.linked_mpi = std::string(LinkedMpi());
  facts.mpirun = FindMpiLauncher(VariableOf(environment, "PATH"));
  if (!facts.mpirun.empty()) facts.mpirun_version = VersionOf(facts.mpirun);
  facts.root = ::geteuid() == 0;
  facts.root_allowed = VariableOf(environment, "OMPI_ALLOW_RUN_AS_ROOT") == "1" &&
                       VariableOf(environment, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM") == "1";
}

void GatherLauncher(absl::Span<const std::string> environment, MachineFacts& facts) {
  const absl::StatusOr<LaunchInfo> launch = LaunchOf(environment);
  if (!launch.ok()) {
    facts.launch_refusal = std::string(launch.status().message());
    return;
  }
  facts.launch_warnings = launch->warnings;
  if (launch->source == LaunchSource::kNone) return;
  facts.launcher = moe::NameOf(launch->source);
  facts.unset_launcher = HowToUnset(launch->source);
}

void GatherGpus(MachineFacts& facts) {
  absl::StatusOr<std::vector<CudaDevice>> devices = CudaDevices();
  if (devices.ok()) {
    facts.gpus = *std::move(devices);
  } else {
    facts.no_gpus = std::string(devices.status().message());
  }
  const absl::StatusOr<std::string> nccl = NcclVersion();
  facts.nccl = nccl.value_or("");
  facts.no_nccl = std::string(nccl.status().message());
}

}  // namespace

MachineFacts GatherMachineFacts(absl::Span<const std::string> environment) {
  MachineFacts facts = {.version = MOE_VERSION, .compiler = __VERSION__, .load = LookAtLoad()};
#ifdef NDEBUG
  facts.build_type = "optimised";
#else
  facts.build_type = "with assertions";
#endif
  GatherProcessor(facts);
  GatherMemory(facts);
  GatherMpi(environment, facts);
  GatherLauncher(environment, facts);
  GatherGpus(facts);
  return facts;
}

}  // namespace moe::cli
