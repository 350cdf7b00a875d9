// moe doctor: what this build and machine have, and what will be slow here.
#include <algorithm>
#include <string>

#include <absl/strings/str_cat.h>
#include <fmt/format.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/program.h"
#include "moe/cli/base/settings.h"
#include "moe/cli/base/terminal.h"
#include "moe/cli/bench/tables.h"
#include "moe/cli/doctor/machine_facts.h"

namespace moe::cli {
namespace {

constexpr char kHead[] =
    R"(usage: moe doctor [--ranks R] [-o FORM]

What this build and this machine have, and what will be slow or fail with R ranks here, each with a
remedy. Starts nothing but mpirun --version.

  ok    as it should be
  note  worth knowing
  slow  works, but slower than it could
  bad   something will not work

  moe doctor
  moe doctor --ranks 8 -o json
)";

constexpr char kTail[] = R"(
Exit codes: 0 no finding is bad, 1 one is, 2 usage.
)";

Table DoctorSettings() {
  Table t;
  t.Group("Flags");
  t.Add("--ranks R", {Kind::kInteger, "4"},
        "ranks to judge for; default under a launcher: those that it started here");
  AddFormSettings(t);
  AddHelpSettings(t);
  return t;
}

const char* NameOf(Verdict verdict) {
  constexpr const char* kNames[] = {"ok", "note", "slow", "bad"};
  return kNames[static_cast<int>(verdict)];
}

std::string Text(const std::vector<Finding>& findings, const std::string& form, std::FILE* out) {
  if (const auto machine_form = bench::TableFormOf(form)) {
    std::vector<std::vector<bench::Cell>> rows;
    for (const Finding& f : findings)
      rows.push_back({NameOf(f.verdict), f.subject, f.what, f.remedy});
    return bench::WriteTable(*machine_form, {"verdict", "subject", "finding", "remedy"}, rows);
  }
  std::string text;
  for (const Finding& f : findings) {
    const std::string verdict = fmt::format("{:<5}", NameOf(f.verdict));
    const Color color = f.verdict == Verdict::kBad    ? Color::kRed
                        : f.verdict == Verdict::kSlow ? Color::kYellow
                                                      : Color::kGreen;
    text += fmt::format("{} {:<10} {}\n", Painted(verdict, color, out), f.subject, f.what);
    if (!f.remedy.empty()) text += fmt::format("{:16} -> {}\n", "", f.remedy);
  }
  return text;
}

// --ranks, else those that a launcher started on this machine.
absl::StatusOr<int> RanksHere(const Settings& settings, const Invocation& invocation) {
  const int ranks = settings.integer("ranks");
  if (ranks < 1) {
    return WrongFlag("--ranks", absl::StrCat(ranks), "at least 1");
  }
  const LaunchInfo& launch = invocation.launch;
  if (settings.given("ranks") || launch.source == LaunchSource::kNone) return ranks;
  if (launch.local_size > 0) return launch.local_size;
  return launch.size > 0 ? launch.size : ranks;
}

absl::Status Run(const Invocation& invocation) {
  Settings settings(DoctorSettings());
  MOE_RETURN_IF_ERROR(LoadFlags(invocation.args, settings));
  if (settings.on("help")) return Print(HelpText(DoctorHelp()));
  if (settings.on("print-config")) return Print(PrintSettings(settings));
  MOE_ASSIGN_OR_RETURN(const int ranks, RanksHere(settings, invocation));
  const auto findings = Diagnose(GatherMachineFacts(invocation.environment), ranks);
  MOE_RETURN_IF_ERROR(Print(Text(findings, settings.text("output"), stdout)));
  if (!settings.empty("output-stderr")) {
    Say(stderr, "{}", Text(findings, settings.text("output-stderr"), stderr));
  }
  const auto bad = std::count_if(findings.begin(), findings.end(), [](const Finding& finding) {
    return finding.verdict == Verdict::kBad;
  });
  if (bad == 0) return absl::OkStatus();
  return CheckFailed(absl::StrCat(Counted(bad, "finding"), bad == 1 ? " is" : " are", " bad"));
}

}  // namespace

CommandHelp DoctorHelp() {
  return {.head = kHead, .settings = DoctorSettings().rows(), .tail = kTail};
}

ExitCode DoctorCommand(const Invocation& invocation) {
  if (!invocation.first()) return ExitCode::kOk;
  return EndCommand(invocation, "doctor", Run(invocation));
}

}  // namespace moe::cli
