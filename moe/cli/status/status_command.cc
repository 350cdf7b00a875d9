// moe status: where runs of moe train are.
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_replace.h>
#include <absl/time/clock.h>
#include <fmt/format.h>

#include "kernels/base/printable.h"
#include "kernels/base/status_macros.h"
#include "moe/checkpoint/reader.h"
#include "moe/checkpoint/step_folders.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/program.h"
#include "moe/cli/base/settings.h"
#include "moe/cli/base/terminal.h"
#include "moe/cli/measure/tables.h"
#include "moe/cli/status/run_view.h"
#include "moe/io/file.h"

namespace moe::cli {
namespace {

namespace fs = std::filesystem;
using measure::Cell;
using measure::Fields;

constexpr char kHead[] =
    R"(usage: moe status DIR... [--stalled-after SECONDS] [-o FORM]

Where runs of moe train are. DIR is a run's folder of --out or of --save: the run writes status.json
there when it begins, then at most once a second, and when it ends. Reads files alone, on any host
that sees them, and disturbs no run.

  running   it makes progress
  stalled   it has made none for --stalled-after
  lost      its process has ended without a word: killed, out of memory, the host was restarted
  complete  it took all its steps
  stopped   on request; with --save it can be resumed
  failed    error has its last line, and exit_code its code
  none      of several DIRs: no status can be read in this one, and error says why

