// Decides how many ranks there are and where: from what the user asked for and who started the
// process.
#ifndef MOE_COMM_WORLD_PLAN_H_
#define MOE_COMM_WORLD_PLAN_H_

#include <cstdint>
#include <optional>

#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

#include "comm/bootstrap.h"
#include "kernels/base/choice.h"
#include "kernels/base/stream.h"

namespace moe {

enum class Backend : uint8_t {
  kLocal,  // ranks are threads of this process
  kMpi,    // this process is one rank
  kNccl,   // each rank has a GPU: threads of this process, or under a launcher this process is one
};
inline constexpr Choice<Backend> kBackendWords[] = {
    {"local", Backend::kLocal}, {"mpi", Backend::kMpi}, {"nccl", Backend::kNccl}};
inline const char* NameOf(Backend backend) {
  return NameOf(backend, kBackendWords);
}

// Whether this build has the backend; "openmpi" or "mpich", "" without MPI.
bool HasBackend(Backend backend);
absl::string_view LinkedMpi();

// What the user asked for; nullopt: not given.
struct WorldRequest {
  std::optional<Backend> backend = {};
  std::optional<int> ranks = {};
  int default_ranks = 4;                 // ranks that are threads
  DeviceKind device = DeviceKind::kCpu;  // what ranks compute on
};

// Where the ranks of a world come together.
enum class Meeting : uint8_t {
  kThreads,  // in this process
  kMpi,      // processes: MPI is their backend, or passes them NCCL's id
  kTcp,      // processes that torchrun started: rank 0 passes NCCL's id (comm/nccl/nccl_store.h)
};

struct WorldPlan {
  Backend backend = Backend::kLocal;
  Meeting meeting = Meeting::kThreads;
  int ranks = 1;  // 0: known to MPI alone
  LaunchInfo launch = {};

  bool processes() const { return meeting != Meeting::kThreads; }
  // Rank of this process; 0 where ranks are its threads.
  int rank() const { return processes() ? launch.rank : 0; }
};

// Decides where the ranks run, before any starts. The environment decides unless flags do: MPI
// under a launcher, NCCL under torchrun on GPUs, threads without one, and for backend local
// whatever launched the process. Pure.
//   kInvalidArgument: ranks < 1, ranks that differ from the launcher's, mpi under torchrun, nccl on
//     CPUs
//   kUnimplemented: the backend, or the MPI that ranks of nccl would meet over, is not in this
//     build; a launch by RANK and WORLD_SIZE (torchrun) on CPUs: the message holds the mpirun line
//     to use
absl::StatusOr<WorldPlan> PlanWorld(const WorldRequest& request, const LaunchInfo& launch);

}  // namespace moe

#endif  // MOE_COMM_WORLD_PLAN_H_
