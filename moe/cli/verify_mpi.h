// MPI layouts of `moe verify`: one mpirun of this program per rank count, and what runs inside.
#ifndef MOE_MOE_CLI_VERIFY_MPI_H_
#define MOE_MOE_CLI_VERIFY_MPI_H_

#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include "moe/cli/command.h"
#include "moe/cli/verify_options.h"
#include "moe/verify/verify.h"

namespace moe::cli {

// The argument that makes `moe verify` one of the processes: the folder of the request and the
// results follows it, then the flags of the verify that started it.
inline constexpr char kMpiWorkerFlag[] = "--mpi-worker";

// Starts the processes of one rank count and collects their results.
class MpiLauncher {
 public:
  MpiLauncher(const Invocation& invocation, const VerifyOptions& options,
              const std::vector<verify::Problem>& problems)
      : invocation_(invocation), options_(options), problems_(problems) {}
  ~MpiLauncher();
  MpiLauncher(const MpiLauncher&) = delete;
  MpiLauncher& operator=(const MpiLauncher&) = delete;

  // kUnimplemented: this build has no MPI, or mpirun is not there.
  static absl::Status CheckPresent(const VerifyOptions& options, const Invocation& invocation);

  // As CheckPresent. kDeadlineExceeded: the processes
  // took longer than --comm-timeout and what their cases may take. Others: what they ended with.
  absl::StatusOr<std::vector<verify::LayerResult>> Run(int ranks,
                                                       const std::vector<verify::Case>& cases);

 private:
  absl::Status MakeFolder();
  absl::Status Launch(const std::string& mpirun, int ranks, size_t cases);

  const Invocation& invocation_;
  const VerifyOptions& options_;
  const std::vector<verify::Problem>& problems_;
  std::string folder_;
};

// One MPI process of a verify: runs the cases of the folder's request; rank 0 writes the results.
absl::Status RunMpiWorker(const std::string& folder, const VerifyOptions& options,
                          const Invocation& invocation);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_VERIFY_MPI_H_
