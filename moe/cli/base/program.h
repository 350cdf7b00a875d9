// What the commands share: results, errors, files and running the ranks.
#ifndef MOE_MOE_CLI_BASE_PROGRAM_H_
#define MOE_MOE_CLI_BASE_PROGRAM_H_

#include <string>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/strings/string_view.h>
#include <absl/time/time.h>
#include <absl/types/span.h>

#include "comm/create.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/launch.h"

namespace moe::cli {

// Writes to standard output, at once. Exit code kIo if it cannot be written.
absl::Status Print(const std::string& text);
// Writes to standard error, at once; text that cannot be written is left out.
void PrintAside(const std::string& text);

// "moe <command>: warning: <warning>", a line each on standard error.
void PrintWarnings(absl::string_view command, absl::Span<const std::string> warnings);

// Print, by the first process of a launch alone.
absl::Status PrintOnce(const Invocation& invocation, const std::string& text);

// Prints `status` by PrintError if it is an error, and returns its exit code. Before ranks meet, an
// error is usually that of all processes, or of all on one host. So the first process of the launch
// reports it at once. The first process of each host reports it some seconds later (under PMI at
// once), unless the launcher has ended it. Any other process reports its error if /proc shows that
// the first of its host still runs after 2 s. If the launcher does not name the first process of a
// host, every process reports, and at once if only variables indicate a launcher.
ExitCode EndCommand(const Invocation& invocation, absl::string_view command,
                    const absl::Status& status);

// A whole command with ranks: loads the settings of `help`, handles --help and --print-config,
// plans the ranks and checks that their devices exist. `run` does the rest; EndCommand ends it.
ExitCode RunWithRanks(
    const Invocation& invocation, const char* command, const CommandHelp& help,
    ComputesOn computes_on,
    absl::FunctionRef<absl::Status(const Settings& settings, const Launch& launch)> run);

// The first rank prints warnings: those of its settings, and those of launch variables that were
// ignored. Then `run`. If ranks are threads, this process is a job of its own, whatever launched
// it: EndCommand then prints its failure and waits for no other process.
absl::Status RunLaunch(absl::string_view command, const Settings& settings, const Launch& launch,
                       absl::Span<const std::string> warnings,
                       absl::FunctionRef<absl::Status()> run);

// How RunRanks reports a rank's failure and ends, with the exit code of its status.
RunOptions RankOptions(const Launch& launch, absl::Duration timeout, std::string command);

// An error of reading the input file that `flag` names: malformed content is exit code kBadInput, a
// read that fails kIo, a path that is not there kUsage.
absl::Status InputError(absl::string_view flag, const absl::Status& status);

// An error of writing the output file that `flag` names: kIo, but kUsage for a folder that is not
// there.
absl::Status WriteError(absl::string_view flag, const std::string& path,
                        const absl::Status& status);

// `text` as a whole file. Errors as WriteError.
absl::Status WriteFile(absl::string_view flag, const std::string& path, absl::string_view text);

// Checks that `path` can be written, before the work that fills it. Errors as WriteError; leaves no
// file.
absl::Status CheckWritable(absl::string_view flag, const std::string& path);

struct FlagPath {
  std::string flag;  // "--trace"
  std::string path;  // empty: not given
};

// kInvalidArgument if an output is an input, or an output before it: the same path, links followed,
// or another name of the same file.
absl::Status CheckOutputPaths(absl::Span<const FlagPath> inputs,
                              absl::Span<const FlagPath> outputs);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_PROGRAM_H_
