// Programs in PATH, above all the launcher of the MPI that this build is linked with.
#ifndef MOE_MOE_CLI_BASE_FIND_PROGRAM_H_
#define MOE_MOE_CLI_BASE_FIND_PROGRAM_H_

#include <string>

#include <absl/strings/string_view.h>
#include <absl/types/span.h>

namespace moe::cli {

// The value of a variable in `environment` ("NAME=value"); "" if it is not there.
std::string VariableOf(absl::Span<const std::string> environment, absl::string_view name);

// The file that `name` starts: itself if it has a '/', else the first in the folders of `path`, as
// execvp looks. "" if there is none.
std::string FindProgram(const std::string& name, absl::string_view path);

// Where several MPIs are installed, `mpirun` may be another one's, under which every process is a
// world of its own: first mpirun.<linked MPI> (Debian's names), then mpirun, then mpiexec. "" if
// there is none.
std::string FindMpiLauncher(absl::string_view path);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_FIND_PROGRAM_H_
