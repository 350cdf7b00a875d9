#include "moe/cli/manual/manual_text.h"

#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_replace.h>
#include <absl/strings/str_split.h>
#include <absl/strings/strip.h>

namespace moe::cli {

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

std::string ManualTitle(absl::string_view page, absl::string_view version) {
  return absl::StrCat(".TH ", ManualEscaped(absl::AsciiStrToUpper(page)), " 1 \"\" \"moe ", version,
                      "\" \"Commands of moe\"\n.nh\n.ad l\n");
}

std::string ManualSection(absl::string_view heading) {
  return absl::StrCat(".SH ", heading, "\n");
}

std::string ManualSubsection(absl::string_view heading) {
  return absl::StrCat(".SS ", ManualEscaped(heading), "\n");
}

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

std::string ManualEntry(absl::string_view tag, absl::string_view text) {
  return absl::StrCat(".TP\n", tag, "\n", ManualEscaped(text), "\n");
}

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

}  // namespace moe::cli
