// What this build and this machine are, as far as `moe` cares.
#ifndef MOE_MOE_CLI_DOCTOR_MACHINE_FACTS_H_
#define MOE_MOE_CLI_DOCTOR_MACHINE_FACTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <absl/types/span.h>

#include "kernels/base/cuda_devices.h"
#include "moe/cli/base/provenance.h"

namespace moe::cli {

struct MachineFacts {
  // Build
  std::string version, compiler, build_type;
  std::string linked_mpi;  // "openmpi", "mpich"; empty = none

  // Processor
  std::string cpu_model;
  int usable_cores = 0;                   // physical cores this process may run on
  int usable_threads = 0;                 // hardware threads of them
  MachineLoad load;                       // others' use of them, now
  double cpu_quota = 0;                   // cores that the container's quota allows; 0 = no quota
  int numa_nodes = 0;                     // of the usable cores
  int64_t l2_bytes = 0;                   // of a core
  int64_t l3_bytes = 0;                   // of the largest shared cache
  std::vector<std::string> simd_targets;  // best first, as kernels name them

  // Memory
  int64_t memory_bytes = 0;
  int64_t available_bytes = 0;
  int64_t memory_limit_bytes = 0;                    // of the container; 0 = none
  std::optional<int64_t> shm_bytes, shm_free_bytes;  // of /dev/shm; empty = there is none
  int stale_segments = 0;                            // of killed Open MPI jobs, in /dev/shm

  // MPI
  std::string mpirun;          // path; empty = not found
  std::string mpirun_version;  // the line that tells it
  bool root = false;
  bool root_allowed = false;  // the environment lets Open MPI run as root

  std::string launcher;        // "RANK": by what a launcher is recognised; empty = there is none
  std::string unset_launcher;  // what makes it none
  std::string launch_refusal;  // why commands with ranks do not start here; empty = they do
  std::vector<std::string> launch_warnings;

  // GPUs
  std::vector<CudaDevice> gpus;
  std::string no_gpus;  // why there are none, with the remedy
  std::string nccl;     // its version; empty = none
  std::string no_nccl;  // why, with the remedy
};

// Looks, without starting anything but `mpirun --version`. `environment`: "NAME=value".
MachineFacts GatherMachineFacts(absl::Span<const std::string> environment);

// What a check found.
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
  std::string remedy;   // empty where there is nothing to do
};

// Judges the facts for `ranks` ranks on this machine. Pure.
std::vector<Finding> Diagnose(const MachineFacts& facts, int ranks);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_DOCTOR_MACHINE_FACTS_H_
