// From "how many ranks, on what" to one communicator per rank: what a program's main needs.
#ifndef MOE_COMM_CREATE_H_
#define MOE_COMM_CREATE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/time/time.h>

#include "comm/bootstrap.h"
#include "comm/communicator.h"
#include "comm/local/local_world.h"

namespace moe {

enum class Backend : uint8_t {
  kLocal,  // ranks are threads of this process
  kMpi,    // this process is one rank
};
const char* NameOf(Backend backend);  // "local", "mpi"

// Whether this build has the backend; "openmpi" or "mpich", "" without MPI.
bool HasBackend(Backend backend);
absl::string_view LinkedMpi();

// What the user asked for; nullopt: not given.
struct WorldRequest {
  std::optional<Backend> backend;
  std::optional<int> ranks;
  int default_ranks = 4;  // of local threads
};

struct WorldPlan {
  Backend backend = Backend::kLocal;
  int ranks = 1;      // 0: only MPI knows
  LaunchInfo launch;  // launch.rank is this process's rank under kMpi
};

// Decides where the ranks run, before any starts. The environment decides unless flags do: MPI
// under a launcher, threads without one. Pure.
//   kInvalidArgument: ranks < 1, ranks that differ from the launcher's, threads under a launcher
//   kUnimplemented: the backend is not in this build; a launch by RANK and WORLD_SIZE (torchrun),
//     which needs NCCL: the message has the mpirun line to use
absl::StatusOr<WorldPlan> PlanWorld(const WorldRequest& request, const LaunchInfo& launch);

struct RunOptions {
  WorldPlan plan;
  absl::Duration timeout = absl::Seconds(60);  // of every wait (--comm-timeout)
  // MPI: how the process ends when its rank fails. report(status), then
  // MPI_Abort(exit_code(status)): after a failure MPI offers no other way out that cannot hang.
  std::function<void(const absl::Status&)> report;
  std::function<int(const absl::Status&)> exit_code;
};

// What a rank does. It owns its world; everything it made of it must be gone when it returns.
using RankBody = absl::FunctionRef<absl::Status(std::unique_ptr<Communicator> world)>;

// Runs `body` on every rank that this process has and returns when all are done: on plan.ranks
// threads (one rank: on the calling thread), or once on the calling thread under MPI, which is
// started and finalized here. Call it once per process under MPI.
//
// Threads: when one fails, the others' waits end; the result is the status of the rank that failed
// first, not the echoes of the others. MPI: a failed rank does not return (see RunOptions), unless
// it is the only one.
// Exceptions of `body` become kResourceExhausted (std::bad_alloc) or kInternal.
//   kUnauthenticated: MPI sees other ranks than the launcher started (CheckMpiSize)
//   kUnavailable: MPI does not start
absl::Status RunRanks(const RunOptions& options, RankBody body);

}  // namespace moe

#endif  // MOE_COMM_CREATE_H_
