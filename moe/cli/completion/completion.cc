// moe completion: scripts for shells, and the candidates that they ask for.
#include "moe/cli/completion/completion.h"

#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>
#include <absl/strings/string_view.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/program.h"
#include "moe/cli/base/settings.h"

namespace moe::cli {
namespace {

constexpr char kHead[] =
    R"(usage: moe completion SHELL

Prints a script that completes commands, flags, their words and files. It is installed with the
program; to load it by hand:

  bash   source <(moe completion bash)           in ~/.bashrc
  zsh    moe completion zsh > DIR/_moe           DIR in $fpath, before compinit; or source it after
  fish   moe completion fish | source            in ~/.config/fish/config.fish

  moe completion bash > ~/.local/share/bash-completion/completions/moe
)";

constexpr char kTail[] = R"(
Exit codes: 0 ok, 2 usage, 4 a write failed.
)";

// Readline breaks words at '=' and ':', and quotes a path if compgen finds no candidate.
constexpr char kBash[] = R"bash(# Completion of moe in bash, made by: moe completion bash
_moe_paths() { # -f or -d, and what readline does where there are none
  mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(compgen "$1" -- "$cur")
  compopt -o filenames -o "$2" 2>/dev/null
}
_moe() {
  local line cur=${COMP_WORDS[COMP_CWORD]}
  COMPREPLY=()
  [[ $cur != = ]] || cur=
  while IFS= read -r line; do
    case $line in
      :files) _moe_paths -f default ;;
      :folders) _moe_paths -d dirnames ;;
      *) COMPREPLY+=("${line%%$'\t'*}") ;;
    esac
  done < <("${COMP_WORDS[0]}" __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
  [[ ${#COMPREPLY[@]} != 1 || $COMPREPLY != *: ]] || compopt -o nospace 2>/dev/null
}
complete -F _moe moe
)bash";

// As an autoloaded file the text is the function's body; sourced, it registers the function.
constexpr char kZsh[] = R"zsh(#compdef moe
# Completion of moe in zsh, made by: moe completion zsh
_moe() {
  local line paths
  local -a found
  for line in ${(f)"$($words[1] __complete "${(@Q)words[2,CURRENT]}" 2>/dev/null)"}; do
    case $line in
      :*) paths=$line ;;
      *) found+=("${${line%%$'\t'*}//:/\\:}${${(M)line:#*$'\t'*}:+:${line#*$'\t'}}") ;;
    esac
  done
  (( $#found )) && _describe moe found
  [[ -z $paths ]] || { compset -P '--*='; _files ${${(M)paths:#:folders}:+-/} }
}
if [[ $funcstack[1] == _moe ]]; then _moe "$@"; else compdef _moe moe; fi
)zsh";

constexpr char kFish[] = R"fish(# Completion of moe in fish, made by: moe completion fish
function __moe_complete
    set -l token (commandline -ct)
    set -l words (commandline -opc) "$token"
    set -l before (string match -r -- '^--[^=]*=' "$token")
    set -l rest (string replace -r -- '^--[^=]*=' '' "$token")
    for line in ($words[1] __complete $words[2..] 2>/dev/null)
        switch $line
            case :files
                string replace -r -- '^' "$before" (__fish_complete_path "$rest")
            case :folders
                string replace -r -- '^' "$before" (__fish_complete_directories "$rest" '')
            case '*'
                printf '%s\n' $line
        end
    end
end
complete -c moe -f -a '(__moe_complete)'
)fish";

struct Shell {
  const char* name;
  const char* help;
  const char* script;
};

constexpr Shell kShells[] = {{"bash", "from version 4", kBash},
                             {"zsh", "with compinit", kZsh},
                             {"fish", "from version 3", kFish}};

Table CompletionSettings() {
  Table t;
  t.Group("Flags");
  AddColorSetting(t);
  t.Add("-h, --help", Kind::kSwitch, "print this and stop").FlagOnly();
  return t;
}

absl::Status Run(const Invocation& invocation) {
  Settings settings(CompletionSettings());
  std::vector<std::string> flags = invocation.args;
  std::string wanted;
  if (!flags.empty() && !absl::StartsWith(flags[0], "-")) {
    wanted = flags[0];
    flags.erase(flags.begin());
  }
  MOE_RETURN_IF_ERROR(LoadFlags(flags, settings));
  if (settings.on("help")) return Print(HelpText(CompletionHelp()));
  std::vector<std::string> names;
  for (const Shell& shell : kShells) {
    if (wanted == shell.name) return Print(shell.script);
    names.emplace_back(shell.name);
  }
  const std::string expected = absl::StrCat("expected moe completion ", absl::StrJoin(names, "|"));
  if (wanted.empty()) return absl::InvalidArgumentError(absl::StrCat("no shell, ", expected));
  return absl::InvalidArgumentError(
      absl::StrCat("unknown shell '", wanted, "', ", expected, DidYouMean(wanted, names, "", "")));
}

// Words of the command line that form a flag's value: 0 for a switch, 2 for "A B".
int ValueCount(const Setting& setting) {
  if (setting.kind == Kind::kSwitch) return 0;
  if (absl::StartsWith(setting.value_name, "'")) return 1;  // quoted: one word for the shell
  return static_cast<int>(std::vector<std::string>(absl::StrSplit(setting.value_name, ' ')).size());
}

// Which paths the shell offers for a value, by its name: folders or files.
const char* PathsOf(const Setting& setting) {
  const std::string& name = setting.value_name;
  if (name == "DIR") return ":folders\n";
  const bool files = setting.kind == Kind::kPaths || name == "PROGRAM" ||
                     absl::StrContains(name, "FILE") || absl::StrContains(name, "PATH");
  return files ? ":files\n" : "";
}

class Candidates {
 public:
  explicit Candidates(absl::string_view start) : start_(start) {}

  // `before` is the start of the same word: "--router=".
  void AddWord(absl::string_view word, absl::string_view description = "",
               absl::string_view before = "") {
    if (!absl::StartsWith(word, start_)) return;
    absl::StrAppend(&text_, before, word, description.empty() ? "" : "\t", description, "\n");
  }
  void AddCommands() {
    for (const Command& command : Commands()) AddWord(command.name, command.summary);
  }
  void AddFlags(const std::vector<Setting>& settings) {
    for (const Setting& setting : settings) {
      for (const std::string& flag : Spellings(setting)) {
        AddWord(flag, setting.help.substr(0, setting.help.find(';')));
      }
    }
  }
  void AddValue(const Setting& setting, absl::string_view before = "") {
    for (const std::string& word : setting.words) AddWord(word, "", before);
    text_ += PathsOf(setting);
  }
  void AddOperand(const CommandHelp& help, int operands_before) {
    if (operands_before == 0 && !help.operands.words.empty()) {
      for (const Operands::Word& word : help.operands.words) AddWord(word.name, word.help);
    } else if (help.operands.paths) {
      text_ += ":files\n";
    } else {
      AddFlags(help.settings);
    }
  }

  const std::string& text() const { return text_; }

 private:
  const absl::string_view start_;
  std::string text_;
};

const Setting* FindFlag(const std::vector<Setting>& settings, absl::string_view flag) {
  for (const Setting& setting : settings) {
    for (const std::string& spelling : Spellings(setting)) {
      if (spelling == flag) return &setting;
    }
  }
  return nullptr;
}

// The words before the cursor.
struct Before {
  const Setting* flag = nullptr;  // the flag whose value is at the cursor
  int operands = 0;
};

Before WordsBefore(const std::vector<Setting>& settings, absl::Span<const std::string> words) {
  Before before;
  int values = 0;  // missing values of before.flag
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == ":") {
      ++i;  // it and the next word belong to the previous value
    } else if (words[i] == "=") {
      continue;
    } else if (values > 0) {
      --values;
    } else if (absl::StartsWith(words[i], "-")) {
      before.flag = FindFlag(settings, words[i]);
      values = before.flag == nullptr ? 0 : ValueCount(*before.flag);
    } else {
      ++before.operands;
    }
  }
  if (values == 0) before.flag = nullptr;
  return before;
}

std::string CompleteCommand(const Command& command, absl::Span<const std::string> words) {
  const CommandHelp help = command.help();
  absl::string_view start = words.back();
  const auto earlier = words.first(words.size() - 1);
  // The part of a value after ':' is not completed.
  if (start == ":" || (!earlier.empty() && earlier.back() == ":")) return "";
  const Before before = WordsBefore(help.settings, earlier);
  const size_t equals = start.find('=');
  if (before.flag != nullptr) {
    Candidates candidates(start == "=" ? "" : start);
    candidates.AddValue(*before.flag);
    return candidates.text();
  }
  if (absl::StartsWith(start, "--") && equals != absl::string_view::npos) {
    const Setting* const flag = FindFlag(help.settings, start.substr(0, equals));
    Candidates candidates(start.substr(equals + 1));
    if (flag != nullptr) candidates.AddValue(*flag, start.substr(0, equals + 1));
    return candidates.text();
  }
  Candidates candidates(start);
  if (absl::StartsWith(start, "-")) {
    candidates.AddFlags(help.settings);
  } else {
    candidates.AddOperand(help, before.operands);
  }
  return candidates.text();
}

}  // namespace

std::string Complete(absl::Span<const std::string> words) {
  if (words.empty()) return "";
  Candidates candidates(words.back());
  if (words.size() == 1) {
    candidates.AddCommands();
    candidates.AddWord("help", "flags, defaults and formulas of a command");
    candidates.AddWord("--help", "all commands");
    candidates.AddWord("--version", "of this program");
  }
  if (words.size() == 2 && words[0] == "help") candidates.AddCommands();
  for (const Command& command : Commands()) {
    if (words.size() > 1 && words[0] == command.name) {
      return CompleteCommand(command, words.subspan(1));
    }
  }
  return candidates.text();
}

CommandHelp CompletionHelp() {
  std::vector<Operands::Word> shells;
  for (const Shell& shell : kShells) shells.push_back({shell.name, shell.help});
  return {.head = kHead,
          .operands = Operands{.heading = "Shells", .words = std::move(shells)},
          .settings = CompletionSettings().rows(),
          .tail = kTail};
}

ExitCode CompletionCommand(const Invocation& invocation) {
  if (!invocation.first()) return ExitCode::kOk;
  return EndCommand(invocation, "completion", Run(invocation));
}

}  // namespace moe::cli
