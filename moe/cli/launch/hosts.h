// The hosts that a job may run on.
#ifndef MOE_MOE_CLI_LAUNCH_HOSTS_H_
#define MOE_MOE_CLI_LAUNCH_HOSTS_H_

#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

namespace moe::launch {

struct Host {
  std::string name;
  int slots = 0;  // ranks that it takes; 0: not given

  bool operator==(const Host&) const = default;
};

// One host a line, as people write them for Open MPI, "node1 slots=8", and for Hydra, "node1:8";
// "node1" alone. '#' begins a comment. Other words of Open MPI (max_slots=) are accepted and mean
// nothing here. kInvalidArgument, with the line: a host that stands there twice, slots that are no
// number from 1 to 65,536, anything else, no host at all.
absl::StatusOr<std::vector<Host>> ParseHosts(absl::string_view text);

// The hosts for which `command` with the host's name behind it, then "true", ends with exit code 0
// within `seconds`; 64 are asked at once. This host, by its name or as localhost, always answers.
// Those that do not are added to `silent`.
std::vector<Host> HostsThatAnswer(absl::Span<const Host> hosts,
                                  absl::Span<const std::string> command, int seconds,
                                  std::vector<std::string>& silent);

}  // namespace moe::launch

#endif  // MOE_MOE_CLI_LAUNCH_HOSTS_H_
