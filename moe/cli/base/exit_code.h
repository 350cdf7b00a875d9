// Exit codes of the program: one meaning each, on every command.
#ifndef MOE_MOE_CLI_BASE_EXIT_CODE_H_
#define MOE_MOE_CLI_BASE_EXIT_CODE_H_

#include <absl/status/status.h>
#include <absl/strings/string_view.h>

namespace moe::cli {

enum class ExitCode : int {
  kOk = 0,
  kCheckFailed = 1,  // wrong results, below a bound, or a defect of this program
  kUsage = 2,        // command line, environment, configuration, a path that is not there
  kBadInput = 3,     // an input file's content is malformed
  kIo = 4,           // a read or write failed: disk full
  kMemory = 5,
  kNumerics = 6,    // NaN or infinity
  kPeer = 7,        // another rank failed
  kTimeout = 8,     // a deadline passed
  kRendezvous = 9,  // the ranks could not find, or do not trust, each other
  kBackend = 10,    // this build or machine has no such backend
  kStopped = 11,    // stopped on request; its checkpoint can be resumed
};

// Error that ends a command with ExitCode::kCheckFailed.
absl::Status CheckFailed(absl::string_view message);

// Makes ExitCodeOf return `code` for `status`, whatever its kind.
absl::Status WithExitCode(absl::Status status, ExitCode code);

// The code attached to `status`, else kMemory for kResourceExhausted, else that of its file fault
// (moe/io/file.h), else the one for its kind when it comes from running ranks: kDataLoss is numbers
// that are not finite or copies that differ, kDeadlineExceeded a missing peer, kAborted and
// kUnavailable a failed peer, kUnauthenticated rendezvous, kUnimplemented an absent backend,
// kInvalidArgument, kNotFound and kPermissionDenied usage.
ExitCode ExitCodeOf(const absl::Status& status);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_EXIT_CODE_H_
