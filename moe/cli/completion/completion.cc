// moe completion: scripts for shells, which call `moe __complete` for candidates.
#include <string>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

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

}  // namespace

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