  moe status run
  moe status runs/* -o json
  moe status run >/dev/null || echo 'look after it'
)";

constexpr char kTail[] = R"(
Keys of the forms: run (DIR), state, exit_code (of a run that has ended), error, step (the last one
taken), steps, first_step (that it resumed after), loss, val_loss (the last ones), tokens_per_s and
step_ms (of the last step), progress_age_s (since its last progress), eta_s (steps to take, at
step_ms), saved_step (the newest checkpoint), saved_age_s, ranks, hosts, backend, host and pid (of
rank 0), user, since (UTC), command, version, commit. What is not known is null.

lost is found on the host of rank 0; elsewhere such a run is stalled. Ages are by the clock of this
host. A run that is refused, as for a folder that another run holds, leaves status.json as it was.

Exit codes: 0 all are running or complete, 1 one has failed, 2 usage or no run in DIR, 3 its
status.json is damaged, 4 a read failed, 7 one is lost, 8 one is stalled, 11 one was stopped. Of
several runs the first of 1, 7, 8 that holds, then that of the first DIR with state none, then 11.
)";

constexpr char kStalledAfter[] = "stalled-after";

Table StatusSettings() {
  Table t;
  t.Group("Flags");
  t.Add("--stalled-after SECONDS", {Kind::kReal, "auto", {"auto"}},
        "longest time without progress; auto: 120, or 10 steps if that is longer")
      .FlagOnly();
  AddFormSettings(t);
  AddHelpSettings(t);
  return t;
}

// "; runs are in 'a', 'b'" of the folders below that have a status.
std::string RunsBelow(const std::string& folder) {
  std::vector<std::string> found;
  std::error_code ignored;
  for (fs::directory_iterator entry(folder, ignored), end; entry != end; entry.increment(ignored)) {
    const std::string path = entry->path().string();
    if (fs::exists(StatusPathIn(path), ignored)) {
      found.push_back(absl::StrCat("'", Printable(path), "'"));
    }
  }
  std::sort(found.begin(), found.end());
  constexpr size_t kNamed = 5;
  const bool more = found.size() > kNamed;
  if (more) found.resize(kNamed);
  if (found.empty()) return "";
  return absl::StrCat(": runs are in ", absl::StrJoin(found, ", "), more ? " and others" : "");
}

absl::StatusOr<RunStatus> ReadStatus(const std::string& path) {
  std::error_code ignored;
  std::string folder = path;
  if (fs::is_regular_file(path, ignored)) {  // run/metrics.jsonl, run/status.json
    folder = fs::path(path).parent_path().string();
    if (folder.empty()) folder = ".";
  }
  MOE_ASSIGN_OR_RETURN(const bool is_folder, IsFolder(folder));
  if (!is_folder) {
    return absl::NotFoundError(
        absl::StrCat("DIR is '", path, "', expected a folder that is there"));
  }
  const std::string file = StatusPathIn(folder);
  SmallFile text;
  if (const std::error_code error = RealFileSystem().ReadSmall(file, text)) {
    if (error.value() != ENOENT) return FileError("read", file, error.value(), FileFault::kRead);
    std::string runs = RunsBelow(folder);
    if (runs.empty()) {
      runs = ", expected the folder of --out or --save of a run of moe train that has begun";
    }
    return absl::NotFoundError(
        absl::StrCat("DIR is '", path, "', which has no ", kStatusName, runs));
  }
  auto status = ParseStatus(text.text);
  if (status.ok() || absl::IsResourceExhausted(status.status())) return status;
  return WithExitCode(
      absl::DataLossError(absl::StrCat("'", file, "' ", status.status().message(),
                                       ": remove it; a run that goes on writes it anew")),
      ExitCode::kBadInput);
}

// Finds the newest checkpoint by its manifest alone; one that is damaged has no time.
SavedStep NewestSaved(const std::string& folder) {
  SavedStep saved;
  if (folder.empty()) return saved;
  const auto steps = ListSteps(folder);
  if (!steps.ok() || steps->empty()) return saved;
  saved.step = steps->back();
  const auto manifest = ReadManifest(absl::StrCat(folder, "/", StepFolderName(saved.step)));
  absl::Time created;
  if (manifest.ok() && absl::ParseTime(absl::RFC3339_sec, manifest->created, &created, nullptr)) {
    saved.created = created;
  }
  return saved;
}

std::optional<double> SecondsOf(absl::Duration duration) {
  if (duration == absl::InfiniteDuration()) return std::nullopt;
  return std::max(0.0, absl::ToDoubleSeconds(duration));
}

Cell CellOf(const std::optional<double>& value) {
  return value.has_value() ? Cell(*value) : Cell();
}

// `row` without what only a status tells.
Fields WithoutStatus(const RunView& view, Fields row) {
  for (measure::Field& field : row) {
    if (field.key == "run" || field.key == "state") continue;
    const bool is_text = field.value.is_text();
    field.value = is_text ? Cell::TextIf(false, "") : Cell();
    if (field.key == "error") field.value = std::string(view.read.message());
  }
  return row;
}

Fields FieldsOf(const RunView& view) {
  const RunStatus& s = view.status;
  const bool ended = s.state != RunState::kRunning;
  return {{"run", view.path},
          {"state", NameOf(view.condition, kConditionWords)},
          {"exit_code", ended ? Cell(int64_t{s.exit_code}) : Cell()},
          {"error", Cell::TextIf(!s.error.empty(), s.error)},
          {"step", s.step},
          {"steps", s.steps},
          {"first_step", s.first_step},
          {"loss", CellOf(s.loss)},
          {"val_loss", CellOf(s.val_loss)},
          {"tokens_per_s", s.step_ms > 0 ? Cell(s.tokens_per_s) : Cell()},
          {"step_ms", s.step_ms > 0 ? Cell(s.step_ms) : Cell()},
          {"progress_age_s", CellOf(SecondsOf(view.age))},
          {"eta_s", CellOf(SecondsOf(view.eta))},
          {"saved_step", view.saved.step >= 0 ? Cell(view.saved.step) : Cell()},
          {"saved_age_s", CellOf(SecondsOf(view.saved_age))},
          {"ranks", int64_t{s.ranks}},
          {"hosts", int64_t{s.hosts}},
          {"backend", s.backend},
          {"host", s.process.host},
          {"pid", s.process.pid},
          {"user", s.user},
          {"since", s.process.since},
          {"command", s.command},
          {"version", s.version},
          {"commit", s.commit}};
}

Fields RowOf(const RunView& view) {
  Fields row = FieldsOf(view);
  return view.condition == Condition::kNone ? WithoutStatus(view, std::move(row)) : row;
}

Color ColorOf(Condition condition) {
  switch (condition) {
    case Condition::kRunning:
    case Condition::kComplete:
      return Color::kGreen;
    case Condition::kStalled:
    case Condition::kStopped:
      return Color::kYellow;
    case Condition::kLost:
    case Condition::kFailed:
    case Condition::kNone:
      break;
  }
  return Color::kRed;
}

std::string AgeText(absl::Duration age) {
  return absl::StrCat(ClockText(std::max(0.0, absl::ToDoubleSeconds(age))), " ago");
}

// Text of a file or of the command line, within a line for people.
std::string InLine(absl::string_view text) {
  return absl::StrReplaceAll(Printable(text), {{"\n", " "}, {"\t", " "}});
}

// Lines for people. The file is anyone's: none of its texts may control the terminal.
std::string TextOf(const RunView& view, std::FILE* out) {
  const RunStatus& s = view.status;
  const std::string condition =
      Painted(NameOf(view.condition, kConditionWords), ColorOf(view.condition), out);
  if (view.condition == Condition::kNone) {
    return fmt::format("{}: {}: {}\n", InLine(view.path), condition, InLine(view.read.message()));
  }
  std::string text =
      fmt::format("{}: {}, step {}/{}", InLine(view.path), condition, s.step, s.steps);
  if (view.eta != absl::InfiniteDuration()) {
    text += fmt::format(", eta {}", ClockText(absl::ToDoubleSeconds(view.eta)));
  }
  text += fmt::format("\n  progress    {}", AgeText(view.age));
  if (s.loss.has_value()) {
    text += fmt::format(": loss {:.4f}, {:.1f} ms, {} tok/s", *s.loss, s.step_ms,
                        WithCommas(std::llround(s.tokens_per_s)));
  }
  text += "\n  checkpoint  ";
  if (s.save.empty()) {
    text += "nothing is saved: --save DIR would";
  } else if (view.saved.step < 0) {
    text += fmt::format("none yet in {}", InLine(s.save));
  } else {
    text += fmt::format("of step {}", view.saved.step);
    if (view.saved_age != absl::InfiniteDuration()) {
      text += fmt::format(", {}", AgeText(view.saved_age));
    }
    text += fmt::format(", in {}", InLine(s.save));
  }
  text += fmt::format("\n  ranks       {} on {}, {}; rank 0 is process {} on {}, by {} since {}\n",
                      s.ranks, Counted(s.hosts, "host"), InLine(s.backend), s.process.pid,
                      InLine(s.process.host), InLine(s.user), InLine(s.process.since));
  if (s.state != RunState::kRunning && s.state != RunState::kComplete) {
    text += fmt::format("  exit code   {}: {}\n", s.exit_code, InLine(s.error));
  }
  return text;
}

std::string Text(const std::vector<RunView>& views, const std::string& form, std::FILE* out) {
  if (const auto machine_form = measure::TableFormOf(form)) {
    std::vector<Fields> rows;
    for (const RunView& view : views) rows.push_back(RowOf(view));
    return measure::WriteTable(*machine_form, measure::KeysOf(rows.front()), rows);
  }
  std::string text;
  for (const RunView& view : views) text += TextOf(view, out);
  return text;
}

// The worst condition as the end of the command.
absl::Status Verdict(const std::vector<RunView>& views) {
  // The code of kNone is that of the first run's error.
  constexpr std::pair<Condition, ExitCode> kWorst[] = {{Condition::kFailed, ExitCode::kCheckFailed},
                                                       {Condition::kLost, ExitCode::kPeer},
                                                       {Condition::kStalled, ExitCode::kTimeout},
                                                       {Condition::kNone, ExitCode::kUsage},
                                                       {Condition::kStopped, ExitCode::kStopped}};
  for (const auto& [condition, code] : kWorst) {
    std::vector<std::string> paths;
    for (const RunView& view : views) {
      if (view.condition != condition) continue;
      if (condition == Condition::kNone) return view.read;
      paths.push_back(absl::StrCat("'", view.path, "'"));
    }
    if (paths.empty()) continue;
    return WithExitCode(absl::InternalError(absl::StrCat(NameOf(condition, kConditionWords), ": ",
                                                         absl::StrJoin(paths, ", "))),
                        code);
  }
  return absl::OkStatus();
}

absl::Status Run(const Invocation& invocation) {
  Settings settings(StatusSettings());
  const auto [flags, operands] = SplitOperands(invocation.args, settings);
  MOE_RETURN_IF_ERROR(LoadFlags(flags, settings));
  if (settings.on("help")) return Print(HelpText(StatusHelp()));
  if (settings.on("print-config")) return Print(PrintSettings(settings));
  if (operands.empty()) {
    return absl::InvalidArgumentError(
        "no DIR, expected moe status DIR...: the folder of --out or --save of a run");
  }
  std::optional<absl::Duration> limit;
  if (!settings.is(kStalledAfter, "auto")) {
    const double seconds = settings.real(kStalledAfter);
    if (seconds <= 0) return WrongValue(settings, kStalledAfter, "more than 0, or auto");
    limit = absl::Seconds(seconds);
  }
  std::vector<RunView> views;
  for (const std::string& path : operands) {
    auto status = ReadStatus(path);
    if (!status.ok()) {
      if (operands.size() == 1) return status.status();
      RunView& view = views.emplace_back();
      view.path = path;
      view.condition = Condition::kNone;
      view.read = status.status();
      continue;
    }
    const Sign sign = SignOf(status->process);
    SavedStep saved = NewestSaved(status->save);
    views.push_back(ViewOf(path, *std::move(status), sign, saved, limit, absl::Now()));
  }
  MOE_RETURN_IF_ERROR(Print(Text(views, settings.text("output"), stdout)));
  if (!settings.empty("output-stderr")) {
    Say(stderr, "{}", Text(views, settings.text("output-stderr"), stderr));
  }
  return Verdict(views);
}

}  // namespace

RunView ViewOf(std::string path, RunStatus status, Sign sign, const SavedStep& saved,
               std::optional<absl::Duration> limit, absl::Time now) {
  RunView view = {.path = std::move(path), .status = std::move(status), .saved = saved};
  const RunStatus& s = view.status;
  view.age = now - s.updated;
  if (saved.created != absl::InfinitePast()) view.saved_age = now - saved.created;
  const absl::Duration step = absl::Milliseconds(s.step_ms);
  switch (s.state) {
    case RunState::kComplete:
      view.condition = Condition::kComplete;
      return view;
    case RunState::kStopped:
      view.condition = Condition::kStopped;
      return view;
    case RunState::kFailed:
      view.condition = Condition::kFailed;
      return view;
    case RunState::kRunning:
      break;
  }
  const absl::Duration longest = limit.value_or(std::max(absl::Seconds(120), 10 * step));
  if (sign == Sign::kEnded) {
    view.condition = Condition::kLost;
  } else if (view.age > longest) {
    view.condition = Condition::kStalled;
  } else if (s.step_ms > 0) {
    view.eta = step * std::max(s.steps - s.step, int64_t{0});
  }
  return view;
}

CommandHelp StatusHelp() {
  return {.head = kHead,
          .operands = Operands{.heading = "", .words = {}, .paths = true},
          .settings = StatusSettings().rows(),
          .tail = kTail};
}

ExitCode StatusCommand(const Invocation& invocation) {
  if (!invocation.first()) return ExitCode::kOk;
  return EndCommand(invocation, "status", Run(invocation));
}

}  // namespace moe::cli
