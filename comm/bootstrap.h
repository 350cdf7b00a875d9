// Who started this process, and as which rank.
#ifndef MOE_COMM_BOOTSTRAP_H_
#define MOE_COMM_BOOTSTRAP_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

namespace moe {

enum class LaunchSource : uint8_t {
  kNone,      // started by hand
  kFlags,     // explicit flags
  kOpenMpi,   // OMPI_COMM_WORLD_*
  kPmi,       // PMI_RANK, PMI_SIZE: MPICH's hydra and its relatives
  kPmix,      // PMIX_RANK
  kSlurm,     // SLURM_PROCID, SLURM_NTASKS inside a job step
  kTorchrun,  // RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
};

struct LaunchInfo {
  LaunchSource source = LaunchSource::kNone;
  int rank = 0;
  int size = 1;              // 0: known to MPI alone (PMIX_RANK comes without a size)
  int local_rank = 0;        // on this host; 0 where the launcher does not set it
  int local_size = 0;        // ranks on this host; 0 where the launcher does not set it
  std::string address = {};  // address of rank 0, where given
  int port = 0;
  // The launcher runs: variables of its own are set, which nobody exports by hand. So it has
  // started the other ranks, too, and learns how this process ends.
  bool launcher_runs = false;
  std::vector<std::string> warnings = {};  // for users, once: variables that were left out
};

// Flags that name the launch; all that has no value was not given.
struct LaunchFlags {
  std::optional<int> rank = {}, size = {}, local_rank = {};
  std::string address = {};
  std::optional<int> port = {};
};

// The value of an environment variable, or nullptr. Programs pass std::getenv.
using EnvLookup = absl::FunctionRef<const char*(const char*)>;

// Reads the first complete set, in the order of LaunchSource: flags (rank and size; the rest is
// optional), OMPI_COMM_WORLD_*, PMI_*, PMIX_RANK, SLURM_*, RANK and its companions. Empty variables
// count as unset. A set of which only a part is there is no launch, but a warning: pods and shells
// of other programs have RANK or WORLD_SIZE. SLURM_* count only inside a step (SLURM_STEP_ID) of
// more than one task: a shell inside an allocation launches nothing. srun's PMIX_RANK has its size
// from SLURM_NTASKS. torchrun inside a step (TORCHELASTIC_RUN_ID) comes before the step.
//
// kInvalidArgument, naming the variables at odds and what to unset: a value that is no number; a
// rank outside its size; a whole set of RANK that contradicts the set that wins. A pure function of
// its arguments.
absl::StatusOr<LaunchInfo> DetectLaunch(const LaunchFlags& flags, EnvLookup lookup);

// srun, by the variables of Slurm's step or of its PMIx.
bool IsOfSrun(LaunchSource source);

// "OMPI_COMM_WORLD_RANK": the variable that `source` is recognised by; "--rank" for flags.
const char* NameOf(LaunchSource source);

// "OMPI_COMM_WORLD_LOCAL_RANK": the variable of a rank's place on its host; nullptr if `source` has
// none.
const char* LocalRankNameOf(LaunchSource source);

// "unset RANK WORLD_SIZE": what makes the process one that was started by hand.
std::string HowToUnset(LaunchSource source);

// Whether MPI, once started, sees the ranks that the launcher started. kUnauthenticated when not:
// the usual cause is a launcher of the other MPI, whose processes each see a world of one.
//   linked_mpi  "openmpi" or "mpich", what this build links
absl::Status CheckMpiSize(const LaunchInfo& launch, absl::string_view linked_mpi, int mpi_size);

}  // namespace moe

#endif  // MOE_COMM_BOOTSTRAP_H_
