#include <algorithm>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <absl/strings/string_view.h>

#include "moe/cli/base/command.h"
#include "moe/cli/base/settings.h"
#include "moe/cli/completion/completion.h"

namespace moe::cli {
namespace {

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

}  // namespace moe::cli
