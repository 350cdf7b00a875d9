// What a command is, said once: --help, the completion of shells and the manual pages are made of
// it.
#ifndef MOE_MOE_CLI_BASE_COMMAND_HELP_H_
#define MOE_MOE_CLI_BASE_COMMAND_HELP_H_

#include <string>
#include <vector>

#include "moe/cli/base/settings.h"

namespace moe::cli {

// What stands between the command's name and its flags.
struct Operands {
  struct Word {
    std::string name, help;
  };
  std::string heading;      // in the help, above the words: "Operations"
  std::vector<Word> words;  // of the first operand; empty: it is none of them
  bool paths = false;       // any number of files and folders, behind the word if there are words
};

// `head` and `tail` are paragraphs between empty lines, at most 100 columns wide. In a paragraph,
// lines from the margin are prose, and lines that are indented stay as they are. Those of examples
// start with "  moe " or "  mpirun ". The head begins with "usage: moe NAME ..."; the tail ends
// with "Exit codes: 0 ..., 2 ...".
struct CommandHelp {
  std::string head;  // usage, what it does, examples
  Operands operands = Operands();
  std::vector<Setting> settings;
  std::string tail;  // columns, formulas, files, exit codes
};

// The text of --help.
std::string HelpText(const CommandHelp& help);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_COMMAND_HELP_H_
