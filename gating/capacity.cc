#include "gating/capacity.h"

#include <algorithm>
#include <charconv>
#include <iterator>

#include "kernels/base/status_macros.h"
#include "kernels/topk_gate/gate_row.h"

namespace moe {
namespace {

using Wide = unsigned __int128;

// digits * 10^exponent; digits < 10^17.
struct Decimal {
  uint64_t digits = 0;
  int exponent = 0;
};

// The shortest decimal that reads back as `value`, which is finite and > 0.
Decimal ShortestDecimal(double value) {
  char text[32];  // "1.2345678901234567e-308" at most
  const char* const end =
      std::to_chars(std::begin(text), std::end(text), value, std::chars_format::scientific).ptr;
  const char* const e = std::find<const char*>(text, end, 'e');
  Decimal decimal;
  // from_chars takes no plus sign.
  std::from_chars(e + (e[1] == '+' ? 2 : 1), end, decimal.exponent);
  for (const char* c = text; c != e; ++c) {
    if (*c == '.') continue;
    decimal.digits = decimal.digits * 10 + static_cast<uint64_t>(*c - '0');
    if (c != text) --decimal.exponent;
  }
  return decimal;
}

Wide CeilOfQuotient(Wide a, Wide b) {
  return a / b + (a % b != 0 ? 1 : 0);
}

// Drops slots of tokens [begin, end). Slot-major: choice by choice, so that a second choice never
// displaces a first one.
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

// Drops slots among [first, last). `start` [E + 1] and `by_expert` [last - first] are scratch.
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
  const Decimal factor = ShortestDecimal(capacity_factor);
  const auto tokens = static_cast<Wide>(group_tokens), experts = static_cast<Wide>(num_experts);
  Wide slots = tokens * static_cast<Wide>(top_k) * factor.digits;  // < 2^63 * 10^17 < 2^120
  // Above tokens * experts, which is < 2^94, the capacity is all tokens, whatever is left.
  for (int e = factor.exponent; e > 0 && slots < tokens * experts; --e) slots *= 10;
  // A ceiling of ceilings of quotients is the ceiling of the whole quotient.
  for (int e = factor.exponent; e < 0 && slots > 1; ++e) slots = CeilOfQuotient(slots, 10);
  return static_cast<int64_t>(std::min(CeilOfQuotient(slots, experts), tokens));
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
