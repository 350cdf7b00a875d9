// A command of the program.
#ifndef MOE_MOE_CLI_BASE_COMMAND_H_
#define MOE_MOE_CLI_BASE_COMMAND_H_

#include <string>
#include <vector>

#include "comm/bootstrap.h"
#include "moe/cli/base/command_help.h"
#include "moe/cli/base/exit_code.h"

namespace moe::cli {

struct Invocation {
  std::string program;                   // as it was called
  std::vector<std::string> args;         // after the command's name
  std::vector<std::string> environment;  // "NAME=value"
  LaunchInfo launch;                     // who started this process; by hand if that is unclear
  // Of all processes: says what all of them would say alike.
  bool first() const { return launch.rank == 0; }
};

// Prints an error, if any, as one line on standard error. Commands without ranks do nothing in
// processes that are not the first.
ExitCode TrainCommand(const Invocation& invocation);
ExitCode BenchCommand(const Invocation& invocation);
ExitCode LayerCommand(const Invocation& invocation);
ExitCode SweepCommand(const Invocation& invocation);
ExitCode VerifyCommand(const Invocation& invocation);
ExitCode DoctorCommand(const Invocation& invocation);
ExitCode ReportCommand(const Invocation& invocation);
ExitCode CkptCommand(const Invocation& invocation);
ExitCode CompletionCommand(const Invocation& invocation);

// What --help of a command prints.
CommandHelp TrainHelp();
CommandHelp BenchHelp();
CommandHelp LayerHelp();
CommandHelp SweepHelp();
CommandHelp VerifyHelp();
CommandHelp DoctorHelp();
CommandHelp ReportHelp();
CommandHelp CkptHelp();
CommandHelp CompletionHelp();

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_COMMAND_H_
