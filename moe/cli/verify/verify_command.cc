// moe verify: any layout against one rank, and one rank against float64.
#include <cstdio>
#include <string>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/time/clock.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/program.h"
#include "moe/cli/verify/verify_options.h"

namespace moe::cli {
namespace {

constexpr char kCommand[] = "verify";

// kInvalidArgument if a launcher started this process: verify starts its ranks itself.
absl::Status RefuseLauncher(const Invocation& invocation) {
  MOE_ASSIGN_OR_RETURN(const LaunchInfo launch, LaunchOf(invocation.environment));
  if (launch.source == LaunchSource::kNone) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(moe::NameOf(launch.source),
                   " is set: a launcher started this process, but moe verify starts its ranks "
                   "itself; expected to be called without one"));
}

// Started by verify itself, below a launcher of its own.
bool IsWorker(const Invocation& invocation) {
  return invocation.args.size() >= 2 && invocation.args[0] == kWorkerFlag;
}

absl::Status PrintTo(std::FILE* file, const std::string& text) {
  if (file == stdout) return Print(text);
  std::fputs(text.c_str(), file);
  return absl::OkStatus();
}

absl::StatusOr<ExitCode> Verify(const Invocation& invocation, const VerifyOptions& options) {
  const absl::Time start = absl::Now();
  verify::VerifyPlan plan = {.cases = options.cases,
                             .fault = options.fault,
                             .device = options.device,
                             .run = RankOptions({}, options.comm_timeout, kCommand),
                             .nccl_processes = !options.mpirun.empty()};
  for (const verify::ProblemSpec& spec : options.problems) {
    absl::StatusOr<verify::Problem> problem = verify::MakeProblem(spec);
    if (absl::IsFailedPrecondition(problem.status())) {
      return absl::InvalidArgumentError(
          absl::StrCat("--router ", spec.layer.router.gate, ": ", problem.status().message()));
    }
    MOE_RETURN_IF_ERROR(problem.status());
    plan.problems.push_back(*std::move(problem));
  }
  std::vector<std::pair<VerifyWriter, std::FILE*>> writers;
  writers.emplace_back(VerifyWriter(options.output, options, plan.problems, stdout), stdout);
  if (!options.output_stderr.empty()) {
    writers.emplace_back(VerifyWriter(options.output_stderr, options, plan.problems, stderr),
                         stderr);
  }
  for (auto& [writer, file] : writers) MOE_RETURN_IF_ERROR(PrintTo(file, writer.Head()));

  VerifyTotals totals;
  absl::Status printed;
  const auto on_report = [&](const verify::CaseReport& report) {
    totals.Add(report);
    for (auto& [writer, file] : writers) {
      const absl::Status status = PrintTo(file, writer.Rows(report));
      if (printed.ok()) printed = status;
    }
  };
  const auto run_processes = [&](int ranks, const std::vector<verify::Case>& cases) {
    return RunProcesses(invocation, options, plan.problems, ranks, cases);
  };
  MOE_RETURN_IF_ERROR(verify::Verify(plan, run_processes, on_report));
  MOE_RETURN_IF_ERROR(printed);
  for (auto& [writer, file] : writers) MOE_RETURN_IF_ERROR(PrintTo(file, writer.Tail()));
  const std::string summary =
      SummaryText(totals, options, absl::ToDoubleSeconds(absl::Now() - start));
  MOE_RETURN_IF_ERROR(PrintTo(options.output == "table" ? stdout : stderr, summary));
  return totals.failed > 0 ? ExitCode::kCheckFailed : ExitCode::kOk;
}

absl::StatusOr<ExitCode> Run(Invocation invocation) {
  std::string worker_files;
  if (IsWorker(invocation)) {
    worker_files = invocation.args[1];
    invocation.args.erase(invocation.args.begin(), invocation.args.begin() + 2);
  }
  std::vector<std::string> warnings;
  MOE_ASSIGN_OR_RETURN(const Settings settings,
                       LoadVerifySettings(invocation.args, invocation.environment, warnings));
  if (settings.on("help")) {
    return ExitCodeOf(PrintOnce(invocation, HelpText(VerifyHelp())));
  }
  if (settings.on("print-config")) {
    return ExitCodeOf(PrintOnce(invocation, PrintSettings(settings)));
  }
  if (settings.is("inject", "help")) {
    return ExitCodeOf(PrintOnce(invocation, absl::StrJoin(FaultNames(), "\n") + "\n"));
  }
  if (worker_files.empty()) MOE_RETURN_IF_ERROR(RefuseLauncher(invocation));
  MOE_ASSIGN_OR_RETURN(const VerifyOptions options, MakeVerifyOptions(settings));
  if (!worker_files.empty()) {
    MOE_RETURN_IF_ERROR(RunWorker(worker_files, options, invocation));
    return ExitCode::kOk;
  }
  if (!options.quiet) PrintWarnings(kCommand, warnings);
  if (options.needs_processes) {
    if (const absl::Status status = CheckLauncher(options, invocation); !status.ok()) {
      return absl::UnimplementedError(
          absl::StrCat("a transport of processes is named, but ", status.message()));
    }
  }
  return Verify(invocation, options);
}

}  // namespace

ExitCode VerifyCommand(const Invocation& invocation) {
  const absl::StatusOr<ExitCode> code = Run(invocation);
  if (code.ok()) return *code;
  Invocation speaker = invocation;
  if (IsWorker(invocation)) speaker.launch = {};  // what it sees is its own
  return EndCommand(speaker, "verify", code.status());
}

}  // namespace moe::cli
