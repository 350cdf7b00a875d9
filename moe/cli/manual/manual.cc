#include "moe/cli/manual/manual.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_replace.h>
#include <absl/strings/str_split.h>
#include <absl/strings/string_view.h>
#include <absl/strings/strip.h>

namespace moe::cli {
namespace {

// Text as man's macros, for groff and mandoc.

// A paragraph of CommandHelp, by lines.
using Paragraph = std::vector<std::string>;

std::vector<Paragraph> ParagraphsOf(absl::string_view text) {
  std::vector<Paragraph> paragraphs;
  bool within = false;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    const bool empty = absl::StripAsciiWhitespace(line).empty();
    if (!empty && !within) paragraphs.emplace_back();
    if (!empty) paragraphs.back().emplace_back(line);
    within = !empty;
  }
  return paragraphs;
}

// Nothing in it means anything to the formatter. Of one line.
std::string ManualEscaped(absl::string_view text) {
  std::string out = absl::StrReplaceAll(text, {{"\\", "\\e"},
                                               {"-", "\\-"},
                                               {"'", "\\(aq"},
                                               {"`", "\\(ga"},
                                               {"^", "\\(ha"},
                                               {"~", "\\(ti"}});
  // At the start of a line these call macros.
  if (absl::StartsWith(out, ".")) out.insert(0, "\\&");
  return out;
}

std::string ManualTitle(absl::string_view page) {
  return absl::StrCat(".TH ", ManualEscaped(absl::AsciiStrToUpper(page)), " 1 \"\" \"moe ",
                      MOE_VERSION, "\" \"Commands of moe\"\n.nh\n.ad l\n");
}

std::string ManualSection(absl::string_view heading) {
  return absl::StrCat(".SH ", heading, "\n");
}

std::string ManualSubsection(absl::string_view heading) {
  return absl::StrCat(".SS ", ManualEscaped(heading), "\n");
}

// Indented lines as they are, those from the margin filled.
std::string ManualParagraph(const Paragraph& paragraph) {
  std::string out = ".PP\n";
  bool as_it_is = false;
  for (const std::string& line : paragraph) {
    const bool indented = line[0] == ' ';
    if (indented != as_it_is) out += indented ? ".RS 2\n.nf\n" : ".fi\n.RE\n";
    as_it_is = indented;
    const absl::string_view text = indented ? absl::StripPrefix(line, "  ") : line;
    absl::StrAppend(&out, ManualEscaped(text), "\n");
  }
  if (as_it_is) out += ".fi\n.RE\n";
  return out;
}

// An entry with its explanation: `tag` is source, `text` is not.
std::string ManualEntry(absl::string_view tag, absl::string_view text) {
  return absl::StrCat(".TP\n", tag, "\n", ManualEscaped(text), "\n");
}

// "Exit codes: 0 ok, 1 a check failed, ..." in parts. Empty if it is something else.
std::vector<std::pair<std::string, std::string>> ExitCodesOf(const Paragraph& paragraph) {
  std::string text = absl::StrJoin(paragraph, " ");
  absl::string_view rest = text;
  if (!absl::ConsumePrefix(&rest, "Exit codes: ")) return {};
  absl::ConsumeSuffix(&rest, ".");
  std::vector<std::pair<std::string, std::string>> codes;
  for (const absl::string_view part : absl::StrSplit(rest, ", ")) {
    const std::pair<absl::string_view, absl::string_view> words =
        absl::StrSplit(part, absl::MaxSplits(' ', 1));
    const bool code = !words.second.empty() && absl::ascii_isdigit(words.first[0]);
    if (code) {
      codes.emplace_back(words.first, words.second);
    } else if (!codes.empty()) {
      absl::StrAppend(&codes.back().second, ", ", part);
    }
  }
  return codes;
}

// Where a paragraph of the help stands on the page.
enum class Place { kSynopsis, kDescription, kExamples, kEnvironment, kFiles, kExitStatus, kNotes };

Place PlaceOf(const Paragraph& paragraph, bool of_head) {
  const std::string& first = paragraph.front();
  if (absl::StartsWith(first, "usage: ")) return Place::kSynopsis;
  if (absl::StartsWith(first, "  moe ") || absl::StartsWith(first, "  mpirun ")) {
    return Place::kExamples;
  }
  if (absl::StartsWith(first, "Settings: ")) return Place::kEnvironment;
  if (absl::StartsWith(first, "Files")) return Place::kFiles;
  if (absl::StartsWith(first, "Exit codes: ")) return Place::kExitStatus;
  return of_head ? Place::kDescription : Place::kNotes;
}

class Page {
 public:
  explicit Page(const CommandHelp& help) {
    for (const Paragraph& p : ParagraphsOf(help.head)) at_.push_back({PlaceOf(p, true), p});
    for (const Paragraph& p : ParagraphsOf(help.tail)) at_.push_back({PlaceOf(p, false), p});
  }

