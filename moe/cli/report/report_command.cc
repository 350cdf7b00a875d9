// moe report: one HTML file from the results of other commands.
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/types/span.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/metrics_file.h"
#include "moe/cli/base/program.h"
#include "moe/cli/base/settings.h"
#include "moe/cli/report/compare.h"
#include "moe/cli/report/format.h"
#include "moe/cli/report/page.h"
#include "moe/cli/report/rows.h"

namespace moe::cli {
namespace {

constexpr char kCommand[] = "report";

constexpr char kHead[] =
    R"(usage: moe report RUN... [--out report.html] [flags]
       moe report --compare A B [RUN...] [flags]

One HTML file, with its charts and tables inside and nothing to load, from any mix of results:

  RUN   the --out folder of moe train or its metrics.jsonl, rows of moe bench -J FILE, rows of
        a sweep or of moe plan (docs/report.md); JSON, or JSON lines. The keys tell which it is.

  moe report run bench.json
  moe report --compare before.json after.json --fail-if 'busbw < 0.9*base'
  moe report --compare before.json after.json --fail-if 'worse_pct > 5'
)";

constexpr char kTail[] =
    R"(
--compare matches rows that agree in everything but their results, and shows for each figure
  change = 100 (b - a) / |a|     noise = t sqrt(s_a^2 + s_b^2), 95 % of differences without a cause
with s the standard error: of repeated rows, of one row its calls' variation (cv), of a training run
from the means of ten stretches of its steps. A change beyond its noise is marked.

--fail-if: column op bound, with && || and parentheses, e.g. 'busbw < 5 && size >= 1048576'. Exit
code 1 if it holds for a row. Columns by kind of row: docs/report.md. With --compare a row is one of
B, as the mean of its repetitions, and a bound may be a multiple of base, A's value of the column:
'busbw < 0.9*base'; what A has not fails nothing. Differences have the columns worse_pct (0 unless
beyond noise) and FIGURE_change_pct.

Exit codes: 0 ok, 1 --fail-if holds, 2 usage or a path that is not there, 3 malformed input, 4 a
write failed, 5 out of memory.
)";

Table ReportSettings() {
  Table t;
  t.Group("Flags");
  t.Add("--out FILE", {Kind::kText, "report.html"}, "the page to write").FlagOnly();
  t.Add("--title TEXT", Kind::kText, "of the page; default: names of the inputs").FlagOnly();
  t.Add("--compare A B", Kind::kPaths, "two inputs: what changed from A to B").FlagOnly();
  t.Add("--fail-if EXPR", Kind::kText, "exit code 1 if it holds for a row").FlagOnly();
  t.Add("-q, --quiet", Kind::kSwitch, "only errors").FlagOnly();
  AddColorSetting(t);
  t.Add("-h, --help", Kind::kSwitch, "this text").FlagOnly();
  return t;
}

struct Inputs {
  std::vector<std::string> flags;
  std::vector<std::string> paths;  // the two of --compare first
  bool comparing = false;
};

// Separates --compare with its two paths, and other paths, from the arguments.
absl::StatusOr<Inputs> Split(absl::Span<const std::string> args, const Settings& settings) {
  Inputs split;
  std::vector<std::string> others;
  for (size_t i = 0; i < args.size(); ++i) {
    if (args[i] != "--compare") {
      others.push_back(args[i]);
      continue;
    }
    const size_t left = args.size() - i - 1;
    if (left < 2 || absl::StartsWith(args[i + 1], "--") || absl::StartsWith(args[i + 2], "--")) {
      return absl::InvalidArgumentError("--compare expects two inputs: --compare A B");
    }
    if (split.comparing) return absl::InvalidArgumentError("--compare is given twice");
    split.comparing = true;
    split.paths = {args[i + 1], args[i + 2]};
    i += 2;
  }
  Arguments arguments = SplitOperands(others, settings);
  split.flags = std::move(arguments.flags);
  for (std::string& path : arguments.operands) split.paths.push_back(std::move(path));
  return split;
}

absl::StatusOr<std::vector<report::Run>> ReadRuns(const std::vector<std::string>& paths) {
  if (paths.empty()) {
    return absl::InvalidArgumentError(
        "no input, expected moe report RUN...: a folder of moe train, or a file of rows");
  }
  const std::vector<std::string> names = report::ShortNames(paths);
  std::vector<report::Run> runs;
  for (size_t i = 0; i < paths.size(); ++i) {
    auto run = report::ReadRun(paths[i]);
    MOE_RETURN_IF_ERROR(InputError("RUN", run.status()));
    run->name = names[i];
    runs.push_back(*std::move(run));
  }
  return runs;
}

