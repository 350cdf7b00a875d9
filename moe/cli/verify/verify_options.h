// What `moe verify` was asked to do, and the processes that do it.
#ifndef MOE_MOE_CLI_VERIFY_VERIFY_OPTIONS_H_
#define MOE_MOE_CLI_VERIFY_VERIFY_OPTIONS_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/time/time.h>
#include <absl/types/span.h>

#include "moe/cli/base/command.h"
#include "moe/cli/base/settings.h"
#include "moe/cli/verify/verify.h"

namespace moe::cli {

// Flags over environment over presets over defaults. kInvalidArgument.
absl::StatusOr<Settings> LoadVerifySettings(absl::Span<const std::string> args,
                                            absl::Span<const std::string> environment,
                                            std::vector<std::string>& warnings);

// The names of --inject.
std::vector<std::string> FaultNames();

struct VerifyOptions {
  std::vector<verify::ProblemSpec> problems;  // one per gate and capacity
  std::vector<verify::Case> cases;
  verify::Fault fault = verify::Fault::kNone;
  DeviceKind device = DeviceKind::kCpu;
  // A transport of processes was named, so that it is an error if they cannot be started.
  bool needs_processes = false;
  std::string mpirun;
  std::string output, output_stderr;  // "table", "csv", "json", "jsonl", "md"; the second may be ""
  bool verbose = false;
  bool quiet = false;
  absl::Duration comm_timeout;
};

// The rows of `moe verify`. Those that set fields set `options` and, of one gate, `spec`.
Table VerifySettings(VerifyOptions& options, verify::ProblemSpec& spec);

// A function of the settings alone: MPI processes make the same problems from the same flags.
// kInvalidArgument with flag, value and what was expected.
absl::StatusOr<VerifyOptions> MakeVerifyOptions(const Settings& settings);

// Layouts of `moe verify` whose ranks are processes, over MPI or NCCL: one mpirun of this program
// per rank count, and what runs inside.

// The argument that makes `moe verify` one of the processes: the paths of request and results
// follow it, with ':' between them, then the flags of the verify that started it.
inline constexpr char kWorkerFlag[] = "--worker";

// kUnimplemented: there is no --mpirun, or without one no MPI in this build.
absl::Status CheckLauncher(const VerifyOptions& options, const Invocation& invocation);

// `cases`, of one transport, on `ranks` processes. As CheckLauncher. kDeadlineExceeded: they took
// longer than --comm-timeout and what their cases may take. Others: what they ended with.
absl::StatusOr<std::vector<verify::LayerResult>> RunProcesses(
    const Invocation& invocation, const VerifyOptions& options,
    const std::vector<verify::Problem>& problems, int ranks,
    const std::vector<verify::Case>& cases);

// One process of a verify: runs the cases of the request; rank 0 writes the results.
absl::Status RunWorker(const std::string& files, const Settings& settings,
                       const VerifyOptions& options, const Invocation& invocation);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_VERIFY_VERIFY_OPTIONS_H_
