// Expert capacity: how many slots an expert takes from one token group, and which go beyond it.
#ifndef MOE_GATING_CAPACITY_H_
#define MOE_GATING_CAPACITY_H_

#include <cstdint>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "gating/token_groups.h"
#include "kernels/base/choice.h"
#include "kernels/base/workspace.h"

namespace moe {

// What is kept when more than C slots of a group want one expert.
//   kProbability  the C largest combine weights; equal ones: the lowest token. A NaN is the lowest.
//   kPosition     the first C, slot-major: all first choices in token order, then all second ...
enum class DropPolicy : uint8_t { kProbability, kPosition };
inline constexpr Choice<DropPolicy> kDropPolicyWords[] = {{"probs", DropPolicy::kProbability},
                                                          {"position", DropPolicy::kPosition}};

// C = ceil(T_g * K * capacity_factor / E), exactly; at most T_g, since a token chooses an expert no
// more than once. capacity_factor, finite and > 0, is the shortest decimal that reads back as the
// double, which is the one that was written: 1.1 is 11/10, and 100 tokens, 10 experts have C = 11.
// In float64, 100 * 1.1 would be above 110, and C would be 12. T_g * K < 2^63.
// (Switch: arXiv:2101.03961, eq. 3; GShard: arXiv:2006.16668, section 2.2.)
int64_t ExpertCapacity(int64_t group_tokens, int32_t top_k, int32_t num_experts,
                       double capacity_factor);

// The slots that capacity looks at: token t has slots [slot_offset[t], slot_offset[t + 1]).
struct CapacitySlots {
  absl::Span<const int64_t> slot_offset;  // [T + 1]
  absl::Span<const int32_t> expert;       // [slots]; identity experts (>= num_experts) have room
  absl::Span<const float> weight;         // [slots] combine weights before any drop
  int32_t num_experts = 0;                // routed experts
};

// dropped[s] = 1 where slot s is over its expert's capacity within its token group, else 0.
// Returns the number of dropped slots. Host memory; `workspace` lends scratch for the call.
absl::StatusOr<int64_t> MarkDropped(const CapacitySlots& slots, const TokenGroups& groups,
                                    int32_t top_k, double capacity_factor, DropPolicy policy,
                                    absl::Span<uint8_t> dropped, Workspace& workspace);

}  // namespace moe

#endif  // MOE_GATING_CAPACITY_H_
