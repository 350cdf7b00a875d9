#include "comm/mpi/mpi_session.h"

#include <absl/strings/str_cat.h>
#include <absl/time/time.h>
#include <unistd.h>

#include "comm/descriptor.h"
#include "kernels/base/status_macros.h"

namespace moe {

absl::Status FromMpi(int code, absl::string_view what) {
  if (code == MPI_SUCCESS) return absl::OkStatus();
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) length = 0;
  return absl::UnavailableError(
      absl::StrCat(what, ": ", absl::string_view(text, static_cast<size_t>(length))));
}

absl::StatusOr<std::unique_ptr<MpiSession>> MpiSession::Start() {
  int initialized = 0;
  MOE_RETURN_IF_ERROR(FromMpi(MPI_Initialized(&initialized), "MPI_Initialized"));
  int finalized = 0;
  MOE_RETURN_IF_ERROR(FromMpi(MPI_Finalized(&finalized), "MPI_Finalized"));
  if (finalized != 0) return absl::UnavailableError("MpiSession: MPI has ended in this process");
  std::unique_ptr<MpiSession> session(new MpiSession(initialized == 0));
  int level = MPI_THREAD_SINGLE;
  MOE_RETURN_IF_ERROR(session->owns_
                          ? FromMpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level),
                                    "MPI_Init_thread")
                          : FromMpi(MPI_Query_thread(&level), "MPI_Query_thread"));
  if (level < MPI_THREAD_MULTIPLE) {
    return absl::UnavailableError(
        "MpiSession: MPI grants less than MPI_THREAD_MULTIPLE, which streams need");
  }
  // MPICH reports a failed MPI_Test to MPI_COMM_WORLD's handler, whatever the communicator.
  MOE_RETURN_IF_ERROR(FromMpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN),
                              "MPI_Comm_set_errhandler"));
  MOE_RETURN_IF_ERROR(FromMpi(MPI_Comm_rank(MPI_COMM_WORLD, &session->rank_), "MPI_Comm_rank"));
  MOE_RETURN_IF_ERROR(FromMpi(MPI_Comm_size(MPI_COMM_WORLD, &session->size_), "MPI_Comm_size"));
  return session;
}

MpiSession::~MpiSession() {
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (owns_ && initialized != 0 && finalized == 0) MPI_Finalize();
}

void MpiSession::Abort(int exit_code) {
  // Above all the line that says why; a launcher that reads nothing any more is not waited for.
  AwaitReader(STDERR_FILENO, absl::Seconds(1));
  MPI_Abort(MPI_COMM_WORLD, exit_code);
  _exit(exit_code);  // MPI_Abort does not return where a launcher watches
}

}  // namespace moe
