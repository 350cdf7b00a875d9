#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>
#include <absl/strings/string_view.h>
#include <fmt/format.h>

#include "moe/cli/base/command.h"

namespace moe::cli {
namespace {

constexpr size_t kWidth = 100;
constexpr size_t kIndent = 40;

// `text` in lines of at most kWidth - kIndent, the first after `lead`.
std::string Wrapped(const std::string& lead, const std::string& text) {
  std::string out = lead;
  size_t column = lead.size();
  if (column + 1 >= kIndent) {
    out += "\n";
    column = 0;
  }
  out += std::string(kIndent - column, ' ');
  column = kIndent;
  for (const absl::string_view word : absl::StrSplit(text, ' ')) {
    if (column > kIndent && column + 1 + word.size() > kWidth) {
      absl::StrAppend(&out, "\n", std::string(kIndent, ' '));
      column = kIndent;
    }
    if (column > kIndent) {
      out += " ";
      ++column;
    }
    absl::StrAppend(&out, word);
    column += word.size();
  }
  return out + "\n";
}

std::string Line(const Setting& s) {
  std::string lead = "  ";
  if (s.letter != 0) absl::StrAppend(&lead, "-", std::string(1, s.letter), ", ");
  absl::StrAppend(&lead, "--", s.name);
  if (!s.alias.empty()) absl::StrAppend(&lead, ", --", s.alias);
  if (!s.value_name.empty()) absl::StrAppend(&lead, " ", s.value_name);
  std::string text = s.help;
  const auto append = [&](const std::string& part) {
    absl::StrAppend(&text, text.empty() ? "" : " ", part);
  };
  if (s.kind == Kind::kWord) {
    const std::string words = absl::StrJoin(s.words, "|");
    const bool fits = words.size() + 2 <= kWidth - kIndent;
    append(absl::StrCat("(", fits ? words : absl::StrJoin(s.words, " | "), ")"));
  }
  if (!s.fallback.empty()) append(absl::StrCat("[", s.fallback, "]"));
  return Wrapped(lead, text);
}

// Every setting below its group's heading: flags, help, words and default.
std::string TableHelp(const std::vector<Setting>& table) {
  std::string out;
  std::string group;
  for (const Setting& s : table) {
    if (s.group != group) absl::StrAppend(&out, "\n", s.group, "\n");
    group = s.group;
    out += Line(s);
  }
  return out;
}

}  // namespace

std::string HelpText(const CommandHelp& help) {
  std::string text = help.head;
  if (!help.operands.words.empty()) absl::StrAppend(&text, "\n", help.operands.heading, "\n");
  for (const Operands::Word& word : help.operands.words) {
    text += fmt::format("  {:<14}  {}\n", word.name, word.help);
  }
  return absl::StrCat(text, TableHelp(help.settings), help.tail);
}

}  // namespace moe::cli
