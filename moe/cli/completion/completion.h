// Shell completion of `moe`: candidates from the tables of its commands. A flag in a table is
// completed, with its words or paths, without another list.
#ifndef MOE_MOE_CLI_COMPLETION_COMPLETION_H_
#define MOE_MOE_CLI_COMPLETION_COMPLETION_H_

#include <string>

#include <absl/types/span.h>

namespace moe::cli {

// The command with which the shells' scripts call Complete: moe __complete WORDS...
inline constexpr char kCompleteName[] = "__complete";

// Candidates for the last of `words`, the words after the program's name: one a line, with its
// description after a tab if it has one. The lines ":files" and ":folders" request paths from the
// shell. Words may be split at '=' and ':', as readline does: "--topk=2" in three.
std::string Complete(absl::Span<const std::string> words);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_COMPLETION_COMPLETION_H_
