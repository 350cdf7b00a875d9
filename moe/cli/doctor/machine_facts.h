// Facts about this build and machine that concern `moe`.
#ifndef MOE_MOE_CLI_DOCTOR_MACHINE_FACTS_H_
#define MOE_MOE_CLI_DOCTOR_MACHINE_FACTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <absl/types/span.h>

#include "kernels/base/cuda_devices.h"
#include "kernels/grouped_gemm/gemm_options.h"
#include "kernels/grouped_gemm/gemm_tile_amx.h"
#include "moe/cli/base/provenance.h"

namespace moe::cli {

struct MachineFacts {
  // Build
  std::string version, compiler, build_type;
  std::string linked_mpi;  // "openmpi", "mpich"; empty = none

  // Processor
  std::string cpu_model;
  int usable_cores = 0;                   // physical cores this process may run on
  int usable_threads = 0;                 // their hardware threads
  MachineLoad load;                       // use of them by other programs, now
  double cpu_quota = 0;                   // cores that the container's quota allows; 0 = no quota
  int numa_nodes = 0;                     // NUMA nodes of the usable cores
  int64_t l2_bytes = 0;                   // per core
  int64_t l3_bytes = 0;                   // size of the largest shared cache
  std::vector<std::string> simd_targets;  // best first, as kernels name them
  gemm::AmxState amx = gemm::AmxState::kNoCpu;
  bool uses_amx = false;                              // products of bfloat16 run on AMX tiles
  BFloat16Order fastest_order = BFloat16Order::kDot;  // of products of bfloat16

  // Memory
  int64_t memory_bytes = 0;
  int64_t available_bytes = 0;
  int64_t memory_limit_bytes = 0;  // the container's limit; 0 = none
  // Size of /dev/shm; empty = it does not exist.
  std::optional<int64_t> shm_bytes, shm_free_bytes;
  int stale_segments = 0;  // segments of killed Open MPI jobs in /dev/shm

  // MPI
  std::string mpirun;          // path; empty = not found
  std::string mpirun_version;  // the line with the version
  bool root = false;
  bool root_allowed = false;  // the environment lets Open MPI run as root

  std::string launcher;        // "RANK": the variable that identifies a launcher; empty = none
  std::string unset_launcher;  // how to unset that variable
  std::string launch_refusal;  // why commands with ranks do not start here; empty = they do
  std::vector<std::string> launch_warnings;

  // GPUs
  std::vector<CudaDevice> gpus;
  std::string no_gpus;  // why there are none, with the remedy
  std::string nccl;     // its version; empty = none
  std::string no_nccl;  // why, with the remedy
};

// Collects the facts; starts nothing but `mpirun --version`. `environment`: "NAME=value".
MachineFacts GatherMachineFacts(absl::Span<const std::string> environment);

// The severity of a finding.
enum class Verdict : uint8_t {
  kOk,
  kNote,  // worth knowing
  kSlow,  // works, slower than it could
  kBad,   // something will not work
};

struct Finding {
  Verdict verdict = Verdict::kOk;
  std::string subject;  // "cores"
  std::string what;     // "2 cores, 4 ranks want one each"
  std::string remedy;   // empty if nothing can be done
};

// Judges the facts for `ranks` ranks on this machine. Pure function.
std::vector<Finding> Diagnose(const MachineFacts& facts, int ranks);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_DOCTOR_MACHINE_FACTS_H_
