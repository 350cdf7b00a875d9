// Files that say how things stand now, replaced again and again while a command runs.
#ifndef MOE_MOE_CLI_BASE_LIVE_FILE_H_
#define MOE_MOE_CLI_BASE_LIVE_FILE_H_

#include <string>
#include <system_error>

#include <absl/strings/string_view.h>

#include "moe/io/file_system.h"

namespace moe::cli {

// Writes beside the path and renames, so that a reader sees the whole of one text. Not flushed:
// what a host that has lost its power said last is of no use. `run` is that of one process
// (LockHolder): no other one has this name beside the path, whatever its host, container or number.
std::error_code ReplaceLiveFile(const std::string& path, absl::string_view run,
                                absl::string_view text, FileSystem& files);

// Removes what writes of killed processes have left beside the path.
void RemoveUnfinished(const std::string& path, FileSystem& files);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_LIVE_FILE_H_
