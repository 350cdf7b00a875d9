// The program `moe`, but for main(), and its commands.
#ifndef MOE_MOE_CLI_BASE_COMMAND_H_
#define MOE_MOE_CLI_BASE_COMMAND_H_

#include <string>
#include <vector>

#include <absl/types/span.h>

#include "comm/bootstrap.h"
#include "moe/cli/base/exit_code.h"
#include "moe/cli/base/settings.h"

namespace moe::cli {

// Description of a command, from which --help, the manual pages (made from --help) and the
// completion of shells follow.

// Operands between the command's name and its flags.
struct Operands {
  struct Word {
    std::string name, help;
  };
  std::string heading;      // in the help, above the words: "Operations"
  std::vector<Word> words;  // words that the first operand may be; empty: none
  bool paths = false;       // any number of files and folders, after the word if there are words
};

// `head` and `tail` are paragraphs between empty lines, at most 100 columns wide. In a paragraph,
// lines that begin at the margin are prose, and indented lines are printed as they are. Lines of
// examples start with "  moe " or "  mpirun ". The head begins with "usage: moe NAME ..."; the tail
// ends with "Exit codes: 0 ..., 2 ...".
struct CommandHelp {
  std::string head;  // usage, what it does, examples
  Operands operands = Operands();
  std::vector<Setting> settings;
  std::string tail;  // columns, formulas, files, exit codes
};

// The text of --help.
std::string HelpText(const CommandHelp& help);

struct Invocation {
  std::string program;                   // as it was called
  std::vector<std::string> args;         // after the command's name
  std::vector<std::string> environment;  // "NAME=value"
  LaunchInfo launch;                     // who started this process; by hand if that is unclear
  // Whether this is the first of all processes, which reports what all of them would report. If
  // variables name a rank but no launcher runs, there may be no other process to report it.
  bool first() const { return launch.rank == 0 || !launch.launcher_runs; }
};

// Prints an error, if any, as one line on standard error. Commands without ranks do nothing in
// processes that are not the first.
ExitCode TrainCommand(const Invocation& invocation);
ExitCode BenchCommand(const Invocation& invocation);
ExitCode EvalCommand(const Invocation& invocation);
ExitCode GenerateCommand(const Invocation& invocation);
ExitCode LayerCommand(const Invocation& invocation);
ExitCode SweepCommand(const Invocation& invocation);
ExitCode VerifyCommand(const Invocation& invocation);
ExitCode PlanCommand(const Invocation& invocation);
ExitCode LaunchCommand(const Invocation& invocation);
ExitCode StatusCommand(const Invocation& invocation);
ExitCode DoctorCommand(const Invocation& invocation);
ExitCode ReportCommand(const Invocation& invocation);
ExitCode DebugCommand(const Invocation& invocation);
ExitCode CkptCommand(const Invocation& invocation);
ExitCode CompletionCommand(const Invocation& invocation);

// Text and rows of a command's --help.
CommandHelp TrainHelp();
CommandHelp BenchHelp();
CommandHelp EvalHelp();
CommandHelp GenerateHelp();
CommandHelp LayerHelp();
CommandHelp SweepHelp();
CommandHelp VerifyHelp();
CommandHelp PlanHelp();
CommandHelp LaunchHelp();
CommandHelp StatusHelp();
CommandHelp DoctorHelp();
CommandHelp ReportHelp();
CommandHelp DebugHelp();
CommandHelp CkptHelp();
CommandHelp CompletionHelp();

struct Command {
  const char* name;
  const char* summary;
  ExitCode (*run)(const Invocation&);
  CommandHelp (*help)();
};

// Commands in the order of `moe --help`.
absl::Span<const Command> Commands();

// What main does; returns its exit code.
int RunProgram(int argc, char** argv);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_COMMAND_H_
