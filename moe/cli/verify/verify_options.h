// What `moe verify` was asked to do.
#ifndef MOE_MOE_CLI_VERIFY_VERIFY_OPTIONS_H_
#define MOE_MOE_CLI_VERIFY_VERIFY_OPTIONS_H_

#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/time/time.h>
#include <absl/types/span.h>

#include "moe/cli/base/settings.h"
#include "moe/cli/verify/layout.h"
#include "moe/cli/verify/verify.h"

namespace moe::cli {

// Flags over environment over presets over defaults. kInvalidArgument.
absl::StatusOr<Settings> LoadVerifySettings(absl::Span<const std::string> args,
                                            absl::Span<const std::string> environment,
                                            std::vector<std::string>& warnings);

// The names of --inject, one a line.
std::string FaultNames();

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

// --layouts: which values every axis of a layout takes.
struct LayoutRequest {
  verify::LayoutAxes axes;
  bool names_mpi = false;  // asked for, so its absence is an error
  bool names_transport = false, names_dispatch = false, names_capacity = false;
};

// "ranks=1,2,4 ep=all transport=local,mpi dispatch=staged,direct overlap=1,4 capacity=none,1.0":
// any of the axes, in any order, separated by spaces; the others keep their defaults.
// kInvalidArgument names what is wrong and the nearest valid choice.
absl::StatusOr<LayoutRequest> ParseLayouts(const std::string& text);

// The rows of `moe verify`. Those that set fields set `options` and, of one gate, `spec`.
Table VerifySettings(VerifyOptions& options, verify::ProblemSpec& spec);

// A function of the settings alone: MPI processes make the same problems from the same flags.
// kInvalidArgument with flag, value and what was expected.
absl::StatusOr<VerifyOptions> MakeVerifyOptions(const Settings& settings);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_VERIFY_VERIFY_OPTIONS_H_
