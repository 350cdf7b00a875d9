// moe debug: what dumps of a run's flight recorders say.
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "kernels/base/printable.h"
#include "kernels/base/status_macros.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/program.h"
#include "moe/cli/base/settings.h"
#include "moe/cli/debug/flight.h"

namespace moe::cli {
namespace {

using flight::Difference;
using What = flight::Difference::Kind;

constexpr char kHead[] =
    R"(usage: moe debug flight DIR [-o FORM]

Reads flight.rank<R>.jsonl in DIR, the last collectives of each rank of a run (moe train
--flight-dir, docs/reliability.md), and names the first one on which ranks differ, the ranks that
have not entered it and where they were, and the rank that came last most.

  moe debug flight run/flight
  moe debug flight run/checkpoints -o json
)";

constexpr char kTail[] = R"(
first    of the collectives that differ, the one that was entered first: its operation, its number
         in its group, and what it belongs to. "other call": the ranks have another operation, type
         or size; "missing": they have not entered it; "open": all have, and it has not ended there,
         or where one is known to have failed, that rank
last     the rank that came after the others by the most seconds, summed over the collectives that
         all dumps hold and which it entered last
reason   why the dumps were made: what failed, "end" or "SIGUSR2"
failed   the rank that failed of itself, where a reason says so
-o json: an object with ranks, without_dump, reasons, failed (null: unknown), difference (null:
none) and straggler (null: none).
Dumps of runs before the newest are left out.

Exit codes: 0 ranks agree, 1 they differ, 2 usage or a path that is not there, 3 malformed dumps,
4 a read or write failed, 5 out of memory.
)";

constexpr Choice<What> kKindWords[] = {
    {"other call", What::kOtherCall}, {"missing", What::kMissing}, {"open", What::kOpen}};

Table DebugSettings() {
  Table t;
  t.Group("Flags");
  t.Add("-o, --output FORM", {Kind::kWord, "table", {"table", "json"}},
        "of the result: lines, or one JSON object on a line");
  AddHelpSettings(t);
  return t;
}

std::string ListOf(const std::vector<int>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

std::string TextOf(const flight::Analysis& analysis) {
  std::string text = absl::StrCat("dumps    of ", ListOf(analysis.ranks), "\n");
  if (!analysis.without_dump.empty()) {
    absl::StrAppend(&text, "no dump  of ", ListOf(analysis.without_dump), "\n");
  }
  for (const std::string& reason : analysis.reasons)
    absl::StrAppend(&text, "reason   ", reason, "\n");
  if (analysis.failed >= 0) absl::StrAppend(&text, "failed   ", analysis.failed_where, "\n");
  const Difference& difference = analysis.difference;
  if (difference.kind == What::kNone) {
    text += "first    none: all ranks have the same collectives\n";
  } else {
    absl::StrAppend(&text, "first    ", flight::TextOf(difference.call), ", group of ",
                    ListOf(difference.members), "\n", NameOf(difference.kind, kKindWords), ": ",
                    ListOf(difference.ranks), "\n");
    for (const std::string& where : difference.where)
      absl::StrAppend(&text, "         ", where, "\n");
  }
  const flight::Straggler& straggler = analysis.straggler;
  if (straggler.rank >= 0) {
    text += fmt::format("last     rank {}, in {} of {} collectives, {:.3f} s after the others\n",
                        straggler.rank, straggler.last, straggler.calls, straggler.seconds);
  }
  return Printable(text);
}

std::string JsonOf(const flight::Analysis& analysis) {
  using Json = nlohmann::ordered_json;
  Json object = {{"ranks", analysis.ranks},
                 {"without_dump", analysis.without_dump},
                 {"reasons", analysis.reasons}};
  object["failed"] = analysis.failed < 0 ? Json() : Json(analysis.failed);
  const Difference& difference = analysis.difference;
  const flight::Call& call = difference.call;
  object["difference"] = nullptr;
  if (difference.kind != What::kNone) {
    object["difference"] = {{"kind", NameOf(difference.kind, kKindWords)},
                            {"group", call.group},
                            {"members", difference.members},
                            {"sequence", call.sequence},
                            {"operation", call.operation},
                            {"site", call.site},
                            {"layer", call.layer},
                            {"step", call.step},
                            {"ranks", difference.ranks},
                            {"where", difference.where}};
  }
  const flight::Straggler& straggler = analysis.straggler;
  object["straggler"] = nullptr;
  if (straggler.rank >= 0) {
    object["straggler"] = {{"rank", straggler.rank},
                           {"last", straggler.last},
                           {"calls", straggler.calls},
                           {"seconds", straggler.seconds}};
  }
  return object.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

absl::Status Run(const Invocation& invocation) {
  Settings settings(DebugSettings());
  const auto [flags, operands] = SplitOperands(invocation.args, settings);
  MOE_RETURN_IF_ERROR(LoadFlags(flags, settings));
  if (settings.on("help")) return Print(HelpText(DebugHelp()));
  if (settings.on("print-config")) return Print(PrintSettings(settings));
  if (operands.size() != 2 || operands[0] != "flight") {
    return absl::InvalidArgumentError("expected moe debug flight DIR");
  }
  const auto dumps = flight::ReadDumps(operands[1]);
  MOE_RETURN_IF_ERROR(InputError("DIR", dumps.status()));
  const flight::Analysis analysis = flight::Analyse(*dumps);
  MOE_RETURN_IF_ERROR(Print(settings.is("output", "json") ? JsonOf(analysis) : TextOf(analysis)));
  if (analysis.difference.kind == What::kNone) return absl::OkStatus();
  return CheckFailed(absl::StrCat("ranks differ on ", flight::TextOf(analysis.difference.call),
                                  ": ", absl::StrJoin(analysis.difference.where, "; ")));
}

}  // namespace

CommandHelp DebugHelp() {
  return {.head = kHead,
          .operands = Operands{.heading = "Actions",
                               .words = {{"flight", "the first collective on which ranks differ"}},
                               .paths = true},
          .settings = DebugSettings().rows(),
          .tail = kTail};
}

ExitCode DebugCommand(const Invocation& invocation) {
  if (!invocation.first()) return ExitCode::kOk;
  return EndCommand(invocation, "debug", Run(invocation));
}

}  // namespace moe::cli
