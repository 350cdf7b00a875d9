// What `moe` can be completed with in a shell: candidates from the tables of its commands. A flag
// that stands in a table is completed, with its words or paths, and listed nowhere else.
#ifndef MOE_MOE_CLI_COMPLETION_COMPLETION_H_
#define MOE_MOE_CLI_COMPLETION_COMPLETION_H_

#include <string>

#include <absl/types/span.h>

namespace moe::cli {

// The name under which the shells' scripts call Complete: moe __complete WORDS...
inline constexpr char kCompleteName[] = "__complete";

// Candidates for the last of `words`, which stand behind the program's name: a line each, with its
// description behind a tab if it has one. The lines ":files" and ":folders" ask the shell for
// paths. Words may come broken at '=' and ':', as readline does: "--topk=2" in three.
std::string Complete(absl::Span<const std::string> words);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_COMPLETION_COMPLETION_H_
