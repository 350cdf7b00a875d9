// Ranks as MPI processes. The only folder that sees <mpi.h>.
#ifndef MOE_COMM_MPI_MPI_COMMUNICATOR_H_
#define MOE_COMM_MPI_MPI_COMMUNICATOR_H_

#include <memory>
#include <optional>

#include <absl/status/statusor.h>
#include <absl/time/time.h>

#include <mpi.h>

#include "comm/communicator.h"

namespace moe {

// Collective over `comm`, of which it keeps duplicates: its traffic never meets the caller's. Host
// memory only; peer memory among processes of one host. Needs MPI_THREAD_MULTIPLE: streams call MPI
// from their own threads.
//
// Every operation is non-blocking MPI polled against a deadline: a lost peer gives
// kDeadlineExceeded that names it. MPI cannot wake a peer that is blocked elsewhere: Abort() is
// seen by this process only, the others time out. After a failure leave by MpiSession::Abort, since
// MPI_Finalize may wait for ever. What has begun to arrive cannot be stopped: where the network
// writes by itself, buffers of the failed operation may be written until the process has left.
//
// AllToAllV, AllGather, ReduceScatter and SendRecv are pairwise transfers; ReduceScatter, and
// AllReduce of 16-bit types, sum in rank order: the bits of the local backend. AllReduce of other
// types and Broadcast are the MPI library's own, after a roll call of 48 bytes from every rank that
// compares their arguments; MPI's all-reduce is deterministic for one library, rank count and
// length, but rounds floats as it likes.
//
// With MPICH, errors return only if MPI_COMM_WORLD has MPI_ERRORS_RETURN (MpiSession sets it).
//
// Errors: kUnavailable for what MPI reports, kFailedPrecondition without MPI_THREAD_MULTIPLE,
// kDeadlineExceeded when a rank of `comm` does not come within
// `start_timeout` (unless given, `timeout`).
absl::StatusOr<std::unique_ptr<Communicator>> MakeMpiCommunicator(
    MPI_Comm comm, absl::Duration timeout, std::optional<absl::Duration> start_timeout = {});

}  // namespace moe

#endif  // MOE_COMM_MPI_MPI_COMMUNICATOR_H_
