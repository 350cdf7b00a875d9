// RunRanks under MPI. No <mpi.h> here: a build without MPI has this header, too.
#ifndef MOE_COMM_MPI_MPI_RUN_H_
#define MOE_COMM_MPI_MPI_RUN_H_

#include <absl/status/status.h>

#include "comm/create.h"

namespace moe {

// This process's rank: see RunRanks. kUnimplemented in a build without MPI.
absl::Status RunMpiRank(const RunOptions& options, RankBody body);

}  // namespace moe

#endif  // MOE_COMM_MPI_MPI_RUN_H_
