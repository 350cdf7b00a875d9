// The program `moe`, but for main(), and its commands.
#ifndef MOE_MOE_CLI_COMMANDS_H_
#define MOE_MOE_CLI_COMMANDS_H_

#include <absl/types/span.h>

#include "moe/cli/base/command.h"

namespace moe::cli {

struct Command {
  const char* name;
  const char* summary;
  ExitCode (*run)(const Invocation&);
  CommandHelp (*help)();
};

// In the order of `moe --help`.
absl::Span<const Command> Commands();

// What main does; returns its exit code.
int RunProgram(int argc, char** argv);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_COMMANDS_H_
