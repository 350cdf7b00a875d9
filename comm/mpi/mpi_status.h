// MPI's error codes as absl::Status.
#ifndef MOE_COMM_MPI_MPI_STATUS_H_
#define MOE_COMM_MPI_MPI_STATUS_H_

#include <absl/status/status.h>
#include <absl/strings/string_view.h>

namespace moe {

// OK for MPI_SUCCESS, else kUnavailable: "<what>: <MPI's text>".
absl::Status FromMpi(int code, absl::string_view what);

}  // namespace moe

#endif  // MOE_COMM_MPI_MPI_STATUS_H_
