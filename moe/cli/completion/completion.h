// Scripts that complete `moe` in a shell, made from the tables of its commands: a flag that stands
// in a table is completed, with its words or paths, and listed nowhere else.
#ifndef MOE_MOE_CLI_COMPLETION_COMPLETION_H_
#define MOE_MOE_CLI_COMPLETION_COMPLETION_H_

#include <string>
#include <vector>

#include "moe/cli/base/command.h"

namespace moe::cli {

// What the shell offers for a value that has no words.
enum class Paths : uint8_t { kNone, kFiles, kFolders };

// kPaths, and by the name of the value: FILE and PATH (also as part of it) are files or folders,
// DIR is a folder, PROGRAM a file.
Paths PathsOf(const Setting& setting);

// Words of the command line that a flag takes for its value: 0 for a switch, 2 for "A B".
int ValueCount(const Setting& setting);

// The help up to its first semicolon: what a shell shows beside a flag.
std::string ShortHelp(const Setting& setting);

// What `moe` itself takes in the place of a command, beside Commands().
std::vector<Operands::Word> OtherFirstWords();

std::string BashCompletion();
std::string ZshCompletion();
std::string FishCompletion();

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_COMPLETION_COMPLETION_H_
