// Ranks as MPI processes. No <mpi.h> here: a build without MPI has this header, too.
#ifndef MOE_COMM_MPI_MPI_WORLD_H_
#define MOE_COMM_MPI_MPI_WORLD_H_

#include <cstdint>
#include <memory>
#include <optional>

#include <absl/status/statusor.h>
#include <absl/time/time.h>

#include "comm/communicator.h"

namespace moe {

struct MpiWorldOptions {
  int64_t comm = 0;                            // the program's communicator: MPI_Comm_c2f(comm)
  absl::Duration timeout = absl::Seconds(60);  // bound of every wait
  // Bound of the wait until all ranks of `comm` are there; unless given, `timeout`.
  std::optional<absl::Duration> start_timeout = {};
};

// A world of the ranks of `comm`, for a program that has MPI of its own: MPI is neither initialised
// nor finalized nor aborted here, and no error handler of the program's changes. Collective over
// `comm`, of which the world keeps duplicates: its traffic never meets the program's. They are
// freed when the world, what was split from it and what is in its streams are gone, which is
// collective too, and before MPI_Finalize. Host memory only; peer memory among processes of one
// host. Needs MPI_THREAD_MULTIPLE: streams call MPI from their own threads.
//
// A process may have several worlds, of all ranks or of parts, and use them at the same time from
// as many threads. Each dies alone.
//
// Every operation is non-blocking MPI polled against a deadline: a lost peer gives
// kDeadlineExceeded that names it. MPI cannot wake a peer that is blocked elsewhere: Abort() is
// seen by this process only, the others time out. The program decides what becomes of it after a
// failure. Operations of a dead world may never complete, so its duplicates are not freed,
// MPI_Finalize may wait for ever, and where the network writes by itself, buffers of the failed
// operation may be written until the process has left: leave by MPI_Abort.
//
// AllToAllV, AllGather(V), ReduceScatter(V) and SendRecv are pairwise transfers; ReduceScatter(V),
// and AllReduce of 16-bit types, sum in rank order: the bits of the local backend. AllReduce of
// other types and Broadcast are the MPI library's own, after a roll call of 48 bytes from every
// rank that compares their arguments; MPI's all-reduce is deterministic for one library, rank count
// and length, but rounds floats as it likes.
//
// With MPICH, what MPI reports returns as an error only if the program gives MPI_COMM_WORLD the
// handler MPI_ERRORS_RETURN; else the job ends there.
//
// Errors: kFailedPrecondition where MPI is not initialised, has ended, or has less than
// MPI_THREAD_MULTIPLE; kInvalidArgument for MPI_COMM_NULL; kDeadlineExceeded when a rank of `comm`
// does not come; kUnavailable for what MPI reports; kUnimplemented in a build without MPI.
absl::StatusOr<std::unique_ptr<Communicator>> MakeMpiWorld(const MpiWorldOptions& options);

}  // namespace moe

#endif  // MOE_COMM_MPI_MPI_WORLD_H_
