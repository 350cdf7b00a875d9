#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_replace.h>

#include "moe/cli/completion/completion.h"

namespace moe::cli {
namespace {

constexpr char kHead[] = R"(#compdef moe
# Completion of moe in zsh, made by: moe completion zsh
)";

// As an autoloaded file the text is the function's body; sourced it registers the function.
constexpr char kTail[] = R"(
if [[ $funcstack[1] == _moe ]]; then
  _moe "$@"
else
  compdef _moe moe
fi
)";

// In a specification of _arguments ':' ends a part and ']' the description.
std::string Escaped(absl::string_view text) {
  return absl::StrReplaceAll(text, {{"\\", "\\\\"}, {":", "\\:"}, {"[", "\\["}, {"]", "\\]"}});
}

std::string Action(const Setting& setting) {
  std::vector<std::string> words;
  for (const std::string& word : setting.words) words.push_back(Escaped(word));
  const std::string choice = words.empty() ? "" : absl::StrCat("(", absl::StrJoin(words, " "), ")");
  const Paths paths = PathsOf(setting);
  if (paths == Paths::kNone) return choice.empty() ? " " : choice;
  return paths == Paths::kFiles ? "_files" : "_files -/";
}

// One argument of _arguments per spelling; those of a setting exclude each other.
std::string Specifications(const Setting& setting) {
  const std::vector<std::string> spellings = Spellings(setting);
  std::string value;
  const std::string name = setting.value_name.empty() ? "value" : Escaped(setting.value_name);
  for (int i = 0; i < ValueCount(setting); ++i) {
    absl::StrAppend(&value, ":", name, ":", Action(setting));
  }
  const std::string before =
      setting.kind == Kind::kPaths ? "*" : absl::StrCat("(", absl::StrJoin(spellings, " "), ")");
  std::string text;
  for (const std::string& flag : spellings) {
    // "--flag=value" as well as "--flag value".
    const bool equals = flag[1] == '-' && ValueCount(setting) == 1;
    absl::StrAppend(&text, " \\\n    ",
                    ShellQuote(absl::StrCat(before, flag, equals ? "=" : "", "[",
                                            Escaped(ShortHelp(setting)), "]", value)));
  }
  return text;
}

// An array and its offer.
std::string Described(absl::string_view function, absl::string_view title,
                      const std::vector<Operands::Word>& words) {
  std::string text = absl::StrCat("\n", function, "() {\n  local -a words=(\n");
  for (const Operands::Word& word : words) {
    absl::StrAppend(&text, "    ", ShellQuote(absl::StrCat(Escaped(word.name), ":", word.help)),
                    "\n");
  }
  return absl::StrCat(text, "  )\n  _describe ", ShellQuote(title), " words\n}\n");
}

std::string OperandsOf(const Command& command) {
  return absl::StrCat("_moe_operands_", command.name);
}

std::string Case(const Command& command) {
  const CommandHelp help = command.help();
  std::string text = absl::StrCat("  ", command.name, ")\n    _arguments -S");
  for (const Setting& setting : help.settings) text += Specifications(setting);
  if (!help.operands.words.empty()) {
    absl::StrAppend(&text, " \\\n    '1:", help.operands.heading, ":", OperandsOf(command), "'");
  }
  if (help.operands.paths) text += " \\\n    '*:FILE:_files'";
  return text + "\n    ;;\n";
}

constexpr char kFunction[] = R"(
_moe() {
  local context state state_descr line
  typeset -A opt_args
  _arguments -C '1:command:_moe_commands' '*::argument:->arguments'
  [[ $state == arguments ]] || return
  case $line[1] in
)";

}  // namespace

std::string ZshCompletion() {
  std::vector<Operands::Word> names;
  for (const Command& command : Commands()) names.push_back({command.name, command.summary});
  std::vector<Operands::Word> first = names;
  for (const Operands::Word& word : OtherFirstWords()) first.push_back(word);
  std::string text = absl::StrCat(kHead, Described("_moe_commands", "command", first),
                                  Described("_moe_operands_help", "command", names));
  for (const Command& command : Commands()) {
    const Operands operands = command.help().operands;
    if (operands.words.empty()) continue;
    text += Described(OperandsOf(command), operands.heading, operands.words);
  }
  text += kFunction;
  for (const Command& command : Commands()) text += Case(command);
  return absl::StrCat(text, "  help)\n    _arguments '1:command:_moe_operands_help'\n    ;;\n",
                      "  esac\n}\n", kTail);
}

}  // namespace moe::cli
