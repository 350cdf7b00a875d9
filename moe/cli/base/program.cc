#include "moe/cli/base/program.h"

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include <absl/strings/cord.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>
#include <absl/time/clock.h>
#include <unistd.h>

#include "comm/hosts.h"
#include "kernels/base/printable.h"
#include "kernels/base/status_macros.h"
#include "moe/cli/base/config_file.h"
#include "moe/cli/base/exit_code.h"
#include "moe/cli/base/terminal.h"
#include "moe/io/file.h"

namespace moe::cli {
namespace {

constexpr char kOwnJob[] = "moe/own-job";

// deadline of ranks that meet only to report an error
constexpr absl::Duration kMeetingTime = absl::Seconds(60);

// Whether the first process of this launch on this host runs: a child of the same launcher with
// `first` in its environment ("LOCAL_RANK=0").
bool FirstOfHostRuns(const std::string& first) {
  const std::string parent = absl::StrCat(::getppid());
  std::ifstream children(absl::StrCat("/proc/", parent, "/task/", parent, "/children"));
  for (std::string child; children >> child;) {
    std::ifstream environment(absl::StrCat("/proc/", child, "/environ"));
    for (std::string entry; std::getline(environment, entry, '\0');) {
      if (entry == first) return true;
    }
  }
  return false;
}

// Whether an error that occurs before ranks meet is this process's to report. The launch's first
// process reports without this check. The first of a host leaves the launcher time to end the job,
// since on a busy machine the launch's first may start late. It does not wait under PMI: Hydra does
// not end processes that have not started MPI. Any other process has an error of its own if the
// first of its host still runs.
bool Speaks(const LaunchInfo& launch) {
  if (launch.local_rank == 0) {
    if (launch.source != LaunchSource::kPmi) absl::SleepFor(absl::Seconds(5));
    return true;
  }
  const std::string first = absl::StrCat(LocalRankNameOf(launch.source), "=0");
  for (int i = 0; i < 40; ++i) {
    absl::SleepFor(absl::Milliseconds(50));
    if (!FirstOfHostRuns(first)) return false;
  }
  return true;
}

// A device or a pipe: what is written goes through it and replaces nothing.
bool WrittenInPlace(const std::string& path) {
  std::error_code ignored;
  const std::filesystem::file_status there = std::filesystem::status(path, ignored);
  return std::filesystem::exists(there) && !is_regular_file(there) && !is_directory(there);
}

// "moe <command>: <message>", without a command "moe: <message>": one line on standard error,
// whatever a library put into the message.
void PrintError(absl::string_view command, const absl::Status& status) {
  const std::string who = absl::StrCat("moe", command.empty() ? "" : " ", command, ":");
  PrintAside(absl::StrCat(Painted(who, Color::kRed, stderr), " ",
                          Printable(absl::StrReplaceAll(status.message(), {{"\n", " "}})), "\n"));
}

namespace fs = std::filesystem;

bool SameFile(const std::string& a, const std::string& b) {
  if (a.empty() || b.empty()) return false;
  std::error_code neither_exists, ignored;
  if (WrittenInPlace(a)) return false;  // nothing is overwritten
  if (fs::equivalent(a, b, neither_exists)) return true;
  if (!neither_exists) return false;
  const fs::path of_a = fs::weakly_canonical(fs::absolute(a, ignored), ignored);
  return !of_a.empty() && of_a == fs::weakly_canonical(fs::absolute(b, ignored), ignored);
}

}  // namespace

absl::Status Print(const std::string& text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0) {
    return absl::OkStatus();
  }
  return WithExitCode(absl::InternalError("cannot write to standard output"), ExitCode::kIo);
}

