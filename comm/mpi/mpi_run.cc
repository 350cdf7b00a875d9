#include "comm/mpi/mpi_run.h"

#include <utility>

#include "comm/mpi/mpi_communicator.h"
#include "comm/mpi/mpi_session.h"
#include "kernels/base/status_macros.h"

namespace moe {

absl::string_view LinkedMpi() {
  return MOE_LINKED_MPI;
}

absl::Status RunMpiRank(const RunOptions& options, RankBody body) {
  MOE_ASSIGN_OR_RETURN(const std::unique_ptr<MpiSession> session, MpiSession::Start());
  absl::Status status = CheckMpiSize(options.plan.launch, LinkedMpi(), session->size());
  if (status.ok()) {
    auto world = MakeMpiCommunicator(MPI_COMM_WORLD, options.timeout);
    status = world.ok() ? body(*std::move(world)) : world.status();
  }
  // Alone, MPI_Finalize waits for nobody: the caller may report and leave by itself.
  if (status.ok() || session->size() == 1) return status;
  if (options.report) options.report(status);
  MpiSession::Abort(options.exit_code ? options.exit_code(status) : 1);
}

}  // namespace moe
