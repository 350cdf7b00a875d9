// What moe doctor --seconds measures of a world, every rank and every link, and which of them are
// slow.
#ifndef MOE_MOE_CLI_DOCTOR_WORLD_CHECK_H_
#define MOE_MOE_CLI_DOCTOR_WORLD_CHECK_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/time/time.h>

#include "comm/communicator.h"
#include "moe/cli/doctor/machine_facts.h"

namespace moe::cli {

struct RankSpeed {
  std::string host;
  uint64_t host_id = 0;     // HostId
  int64_t cores = 0;        // that its process may use
  double gflop_per_s = 0;   // of a fixed loop of multiply-adds on one thread, all ranks at once
  double gbytes_per_s = 0;  // of copies of 16 MiB on one thread, all ranks at once
};

// One ordered pair of ranks, measured while all others wait.
struct Link {
  int source = 0, destination = 0;
  double latency_us = 0;    // median of transfers of 8 bytes
  double gbytes_per_s = 0;  // median of transfers of 1 MiB
};

struct WorldCheck {
  std::vector<RankSpeed> ranks;  // [R]
  std::vector<Link> links;       // [R (R - 1)]
};

// Measures for about `time`; beyond some tens of ranks for longer, as there are R (R - 1) links of
// at least 10 transfers each. Collective over `world`, blocks; the same result on every rank.
// Errors of the communicator.
absl::StatusOr<WorldCheck> MeasureWorld(absl::Duration time, Communicator& world);

// A rank is slow below the median of all ranks over kSlowRank, a link beyond kSlowLink times the
// median of its kind: inside of a host, or between hosts.
inline constexpr double kSlowRank = 1.5;
inline constexpr double kSlowLink = 2;

// A finding per subject: of each rank or link that is slow kSlow, the slowest first and at most
// four of a subject; else one that has the range. Ranks whose processes have different numbers of
// cores are one, too. Pure function.
std::vector<Finding> DiagnoseWorld(const WorldCheck& check);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_DOCTOR_WORLD_CHECK_H_
