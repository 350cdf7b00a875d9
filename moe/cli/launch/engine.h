// Launchers of processes, and how each is told to start a job.
#ifndef MOE_MOE_CLI_LAUNCH_ENGINE_H_
#define MOE_MOE_CLI_LAUNCH_ENGINE_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "kernels/base/choice.h"
#include "moe/cli/launch/hosts.h"

namespace moe::launch {

enum class Engine : uint8_t { kMpirun, kHydra, kSrun, kTorchrun, kLocal };

inline constexpr Choice<Engine> kEngineWords[] = {{"mpirun", Engine::kMpirun},
                                                  {"hydra", Engine::kHydra},
                                                  {"srun", Engine::kSrun},
                                                  {"torchrun", Engine::kTorchrun},
                                                  {"local", Engine::kLocal}};

// What holds for an engine whatever the job.
struct EngineTraits {
  // In the environment of every rank on this host, a descendant of the launcher; nullptr: ranks are
  // no such processes.
  const char* rank_variable;
  // What the launcher passes on to all ranks without a limit to their time.
  int stop_signal;
  bool reaches_hosts;  // from the host where it is started
};
const EngineTraits& TraitsOf(Engine engine);

struct Job {
  Engine engine = Engine::kMpirun;
  std::string program;  // of the launcher; not for kLocal
  // Ranks of a host are its slots. Empty: this host alone, or for srun those of the allocation.
  std::vector<Host> hosts;
  int ranks_per_node = 0;              // without hosts; 0 for srun: what the allocation says
  std::string remote_shell;            // starts commands on other hosts; empty: the launcher's own
  std::string pmi;                     // of srun: "pmix"
  std::vector<std::string> variables;  // names, for ranks on other hosts
  std::vector<std::string> command;    // what every rank runs
};

// The command line that starts the job.
std::vector<std::string> CommandLine(const Job& job);

// What decides about the engine.
struct EngineFacts {
  absl::string_view linked_mpi;  // "openmpi", "mpich" or ""
  bool has_nccl = false;
  bool in_allocation = false;  // of Slurm
};
// auto: with MPI srun inside an allocation, else the launcher of that MPI; without MPI torchrun for
// a build with NCCL, else local: the command itself, whose ranks are threads. kUnimplemented: an
// engine of an MPI that is not linked.
absl::StatusOr<Engine> EngineFor(absl::string_view word, const EngineFacts& facts);

}  // namespace moe::launch

#endif  // MOE_MOE_CLI_LAUNCH_ENGINE_H_
