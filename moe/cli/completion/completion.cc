// moe completion: scripts for shells.
#include "moe/cli/completion/completion.h"

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>

#include "kernels/base/status_macros.h"
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

struct Shell {
  const char* name;
  const char* help;
  std::string (*script)();
};

constexpr Shell kShells[] = {{"bash", "from version 4", BashCompletion},
                             {"zsh", "with compinit", ZshCompletion},
                             {"fish", "from version 3", FishCompletion}};

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
    if (wanted == shell.name) return Print(shell.script());
    names.emplace_back(shell.name);
  }
  const std::string expected = absl::StrCat("expected moe completion ", absl::StrJoin(names, "|"));
  if (wanted.empty()) return absl::InvalidArgumentError(absl::StrCat("no shell, ", expected));
  return absl::InvalidArgumentError(
      absl::StrCat("unknown shell '", wanted, "', ", expected, DidYouMean(wanted, names, "", "")));
}

}  // namespace

Paths PathsOf(const Setting& setting) {
  const std::string& name = setting.value_name;
  if (name == "DIR") return Paths::kFolders;
  const bool files = setting.kind == Kind::kPaths || name == "PROGRAM" ||
                     absl::StrContains(name, "FILE") || absl::StrContains(name, "PATH");
  return files ? Paths::kFiles : Paths::kNone;
}

int ValueCount(const Setting& setting) {
  if (setting.kind == Kind::kSwitch) return 0;
  if (absl::StartsWith(setting.value_name, "'")) return 1;  // quoted: one word for a shell
  return static_cast<int>(std::vector<std::string>(absl::StrSplit(setting.value_name, ' ')).size());
}

std::string ShortHelp(const Setting& setting) {
  return setting.help.substr(0, setting.help.find(';'));
}

std::vector<Operands::Word> OtherFirstWords() {
  return {{"help", "flags, defaults and formulas of a command"},
          {"--help", "all commands"},
          {"--version", "of this program"}};
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
