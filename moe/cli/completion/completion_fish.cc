#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_replace.h>

#include "moe/cli/completion/completion.h"

namespace moe::cli {
namespace {

constexpr char kHead[] = R"(# Completion of moe in fish, made by: moe completion fish

function __moe_no_command
    test (count (commandline -opc)) -eq 1
end

function __moe_command # NAME: is it this one
    set -l words (commandline -opc)
    test (count $words) -gt 1; and test $words[2] = $argv[1]
end

function __moe_operand # NAME: does its first argument stand at the cursor
    __moe_command $argv[1]; and test (count (commandline -opc)) -eq 2
end

complete -c moe -f
)";

// In single quotes fish reads a backslash before a quote or a backslash.
std::string Quoted(absl::string_view text) {
  return absl::StrCat("'", absl::StrReplaceAll(text, {{"\\", "\\\\"}, {"'", "\\'"}}), "'");
}

std::string Line(absl::string_view condition, absl::string_view rest, absl::string_view help) {
  return absl::StrCat("complete -c moe -n ", Quoted(condition), " ", rest, " -d ", Quoted(help),
                      "\n");
}

std::string Value(const Setting& setting) {
  if (setting.kind == Kind::kSwitch) return "";
  switch (PathsOf(setting)) {
    case Paths::kFiles:
      return " -r -F";
    case Paths::kFolders:
      return " -x -a '(__fish_complete_directories)'";
    case Paths::kNone:
      break;
  }
  if (setting.words.empty()) return " -x";
  return absl::StrCat(" -x -a ", Quoted(absl::StrJoin(setting.words, " ")));
}

// One call for all spellings: fish then knows that they are one flag.
std::string FlagLine(const Command& command, const Setting& setting) {
  std::vector<std::string> options;
  for (const std::string& flag : Spellings(setting)) {
    const bool longer = flag[1] == '-';
    const bool letter = flag.size() == 2;
    const char* const option = longer ? "-l " : letter ? "-s " : "-o ";
    options.push_back(absl::StrCat(option, flag.substr(longer ? 2 : 1)));
  }
  return Line(absl::StrCat("__moe_command ", command.name),
              absl::StrCat(absl::StrJoin(options, " "), Value(setting)), ShortHelp(setting));
}

}  // namespace

std::string FishCompletion() {
  std::string text = kHead;
  const auto word = [&](absl::string_view condition, const Operands::Word& offered) {
    text += Line(condition, absl::StrCat("-a ", Quoted(offered.name)), offered.help);
  };
  for (const Command& command : Commands()) {
    word("__moe_no_command", {command.name, command.summary});
    word("__moe_operand help", {command.name, command.summary});
  }
  for (const Operands::Word& other : OtherFirstWords()) word("__moe_no_command", other);
  for (const Command& command : Commands()) {
    const CommandHelp help = command.help();
    text += "\n";
    const std::string here = absl::StrCat("__moe_operand ", command.name);
    for (const Operands::Word& operand : help.operands.words) word(here, operand);
    if (help.operands.paths) {
      absl::StrAppend(&text, "complete -c moe -n '__moe_command ", command.name, "' -F\n");
    }
    for (const Setting& setting : help.settings) text += FlagLine(command, setting);
  }
  return text;
}

}  // namespace moe::cli