std::string TitleOf(const Settings& settings, const std::vector<report::Run>& runs) {
  if (!settings.empty("title")) return settings.text("title");
  if (runs.size() == 1) return runs[0].name;
  if (runs.size() == 2) return absl::StrCat(runs[0].name, ", ", runs[1].name);
  return absl::StrCat(runs[0].name, " and ", runs.size() - 1, " more");
}

// Exit code 1, naming the first rows, if the bound of --fail-if is violated.
absl::Status CheckBound(const Settings& settings, const std::vector<report::CheckRow>& rows,
                        bool comparing) {
  if (settings.empty("fail-if")) return absl::OkStatus();
  const auto base = comparing ? measure::FailIf::Base::kPresent : measure::FailIf::Base::kAbsent;
  auto failed = report::RowsThatFail(settings.text("fail-if"), rows, base);
  if (!failed.ok()) {
    return absl::Status(failed.status().code(),
                        absl::StrCat("--fail-if ", failed.status().message()));
  }
  if (failed->empty()) return absl::OkStatus();
  constexpr size_t kNamed = 3;
  std::string text = absl::StrCat("--fail-if '", settings.text("fail-if"), "' holds for ",
                                  failed->size(), " of ", rows.size(), " rows: ");
  for (size_t i = 0; i < failed->size() && i < kNamed; ++i) {
    absl::StrAppend(&text, i > 0 ? "; " : "", (*failed)[i]);
  }
  if (failed->size() > kNamed) absl::StrAppend(&text, "; ...");
  return CheckFailed(text);
}

absl::Status Run(const Invocation& invocation) {
  Settings settings(ReportSettings());
  MOE_ASSIGN_OR_RETURN(const Inputs arguments, Split(invocation.args, settings));
  MOE_RETURN_IF_ERROR(LoadFlags(arguments.flags, settings));
  if (settings.on("help")) return Print(HelpText(ReportHelp()));
  if (settings.given("compare")) {  // "--compare=A", which Split does not handle
    return absl::InvalidArgumentError("--compare expects two inputs: --compare A B");
  }
  MOE_ASSIGN_OR_RETURN(const std::vector<report::Run> runs, ReadRuns(arguments.paths));
  std::vector<report::Section> sections;
  std::optional<report::Comparison> comparison;
  if (arguments.comparing) {
    auto compared = report::Compare(runs[0], runs[1]);
    if (!compared.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("--compare: ", compared.status().message()));
    }
    comparison = *std::move(compared);
    sections.push_back(report::CompareSection(*comparison));
  }
  sections.push_back(report::TrainSection(runs));
  sections.push_back(report::SweepSection(runs));
  sections.push_back(report::PlanSection(runs));
  sections.push_back(report::BenchSection(runs));
  const std::string page = report::Page(TitleOf(settings, runs), runs, sections);
  // A malformed bound is refused before anything is written.
  const absl::Status bound =
      CheckBound(settings, report::CheckRows(runs, comparison.has_value() ? &*comparison : nullptr),
                 arguments.comparing);
  if (absl::IsInvalidArgument(bound)) return bound;
  const std::string& out = settings.text("out");
  std::vector<FlagPath> inputs;
  for (const std::string& path : arguments.paths) {
    inputs.push_back({"RUN", path});
    inputs.push_back({"RUN", MetricsFile::PathIn(path)});
  }
  MOE_RETURN_IF_ERROR(CheckOutputPaths(inputs, {{"--out", out}}));
  MOE_RETURN_IF_ERROR(WriteFile("--out", out, page));
  if (!settings.on("quiet")) {
    MOE_RETURN_IF_ERROR(Print(absl::StrCat(
        "wrote ", out, ", ", report::BytesText(static_cast<double>(page.size())), "\n")));
  }
  return bound;
}

}  // namespace

CommandHelp ReportHelp() {
  return {.head = kHead,
          .operands = Operands{.heading = "", .words = {}, .paths = true},
          .settings = ReportSettings().rows(),
          .tail = kTail};
}

ExitCode ReportCommand(const Invocation& invocation) {
  if (!invocation.first()) return ExitCode::kOk;
  return EndCommand(invocation, kCommand, Run(invocation));
}

}  // namespace moe::cli
