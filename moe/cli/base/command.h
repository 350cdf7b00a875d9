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

// What a command is, once: --help, from which manual pages are made, and the completion of shells
// follow from it.

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

struct Invocation {
  std::string program;                   // as it was called
  std::vector<std::string> args;         // after the command's name
  std::vector<std::string> environment;  // "NAME=value"
  LaunchInfo launch;                     // who started this process; by hand if that is unclear
  // Of all processes: says what all of them would say alike. Where variables name a rank and no
  // launcher runs, nobody else may be there to say it.
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
ExitCode DoctorCommand(const Invocation& invocation);
ExitCode ReportCommand(const Invocation& invocation);
ExitCode CkptCommand(const Invocation& invocation);
ExitCode CompletionCommand(const Invocation& invocation);

// What --help of a command prints.
CommandHelp TrainHelp();
CommandHelp BenchHelp();
CommandHelp EvalHelp();
CommandHelp GenerateHelp();
CommandHelp LayerHelp();
CommandHelp SweepHelp();
CommandHelp VerifyHelp();
CommandHelp DoctorHelp();
CommandHelp ReportHelp();
CommandHelp CkptHelp();
CommandHelp CompletionHelp();

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

#endif  // MOE_MOE_CLI_BASE_COMMAND_H_