void PrintAside(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

void PrintWarnings(absl::string_view command, absl::Span<const std::string> warnings) {
  for (const std::string& warning : warnings) {
    Say(stderr, "moe {}: {} {}\n", std::string(command),
        Painted("warning:", Color::kYellow, stderr), Printable(warning));
  }
}

absl::Status RunLaunch(absl::string_view command, const Settings& settings, const Launch& launch,
                       absl::Span<const std::string> warnings,
                       absl::FunctionRef<absl::Status()> run) {
  if (launch.rank() == 0 && !settings.on("quiet")) {
    PrintWarnings(command, warnings);
    PrintWarnings(command, launch.plan.launch.warnings);
  }
  absl::Status status = run();
  if (!status.ok() && !launch.plan.processes()) status.SetPayload(kOwnJob, absl::Cord());
  return status;
}

absl::Status PrintOnce(const Invocation& invocation, const std::string& text) {
  return invocation.first() ? Print(text) : absl::OkStatus();
}

ExitCode EndCommand(const Invocation& invocation, absl::string_view command,
                    const absl::Status& status) {
  const bool alone = invocation.first() || status.GetPayload(kOwnJob).has_value();
  if (status.ok() || (!alone && !Speaks(invocation.launch))) return ExitCodeOf(status);
  if (alone) {
    PrintError(command, status);
    return ExitCodeOf(status);
  }
  const LaunchInfo& launch = invocation.launch;
  const absl::Status own =
      WithExitCode(absl::Status(status.code(), absl::StrCat("rank ", launch.rank, " on host ",
                                                            HostName(), ": ", status.message())),
                   ExitCodeOf(status));
  // The other ranks wait for this one, and some launchers do not end them: it meets them to end the
  // job.
  if (HasBackend(Backend::kMpi) && launch.source != LaunchSource::kTorchrun) {
    const Launch world = {.plan = {.backend = Backend::kMpi,
                                   .meeting = Meeting::kMpi,
                                   .ranks = launch.size,
                                   .launch = launch}};
    (void)RunRanks(RankOptions(world, kMeetingTime, std::string(command)),
                   [&](std::unique_ptr<Communicator> /*world*/) { return own; });
  }
  PrintError(command, own);
  return ExitCodeOf(status);
}

ExitCode RunWithRanks(
    const Invocation& invocation, const char* command, const CommandHelp& help,
    ComputesOn computes_on,
    absl::FunctionRef<absl::Status(const Settings& settings, const Launch& launch)> run) {
  const auto whole = [&]() -> absl::Status {
    std::vector<std::string> warnings;
    Table rows;
    for (const Setting& row : help.settings) rows.Add(row);
    Settings settings(rows);
    MOE_RETURN_IF_ERROR(LoadSettings(invocation.args, invocation.environment, settings, warnings));
    if (settings.on("help")) return PrintOnce(invocation, HelpText(help));
    if (settings.on("print-config")) return PrintOnce(invocation, PrintSettings(settings));
    MOE_ASSIGN_OR_RETURN(const Launch launch,
                         PlanLaunch(settings, invocation.environment, computes_on));
    if (computes_on == ComputesOn::kAnyDevice) MOE_RETURN_IF_ERROR(CheckDevices(launch, settings));
    return RunLaunch(command, settings, launch, warnings, [&] { return run(settings, launch); });
  };
  return EndCommand(invocation, command, whole());
}

RunOptions RankOptions(const Launch& launch, absl::Duration timeout, std::string command) {
  // An error that all ranks see at once: under MPI one rank of a host reports it, otherwise every
  // rank would.
  const bool first =
      launch.rank() == (launch.plan.meeting == Meeting::kMpi ? launch.plan.launch.local_rank : 0);
  auto report = [first, command = std::move(command)](const absl::Status& status) {
    // Reports of the first host, or of the first rank, suffice: they end the other ranks, which
    // wait.
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
  return named;
}

absl::Status WriteError(absl::string_view flag, const std::string& path,
                        const absl::Status& status) {
  if (status.ok()) return status;
  const absl::Status named = Prefixed(flag, status);
  if (absl::IsResourceExhausted(status)) return named;
  // A folder that exists and takes no files (/proc) also reports that nothing is there.
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code ignored;
  const bool absent = absl::IsNotFound(status) && !folder.empty() &&
                      !std::filesystem::is_directory(folder, ignored);
  if (absent || absl::IsInvalidArgument(status)) return named;
  return WithExitCode(named, ExitCode::kIo);
}

absl::Status WriteFile(absl::string_view flag, const std::string& path, absl::string_view text) {
  auto file = WholeFile::Create(path);
  absl::Status status = file.status();
  if (status.ok()) status = file->Append(text);
  if (status.ok()) status = file->Commit();
  return WriteError(flag, path, status);
}

absl::Status CheckWritable(absl::string_view flag, const std::string& path) {
  if (!WrittenInPlace(path)) return WriteError(flag, path, WholeFile::Create(path).status());
  // A pipe is not opened before there is something to write: its reader would see it end.
  if (::access(path.c_str(), W_OK) == 0) return absl::OkStatus();
  return Prefixed(flag, FileError("write", path, errno, FileFault::kWrite));
}

absl::Status CheckOutputPaths(absl::Span<const FlagPath> inputs,
                              absl::Span<const FlagPath> outputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    const FlagPath& output = outputs[i];
    const auto check = [&](absl::Span<const FlagPath> others) -> absl::Status {
      for (const FlagPath& other : others) {
        if (!SameFile(output.path, other.path)) continue;
        return WrongFlag(output.flag, output.path, absl::StrCat("another file than ", other.flag));
      }
      return absl::OkStatus();
    };
    MOE_RETURN_IF_ERROR(check(inputs));
    MOE_RETURN_IF_ERROR(check(outputs.first(i)));
  }
  return absl::OkStatus();
}

}  // namespace moe::cli
