// What a build without MPI has in place of mpi_run.cc and mpi_communicator.cc.
#include "comm/mpi/mpi_run.h"
#include "comm/mpi/mpi_world.h"

namespace moe {

absl::string_view LinkedMpi() {
  return "";
}

absl::Status RunMpiRank(const RunOptions& /*options*/, RankBody /*body*/) {
  return absl::UnimplementedError("RunRanks: this build has no backend mpi, expected local");
}

absl::StatusOr<int> AskMpiSize(const RunOptions& /*options*/) {
  return absl::UnimplementedError("AskMpiSize: this build has no MPI");
}

absl::StatusOr<std::unique_ptr<Communicator>> MakeMpiWorld(const MpiWorldOptions& /*options*/) {
  return absl::UnimplementedError("MakeMpiWorld: this build has no MPI");
}

}  // namespace moe
