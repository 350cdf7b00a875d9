#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "moe/cli/completion/completion.h"

namespace moe::cli {
namespace {

constexpr char kHead[] = R"(# Completion of moe in bash, made by: moe completion bash
)";

// What comes before the cursor is read from the left: a flag takes as many words as it has values.
// Readline breaks words at '=' and ':', so that "--topk=2" comes in three.
constexpr char kTail[] = R"(
_moe_words() { # WORDS: those that start like the word at the cursor
  local word
  while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -W "$1" -- "$cur")
  if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *: ]]; then
    compopt -o nospace 2>/dev/null
  fi
}

_moe_paths() { # files or folders
  local word action=-f otherwise=default
  if [[ $1 == folders ]]; then
    action=-d otherwise=dirnames
  fi
  while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen "$action" -- "$cur")
  # Readline knows how to quote, and what ~ is, where compgen finds nothing.
  compopt -o filenames -o "$otherwise" 2>/dev/null
}

_moe() {
  local cur=${COMP_WORDS[COMP_CWORD]} command=${COMP_WORDS[1]} i word
  local words='' paths='' values=0 pending=0 operands=0
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then
    _moe_words "$_moe_commands"
    return
  fi
  for ((i = 2; i < COMP_CWORD; ++i)); do
    word=${COMP_WORDS[i]}
    if [[ $word == : ]]; then
      i=$((i + 1))
    elif [[ $word == = ]]; then
      continue
    elif ((pending > 0)); then
      pending=$((pending - 1))
    elif [[ $word == -* ]]; then
      words='' paths='' values=0
      _moe_value "$command" "$word"
      pending=$values
    else
      operands=$((operands + 1))
    fi
  done
  # Behind ':' in the middle of a value.
  if [[ $cur == : || ${COMP_WORDS[COMP_CWORD - 1]} == : ]]; then
    return
  fi
  if ((pending > 0)); then
    if [[ $cur == = ]]; then
      cur=''
    fi
    _moe_words "$words"
    if [[ -n $paths ]]; then
      _moe_paths "$paths"
    fi
    return
  fi
  words='' paths=''
  if [[ $cur != -* ]]; then
    _moe_operand "$command" "$operands"
  fi
  if [[ -n $paths ]]; then
    _moe_paths "$paths"
  elif [[ -n $words ]]; then
    _moe_words "$words"
  else
    _moe_flags "$command"
    _moe_words "$words"
  fi
}

complete -F _moe moe
)";

std::string Quoted(const std::vector<std::string>& words) {
  return ShellQuote(absl::StrJoin(words, " "));
}

std::string Flags() {
  std::string text = "\n_moe_flags() { # COMMAND\n  case $1 in\n";
  for (const Command& command : Commands()) {
    std::vector<std::string> flags;
    for (const Setting& setting : command.help().settings) {
      for (const std::string& flag : Spellings(setting)) flags.push_back(flag);
    }
    absl::StrAppend(&text, "    ", command.name, ") words=", Quoted(flags), " ;;\n");
  }
  return text + "  esac\n}\n";
}

std::string Value(const Setting& setting) {
  std::string text = absl::StrCat("values=", ValueCount(setting));
  if (!setting.words.empty()) absl::StrAppend(&text, " words=", Quoted(setting.words));
  const Paths paths = PathsOf(setting);
  if (paths != Paths::kNone) {
    absl::StrAppend(&text, " paths=", paths == Paths::kFiles ? "files" : "folders");
  }
  return text;
}

std::string Values() {
  std::string text = "\n_moe_value() { # COMMAND FLAG\n  case \"$1 $2\" in\n";
  for (const Command& command : Commands()) {
    for (const Setting& setting : command.help().settings) {
      if (setting.kind == Kind::kSwitch) continue;
      std::vector<std::string> patterns;
      for (const std::string& flag : Spellings(setting)) {
        patterns.push_back(absl::StrCat("'", command.name, " ", flag, "'"));
      }
      absl::StrAppend(&text, "    ", absl::StrJoin(patterns, " | "), ") ", Value(setting), " ;;\n");
    }
  }
  return text + "  esac\n}\n";
}

std::string OperandCases() {
  std::string text = "\n_moe_operand() { # COMMAND, how many stand before\n  case \"$1 $2\" in\n";
  const auto first = [&](absl::string_view command, const std::vector<std::string>& words) {
    absl::StrAppend(&text, "    '", command, " 0') words=", Quoted(words), " ;;\n");
  };
  std::vector<std::string> names;
  for (const Command& command : Commands()) {
    names.emplace_back(command.name);
    const Operands operands = command.help().operands;
    std::vector<std::string> words;
    for (const Operands::Word& word : operands.words) words.push_back(word.name);
    if (!words.empty()) first(command.name, words);
    if (operands.paths) absl::StrAppend(&text, "    '", command.name, " '*) paths=files ;;\n");
  }
  first("help", names);
  return text + "  esac\n}\n";
}

}  // namespace

std::string BashCompletion() {
  std::vector<std::string> first;
  for (const Command& command : Commands()) first.emplace_back(command.name);
  for (const Operands::Word& word : OtherFirstWords()) first.push_back(word.name);
  return absl::StrCat(kHead, "\n_moe_commands=", Quoted(first), "\n", Flags(), Values(),
                      OperandCases(), kTail);
}

}  // namespace moe::cli
