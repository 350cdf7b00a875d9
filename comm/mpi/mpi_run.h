// RunRanks under MPI. No <mpi.h> here: a build without MPI has this header, too.
#ifndef MOE_COMM_MPI_MPI_RUN_H_
#define MOE_COMM_MPI_MPI_RUN_H_

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include "comm/create.h"

namespace moe {

// This process's rank: see RunRanks. kUnimplemented in a build without MPI.
absl::Status RunMpiRank(const RunOptions& options, RankBody body);

// How many ranks the launcher started, where only MPI knows (LaunchInfo::size 0): starts MPI, in
// which RunMpiRank then goes on. Collective over them, blocks. Errors as RunRanks.
absl::StatusOr<int> AskMpiSize(const RunOptions& options);

}  // namespace moe

#endif  // MOE_COMM_MPI_MPI_RUN_H_
