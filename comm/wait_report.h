// The message of a wait that failed, the same from every backend.
#ifndef MOE_COMM_WAIT_REPORT_H_
#define MOE_COMM_WAIT_REPORT_H_

#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/strings/string_view.h>
#include <absl/time/time.h>

#include "comm/communicator.h"

namespace moe {

// "dispatch, layer 3, step 120"; "" when nothing was set.
std::string DescribePhase(const CommPhase& phase);

// "rank 1 on host a in AllReduce (dispatch, layer 3, step 120)".
std::string DescribePlace(int world_rank, absl::string_view operation, const CommPhase& phase);

// kDeadlineExceeded: "<place>: waited 2.00s for ranks 0, 3, deadline 2s". `missing` are world
// ranks.
absl::Status LateError(absl::string_view place, const std::vector<int>& missing,
                       absl::Duration waited, absl::Duration timeout);

}  // namespace moe

#endif  // MOE_COMM_WAIT_REPORT_H_
