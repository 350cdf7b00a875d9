// What a build without MPI has in place of mpi_run.cc.
#include "comm/mpi/mpi_run.h"

namespace moe {

absl::string_view LinkedMpi() {
  return "";
}

absl::Status RunMpiRank(const RunOptions& /*options*/, RankBody /*body*/) {
  return absl::UnimplementedError("RunRanks: this build has no backend mpi, expected local");
}

}  // namespace moe
