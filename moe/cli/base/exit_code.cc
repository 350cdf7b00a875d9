#include "moe/cli/base/exit_code.h"

#include <string>

#include <absl/strings/cord.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>

#include "moe/io/file.h"

namespace moe::cli {
namespace {

constexpr char kPayload[] = "moe/exit-code";

}  // namespace

absl::Status CheckFailed(absl::string_view message) {
  return WithExitCode(absl::InternalError(message), ExitCode::kCheckFailed);
}

absl::Status WithExitCode(absl::Status status, ExitCode code) {
  if (!status.ok()) status.SetPayload(kPayload, absl::Cord(absl::StrCat(static_cast<int>(code))));
  return status;
}

ExitCode ExitCodeOf(const absl::Status& status) {
  if (const auto payload = status.GetPayload(kPayload); payload.has_value()) {
    int code = 0;
    if (absl::SimpleAtoi(std::string(*payload), &code)) return static_cast<ExitCode>(code);
  }
  if (absl::IsResourceExhausted(status)) return ExitCode::kMemory;
  switch (FileFaultOf(status)) {
    case FileFault::kNone:
      break;
    case FileFault::kContent:
      return ExitCode::kBadInput;
    case FileFault::kRead:
    case FileFault::kWrite:
      return ExitCode::kIo;
  }
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return ExitCode::kOk;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kPermissionDenied:
      return ExitCode::kUsage;
    case absl::StatusCode::kDataLoss:
      return ExitCode::kNumerics;
    case absl::StatusCode::kDeadlineExceeded:
      return ExitCode::kTimeout;
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kUnavailable:
      return ExitCode::kPeer;
    case absl::StatusCode::kUnauthenticated:
      return ExitCode::kRendezvous;
    case absl::StatusCode::kUnimplemented:
      return ExitCode::kBackend;
    default:
      return ExitCode::kCheckFailed;
  }
}

}  // namespace moe::cli
