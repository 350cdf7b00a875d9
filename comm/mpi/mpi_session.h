// The life of MPI in this process, and its error codes as absl::Status.
#ifndef MOE_COMM_MPI_MPI_SESSION_H_
#define MOE_COMM_MPI_MPI_SESSION_H_

#include <memory>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

#include <mpi.h>

namespace moe {

// OK for MPI_SUCCESS, else kUnavailable: "<what>: <MPI's text>".
absl::Status FromMpi(int code, absl::string_view what);

// Between construction and destruction MPI may be called from any thread. One per process, made and
// destroyed on the main thread.
class MpiSession {
 public:
  // MPI_Init_thread(MPI_THREAD_MULTIPLE), unless someone else has initialised MPI; errors on
  // MPI_COMM_WORLD return instead of ending the job. kUnavailable when MPI fails or grants less.
  static absl::StatusOr<std::unique_ptr<MpiSession>> Start();

  // MPI_Finalize, if Start initialised. It waits for the other processes without a deadline: after
  // a failure call Abort instead.
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Ends every process of the job with `exit_code`: MPI_Abort(MPI_COMM_WORLD, exit_code).
  [[noreturn]] static void Abort(int exit_code);

 private:
  explicit MpiSession(bool owns) : owns_(owns) {}

  const bool owns_;
  int rank_ = 0;
  int size_ = 1;
};

}  // namespace moe

#endif  // MOE_COMM_MPI_MPI_SESSION_H_
