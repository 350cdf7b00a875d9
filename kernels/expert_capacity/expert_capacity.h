// Expert capacity on a CUDA device: finds the slots above it. gating/capacity.h is the host's.
#ifndef MOE_KERNELS_EXPERT_CAPACITY_EXPERT_CAPACITY_H_
#define MOE_KERNELS_EXPERT_CAPACITY_EXPERT_CAPACITY_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/stream.h"
#include "kernels/base/workspace.h"

namespace moe {

// T tokens with their slots in G token groups. Arrays are memory of the stream's device except
// where noted.
struct CapacityInput {
  absl::Span<const int64_t> slot_offset;    // [T + 1] slots of token t: slot_offset[t] .. [t + 1]
  absl::Span<const int32_t> expert;         // [slots] ids from E on have unlimited capacity
  absl::Span<const int64_t> group_offsets;  // [G + 1] tokens, host memory
  absl::Span<const int64_t> capacity;  // [G] host memory: slots that an expert keeps of a group
  int32_t num_experts = 0;             // E
};

// Which of an expert's slots are kept: those with the largest weights (at equal weights the lowest
// token; a NaN is the lowest weight), or the first ones, where all first choices in token order
// precede the second ones.
enum class KeptSlots : uint8_t { kLargestWeight, kFirst };

// dropped[s] = 1 and weight[s] = 0 where slot s is above its expert's capacity in its group, else 0
// and unchanged; *dropped_slots = their number. dropped, weight [slots].
// Enqueues without a host wait. Drops exactly the slots of MarkDropped. For kFirst a group's tokens
// times the most slots of one of them must be below 2^32.
// Errors: as SortByExpert; kInvalidArgument unless `capacity` has one entry a group.
absl::Status DropOverCapacity(const CapacityInput& slots, KeptSlots kept, absl::Span<float> weight,
                              absl::Span<uint8_t> dropped, int64_t* dropped_slots,
                              Workspace& workspace, Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_EXPERT_CAPACITY_EXPERT_CAPACITY_H_
