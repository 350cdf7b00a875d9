#include "moe/cli/program.h"

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>
#include <absl/time/clock.h>
#include <fmt/format.h>
#include <unistd.h>

#include "moe/cli/exit_code.h"
#include "moe/cli/line_file.h"
#include "moe/cli/terminal.h"
#include "moe/io/file.h"

namespace moe::cli {
namespace {

absl::Status Prefixed(absl::string_view flag, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(flag, ": ", status.message()));
}

}  // namespace

absl::Status Print(const std::string& text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0) {
    return absl::OkStatus();
  }
  return WithExitCode(absl::InternalError("cannot write to standard output"), ExitCode::kIo);
}

void PrintError(absl::string_view command, const absl::Status& status) {
  Say(stderr, "moe{}{}: {}\n", command.empty() ? "" : " ", std::string(command),
      absl::StrReplaceAll(status.message(), {{"\n", " "}}));
  std::fflush(stderr);
}

absl::Status PrintOnce(const Invocation& invocation, const std::string& text) {
  return invocation.first() ? Print(text) : absl::OkStatus();
}

ExitCode EndCommand(const Invocation& invocation, absl::string_view command,
                    const absl::Status& status) {
  // A launcher that ends all when one fails must not do so before the first has spoken: on a busy
  // machine it may start late. Hydra leaves processes alone that have not started MPI.
  constexpr absl::Duration kPatience = absl::Seconds(5);
  const LaunchInfo& launch = invocation.launch;
  if (status.ok()) return ExitCode::kOk;
  if (!invocation.first() && launch.source != LaunchSource::kPmi) absl::SleepFor(kPatience);
  // 0 as well where the launcher does not say: rather the same line twice than none.
  if (invocation.first() || launch.local_rank == 0) PrintError(command, status);
  return ExitCodeOf(status);
}

RunOptions RankOptions(const Launch& launch, absl::Duration timeout, std::string command) {
  auto report = [first = launch.rank() == 0,
                 command = std::move(command)](const absl::Status& status) {
    // Errors that all ranks see at once come from the first alone: it ends the others, which wait.
    const bool common = absl::IsDataLoss(status) || absl::IsInvalidArgument(status);
    if (common && !first) absl::SleepFor(absl::Seconds(1));
    PrintError(command, status);
  };
  return {
      .plan = launch.plan,
      .timeout = timeout,
      .report = std::move(report),
      .exit_code = [](const absl::Status& status) { return static_cast<int>(ExitCodeOf(status)); },
      .secret = launch.secret};
}

absl::Status InputError(absl::string_view flag, const absl::Status& status) {
  if (status.ok()) return status;
  const absl::Status named = Prefixed(flag, status);
  if (absl::IsDataLoss(status) || absl::IsUnimplemented(status)) {
    return WithExitCode(named, ExitCode::kBadInput);
  }
  return absl::IsUnavailable(status) ? WithExitCode(named, ExitCode::kIo) : named;
}

absl::Status WriteError(absl::string_view flag, const std::string& path,
                        const absl::Status& status) {
  if (status.ok()) return status;
  const absl::Status named = Prefixed(flag, status);
  if (absl::IsResourceExhausted(status)) return named;
  // A folder that is there and takes no files (/proc) also says that there is no such thing.
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code ignored;
  const bool absent = absl::IsNotFound(status) && !folder.empty() &&
                      !std::filesystem::is_directory(folder, ignored);
  if (absent || absl::IsInvalidArgument(status)) return named;
  return WithExitCode(named, ExitCode::kIo);
}

bool WrittenInPlace(const std::string& path) {
  std::error_code ignored;
  const std::filesystem::file_status there = std::filesystem::status(path, ignored);
  return std::filesystem::exists(there) && !is_regular_file(there) && !is_directory(there);
}

absl::Status CheckWritable(absl::string_view flag, const std::string& path) {
  if (!WrittenInPlace(path)) return WriteError(flag, path, WholeFile::Create(path).status());
  // A pipe is not opened before there is something to write: who reads it would see it end.
  if (::access(path.c_str(), W_OK) == 0) return absl::OkStatus();
  return Prefixed(flag, IoError("write", path, errno));
}

}  // namespace moe::cli
