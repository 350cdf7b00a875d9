// What a rank reports of its call: to its peers before anything moves, and in the message of a wait
// that failed; the same from every backend.
#ifndef MOE_COMM_WAIT_REPORT_H_
#define MOE_COMM_WAIT_REPORT_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/string_view.h>
#include <absl/time/time.h>
#include <absl/types/span.h>

#include "comm/communicator.h"

namespace moe {

// "AllReduce (dispatch, layer 3, step 120)"; where `operation` is empty, outside communication,
// "dispatch (layer 3, step 120)".
std::string DescribeCall(absl::string_view operation, const Site& site);
// "rank 1 on host a in AllReduce (dispatch, layer 3, step 120)".
std::string DescribePlace(int world_rank, absl::string_view operation, const Site& site);

// kDeadlineExceeded: "<place>: waited 2.00s for ranks 0, 3, deadline 2s". `missing` are world
// ranks, in any order and more than once. `hosts`: their names, by world rank; where they are not
// all one, "for ranks 0 (host a), 3 (host b)". Empty: unknown.
absl::Status LateError(absl::string_view place, std::vector<int> missing, absl::Duration waited,
                       absl::Duration timeout, absl::Span<const std::string> hosts = {});

// What a rank sends its peers about its call, as it is stored in memory.
struct CallCard {
  char operation[16] = {};
  int32_t type = 0, op = 0, root = 0;
  int32_t color = 0, key = 0;  // Split only: the rank's own choice
  int32_t unused = 0;
  int64_t count = 0;
};
CallCard CardOf(const char* operation);
CallCard CardOf(const CollectiveCall& call);

// kInvalidArgument, with the calls of both ranks (world ranks), unless they are the same.
absl::Status CheckSame(const CallCard& mine, int rank, const CallCard& other, int other_rank);

// kInvalidArgument: "<operation>: rank 1 expects 8 bytes from rank 0, which sends 4". Ranks of the
// world; `sent`: bytes, or "more".
absl::Status OtherSizeError(absl::string_view operation, int rank, int64_t expected, int peer,
                            const absl::AlphaNum& sent);

// kInvalidArgument for a color below -1.
absl::StatusOr<CallCard> SplitCard(int color, int key);
// The ranks of this color, in the order that Split gives them.
std::vector<int> MembersOf(int color, absl::Span<const CallCard> cards);

}  // namespace moe

#endif  // MOE_COMM_WAIT_REPORT_H_
