// From "how many ranks, on what" to one communicator per rank: what a program's main needs.
#ifndef MOE_COMM_CREATE_H_
#define MOE_COMM_CREATE_H_

#include <algorithm>
#include <functional>
#include <memory>
#include <string>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/time/time.h>

#include "comm/communicator.h"
#include "comm/local/local_world.h"
#include "comm/watch/process_watch.h"
#include "comm/world_plan.h"

namespace moe {

struct RunOptions {
  WorldPlan plan = {};
  absl::Duration timeout = absl::Seconds(60);  // bound of every wait (--comm-timeout)
  // Bound of the waits until all ranks are there (MPI_Init, the NCCL id, the first roll call), if
  // longer than `timeout`: ranks start one after another on a busy machine.
  absl::Duration start_timeout = absl::Seconds(60);
  // Ranks that are processes: how the process ends when its rank fails. report(status), then
  // MPI_Abort(exit_code(status)), under torchrun _exit: after a failure there is no other way out
  // that cannot hang. Ranks that are threads, given exit_code: report and _exit when one of them
  // has failed and another does not return.
  std::function<void(const absl::Status&)> report;
  std::function<int(const absl::Status&)> exit_code;
  // Threads: time until the process has left, counted from the failure of one rank by its deadline,
  // and from `timeout` after any other failure, when a healthy rank may be busy. Half of it is for
  // ranks that have not returned, half for report and the dump of `watch`.
  absl::Duration grace = absl::Seconds(2);
  // Meeting::kTcp: a secret of the ranks alone (NcclStore::secret). Rank 0 listens at
  // launch.address, port launch.port + 1.
  std::string secret = {};
  // The ranks pass it (Communicator::Attach), and are dumped as their work fails. nullptr: none.
  ProcessWatch* watch = nullptr;
};

// Timeout of start-up: never shorter than that of a step.
inline absl::Duration StartTimeout(const RunOptions& options) {
  return std::max(options.timeout, options.start_timeout);
}

// Returns `status`, the result of work with `world`. A failure ends the world before its
// communicator is destroyed: over NCCL the destructor waits for the peers, which may be waiting for
// this rank.
absl::Status OrAbort(Communicator& world, absl::Status status);

// What a rank runs. It owns its world; everything that it made from the world must be destroyed
// when it returns.
using RankBody = absl::FunctionRef<absl::Status(std::unique_ptr<Communicator> world)>;

// Runs `body` on every rank that this process has and returns when all are done: on plan.ranks
// threads (one rank: on the calling thread), or once on the calling thread where this process is
// one rank; MPI is started and finalized here. Call it once per process under MPI.
//
// NCCL: each rank's communicator is of one GPU (Communicator::device): of threads the one with the
// rank's number, of processes that of their place among those of their host, in turn if there are
// more of them than GPUs. A program whose first CUDA call is before this calls PrepareForNccl()
// (nccl_world.h) before that.
//
// Threads: when one fails, the others' waits end; the result is the status of the rank that failed
// first, not the echoes of the others. One that does not return then (a thread that hangs cannot be
// ended) is waited for at most RunOptions::grace where options.exit_code is given: the process
// reports, naming it, and leaves. Processes: a failed rank does not return (see RunOptions),
// unless it is the only one.
// Exceptions of `body` become the status of an absl::BadStatusOrAccess, kResourceExhausted (no
// memory, no threads) or kInternal.
//   kUnauthenticated: MPI sees other ranks than the launcher started (CheckMpiSize)
//   kUnavailable: MPI does not start
//   NCCL: those of MakeNcclCommunicator, JoinNcclOver and JoinNcclByTcp
absl::Status RunRanks(const RunOptions& options, RankBody body);

}  // namespace moe

#endif  // MOE_COMM_CREATE_H_