  // With its heading; empty if no paragraph belongs there.
  std::string Section(Place place, absl::string_view heading) const {
    std::string body;
    for (const auto& [where, paragraph] : at_) {
      if (where == place) body += Body(place, paragraph);
    }
    return body.empty() ? "" : ManualSection(heading) + body;
  }

 private:
  static std::string Body(Place place, const Paragraph& paragraph) {
    if (place == Place::kExitStatus) {
      std::string text;
      for (const auto& [code, meaning] : ExitCodesOf(paragraph)) {
        text += ManualEntry(absl::StrCat("\\fB", code, "\\fR"), meaning);
      }
      return text;
    }
    if (place != Place::kSynopsis) return ManualParagraph(paragraph);
    Paragraph lines = paragraph;
    for (std::string& line : lines) {
      // Below each other as they stand behind "usage: ".
      const size_t margin = std::min(line.size(), std::string("usage: ").size());
      line = absl::StrCat("  ", absl::string_view(line).substr(margin));
    }
    return ManualParagraph(lines);
  }

  std::vector<std::pair<Place, Paragraph>> at_;
};

std::string Option(const Setting& setting) {
  std::vector<std::string> flags;
  for (const std::string& flag : Spellings(setting)) {
    flags.push_back(absl::StrCat("\\fB", ManualEscaped(flag), "\\fR"));
  }
  std::string tag = absl::StrJoin(flags, ", ");
  if (!setting.value_name.empty()) {
    absl::StrAppend(&tag, " \\fI", ManualEscaped(setting.value_name), "\\fR");
  }
  std::string text = setting.help;
  if (setting.kind == Kind::kWord) {
    absl::StrAppend(&text, ". One of ", absl::StrJoin(setting.words, ", "));
  }
  if (!setting.fallback.empty()) absl::StrAppend(&text, ". Default: ", setting.fallback);
  return ManualEntry(tag, text + ".");
}

std::string Options(const std::vector<Setting>& settings) {
  std::string text = ManualSection("OPTIONS");
  std::string group;
  for (const Setting& setting : settings) {
    if (setting.group != group) text += ManualSubsection(setting.group);
    group = setting.group;
    text += Option(setting);
  }
  return text;
}

std::string OperandSection(const Operands& operands) {
  if (operands.words.empty()) return "";
  std::string text = ManualSection(absl::AsciiStrToUpper(operands.heading));
  for (const Operands::Word& word : operands.words) {
    text += ManualEntry(absl::StrCat("\\fB", ManualEscaped(word.name), "\\fR"), word.help);
  }
  return text;
}

std::string Name(absl::string_view page, absl::string_view summary) {
  return absl::StrCat(ManualSection("NAME"), ManualEscaped(page), " \\- ", ManualEscaped(summary),
                      "\n");
}

std::string PageOf(const Command& command) {
  return absl::StrCat("moe-", command.name);
}

std::string SeeAlso(const Command* self) {
  std::vector<std::string> pages;
  if (self != nullptr) pages.emplace_back(".BR moe (1)");
  for (const Command& command : Commands()) {
    if (self != nullptr && absl::string_view(self->name) == command.name) continue;
    pages.push_back(absl::StrCat(".BR ", ManualEscaped(PageOf(command)), " (1)"));
  }
  return absl::StrCat(ManualSection("SEE ALSO"), absl::StrJoin(pages, ",\n"), "\n");
}

// What all commands share, in the form of a command's help.
constexpr char kProgramHead[] = R"(usage: moe COMMAND [flags]
       moe help COMMAND
       moe --version

Runs, measures, checks and trains mixture-of-experts layers whose experts are spread over ranks:
threads of one process (--ranks R), or processes under mpirun, srun or another launcher, which then
says how many there are. Results go to standard output, progress and errors to standard error, of
the first rank alone.

)";

