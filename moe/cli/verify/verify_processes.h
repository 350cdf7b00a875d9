// Layouts of `moe verify` whose ranks are processes, over MPI or NCCL: one mpirun of this program
// per rank count, and what runs inside.
#ifndef MOE_MOE_CLI_VERIFY_VERIFY_PROCESSES_H_
#define MOE_MOE_CLI_VERIFY_VERIFY_PROCESSES_H_

#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include "comm/descriptor.h"
#include "moe/cli/base/command.h"
#include "moe/cli/verify/verify.h"
#include "moe/cli/verify/verify_options.h"

namespace moe::cli {

// The argument that makes `moe verify` one of the processes: the paths of request and results
// follow it, with ':' between them, then the flags of the verify that started it.
inline constexpr char kWorkerFlag[] = "--worker";

// A file in memory, which the processes that this one starts open by its path: there is nothing to
// remove when this one ends, however it does.
class SharedFile {
 public:
  absl::Status MakeEmpty();
  int number() const { return file_.number(); }
  const std::string& path() const { return path_; }

 private:
  Descriptor file_;
  std::string path_;
};

// Starts the processes of one rank count and collects their results.
class ProcessLauncher {
 public:
  ProcessLauncher(const Invocation& invocation, const VerifyOptions& options,
                  const std::vector<verify::Problem>& problems)
      : invocation_(invocation), options_(options), problems_(problems) {}
  ProcessLauncher(const ProcessLauncher&) = delete;
  ProcessLauncher& operator=(const ProcessLauncher&) = delete;

  // kUnimplemented: there is no --mpirun, or without one no MPI in this build.
  static absl::Status CheckPresent(const VerifyOptions& options, const Invocation& invocation);

  // `cases` are of one transport. As CheckPresent. kDeadlineExceeded: the processes took longer
  // than --comm-timeout and what their cases may take. Others: what they ended with.
  absl::StatusOr<std::vector<verify::LayerResult>> Run(int ranks,
                                                       const std::vector<verify::Case>& cases);

 private:
  absl::Status Launch(const std::string& mpirun, int ranks, size_t cases);

  const Invocation& invocation_;
  const VerifyOptions& options_;
  const std::vector<verify::Problem>& problems_;
  SharedFile request_, results_, errors_;
};

// One process of a verify: runs the cases of the request; rank 0 writes the results.
absl::Status RunWorker(const std::string& files, const VerifyOptions& options,
                       const Invocation& invocation);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_VERIFY_VERIFY_PROCESSES_H_
