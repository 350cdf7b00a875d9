#include "gating/capacity.h"

#include <algorithm>
#include <cmath>

#include "kernels/base/status_macros.h"
#include "kernels/topk_gate/gate_row.h"

namespace moe {
namespace {

// Of tokens [begin, end). Slot-major: choice by choice, so that a second choice never displaces a
// first one.
void DropByPosition(const CapacitySlots& slots, int64_t begin, int64_t end, int64_t capacity,
                    absl::Span<int64_t> taken, absl::Span<uint8_t> dropped) {
  std::fill(taken.begin(), taken.end(), int64_t{0});
  bool more = true;
  for (int64_t choice = 0; more; ++choice) {
    more = false;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t s = slots.slot_offset[t] + choice;
      if (s >= slots.slot_offset[t + 1]) continue;
      more = true;
      const int32_t expert = slots.expert[s];
      if (expert >= slots.num_experts) continue;
      if (taken[expert]++ >= capacity) dropped[s] = 1;
    }
  }
}

// Of slots [first, last). `start` [E + 1] and `by_expert` [last - first] are scratch.
void DropByWeight(const CapacitySlots& slots, int64_t first, int64_t last, int64_t capacity,
                  absl::Span<int64_t> start, absl::Span<int64_t> by_expert,
                  absl::Span<uint8_t> dropped) {
  // Counting sort of the group's slots by expert, ascending slots within one.
  std::fill(start.begin(), start.end(), int64_t{0});
  const auto has_room = [&](int64_t s) {
    return slots.expert[s] >= slots.num_experts;
  };
  for (int64_t s = first; s < last; ++s) {
    if (!has_room(s)) ++start[slots.expert[s]];
  }
  int64_t end = 0;
  for (int64_t& count : start) count = end += count;  // ends; the last entry repeats the total
  for (int64_t s = last; s-- > first;) {
    if (!has_room(s)) by_expert[--start[slots.expert[s]]] = s;
  }

  const auto kept_before = [&](int64_t a, int64_t b) {
    // Slots of one expert belong to different tokens, in token order.
    return RanksBefore(slots.weight[a], a, slots.weight[b], b);
  };
  for (size_t e = 0; e + 1 < start.size(); ++e) {
    if (start[e + 1] - start[e] <= capacity) continue;
    const auto begin = by_expert.begin() + start[e], over = begin + capacity;
    const auto stop = by_expert.begin() + start[e + 1];
    std::nth_element(begin, over, stop, kept_before);
    for (auto s = over; s != stop; ++s) dropped[*s] = 1;
  }
}

}  // namespace

int64_t ExpertCapacity(int64_t group_tokens, int32_t top_k, int32_t num_experts,
                       double capacity_factor) {
  const double slots = static_cast<double>(group_tokens * top_k);
  const double capacity = std::ceil(slots * capacity_factor / num_experts);
  if (!(capacity < static_cast<double>(group_tokens))) return group_tokens;
  return static_cast<int64_t>(capacity);
}

absl::StatusOr<int64_t> MarkDropped(const CapacitySlots& slots, const TokenGroups& groups,
                                    int32_t top_k, double capacity_factor, DropPolicy policy,
                                    absl::Span<uint8_t> dropped, Workspace& workspace) {
  const WorkspaceScope scope(workspace);
  MOE_ASSIGN_OR_RETURN(const absl::Span<int64_t> per_expert,
                       workspace.Array<int64_t>(int64_t{slots.num_experts} + 1));
  absl::Span<int64_t> by_expert;
  if (policy == DropPolicy::kProbability) {
    MOE_ASSIGN_OR_RETURN(by_expert,
                         workspace.Array<int64_t>(static_cast<int64_t>(slots.expert.size())));
  }
  std::fill(dropped.begin(), dropped.end(), uint8_t{0});
  for (size_t g = 0; g + 1 < groups.offsets.size(); ++g) {
    const int64_t begin = groups.offsets[g], end = groups.offsets[g + 1];
    const int64_t capacity = ExpertCapacity(end - begin, top_k, slots.num_experts, capacity_factor);
    if (policy == DropPolicy::kPosition) {
      DropByPosition(slots, begin, end, capacity, per_expert, dropped);
    } else {
      DropByWeight(slots, slots.slot_offset[begin], slots.slot_offset[end], capacity, per_expert,
                   by_expert, dropped);
    }
  }
  return std::count(dropped.begin(), dropped.end(), uint8_t{1});
}

}  // namespace moe