constexpr char kProgramTail[] = R"(
Settings: a flag wins over the environment: MOE_ and the flag's name in capitals, _ for -, without a
leading moe- (MOE_ROUTER_TOPK for --moe-router-topk). A --config file and defaults come after it.
MOE_SIMD is one of the SIMD targets that moe doctor lists (AVX2), instead of the best: to measure
what an older CPU would do. Bits are the same but for EMU128.
NO_COLOR, if set, is for text without colours. Launchers say who a process is by
OMPI_COMM_WORLD_RANK, PMI_RANK, PMIX_RANK, SLURM_PROCID or RANK, and what belongs to each: the first
that is complete wins, a part of one is warned of, and --backend local looks at none.

Files
  metrics.jsonl            in the folder of moe train --out: its start, then an object per step
  FILE of --trace          a time line in the trace event format
  FILE of --record-routing of moe train, for moe bench --routing trace:FILE: JSON lines
  FILE.json                of moe bench -J and -o json: a list of rows
  FILE.jsonl               of moe sweep -J: a row on each line
  report.html              of moe report
  *.safetensors            weights and tensors of moe layer

Exit codes: 0 ok, 1 a check failed: wrong results, below a bound, 2 usage or configuration, or a
path that is not there, 3 malformed input file, 4 a read or write failed: disk full, 5 out of
memory, 6 numbers that are not finite, 7 another rank failed, 8 a deadline passed, 9 the ranks could
not find each other, 10 this build or machine has no such backend.
)";

}  // namespace

std::string ProgramManual() {
  const Page page(
      {.head = absl::StrCat(kProgramHead, kProgramExamples), .settings = {}, .tail = kProgramTail});
  std::string list = ManualSection("COMMANDS");
  for (const Command& command : Commands()) {
    list += ManualEntry(absl::StrCat("\\fB", ManualEscaped(PageOf(command)), "\\fR(1)"),
                        command.summary);
  }
  return absl::StrCat(
      ManualTitle("moe"),
      Name("moe", "mixture-of-experts layers whose experts are spread over ranks"),
      page.Section(Place::kSynopsis, "SYNOPSIS"), page.Section(Place::kDescription, "DESCRIPTION"),
      list, page.Section(Place::kExitStatus, "EXIT STATUS"),
      page.Section(Place::kEnvironment, "ENVIRONMENT"), page.Section(Place::kFiles, "FILES"),
      page.Section(Place::kExamples, "EXAMPLES"), SeeAlso(nullptr));
}

std::string CommandManual(const Command& command) {
  const CommandHelp help = command.help();
  const Page page(help);
  const std::string name = PageOf(command);
  return absl::StrCat(
      ManualTitle(name), Name(name, command.summary), page.Section(Place::kSynopsis, "SYNOPSIS"),
      page.Section(Place::kDescription, "DESCRIPTION"), OperandSection(help.operands),
      Options(help.settings), page.Section(Place::kNotes, "NOTES"),
      page.Section(Place::kExitStatus, "EXIT STATUS"),
      page.Section(Place::kEnvironment, "ENVIRONMENT"), page.Section(Place::kFiles, "FILES"),
      page.Section(Place::kExamples, "EXAMPLES"), SeeAlso(&command));
}

}  // namespace moe::cli
