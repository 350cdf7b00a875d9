// Whether the files that a command writes are others than those that it reads.
#ifndef MOE_MOE_CLI_BASE_OUTPUT_PATHS_H_
#define MOE_MOE_CLI_BASE_OUTPUT_PATHS_H_

#include <string>

#include <absl/status/status.h>
#include <absl/types/span.h>

namespace moe::cli {

struct FlagPath {
  std::string flag;  // "--trace"
  std::string path;  // empty: not given
};

// kInvalidArgument if an output is an input, or an output before it: the same path, links followed,
// or another name of the same file.
absl::Status CheckOutputPaths(absl::Span<const FlagPath> inputs,
                              absl::Span<const FlagPath> outputs);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_OUTPUT_PATHS_H_
