// What a router decides for one batch. Data only: the one header of gating/ that dispatch/ may
// include.
#ifndef MOE_GATING_ROUTING_H_
#define MOE_GATING_ROUTING_H_

#include <cstdint>

#include <absl/types/span.h>

namespace moe {

enum class Mode : uint8_t { kTraining, kEvaluation };

// Which tokens a forward call carries. Token t of this rank is global token first_global_token + t.
struct Batch {
  absl::Span<const int64_t> sequence_offsets = {};     // [sequences + 1], 0 .. T
  absl::Span<const int64_t> micro_batch_offsets = {};  // [B + 1], 0 .. T; empty = one micro-batch
  int64_t first_global_token = 0;
  // [T] 1 = padding, empty = none: such a row is no token to an MoE layer, whose y and dx are 0
  // there, and it has no global token. Other modules do not read it. Of ranks that divide the rows
  // of a micro-batch each has offsets and mask of all T of them.
  absl::Span<const uint8_t> padding_mask = {};
  // [documents + 1], 0 .. T, cuts of the sequences: a token attends to its own document alone, or
  // positions begin at 0 in each. Empty = sequence_offsets.
  absl::Span<const int64_t> attention_offsets = {}, position_offsets = {};
  // In its sequence, of every sequence's first token here: those before it are in a cache.
  int64_t first_position = 0;
  int64_t step = 0;
  Mode mode = Mode::kTraining;
};

// Where the combine weight is applied.
enum class WeightOn : uint8_t { kOutput, kInput };

// T tokens; slot s of token t is one (token, expert) choice, slots of a token in choice order.
// All spans live on the stream's device, as long as the workspace they came from.
struct Routing {
  absl::Span<const int64_t> slot_offset;  // [T + 1] slots of token t: slot_offset[t] .. [t + 1]
  absl::Span<const int32_t> expert;       // [slots] global expert id in [0, E)
  absl::Span<const float> weight;         // [slots] combine weight; 0 where dropped
  absl::Span<const uint8_t> dropped;      // [slots] 1 = over capacity, not dispatched
  WeightOn weight_on = WeightOn::kOutput;
  int32_t num_experts = 0;         // E: router outputs
  int32_t num_routed_experts = 0;  // ids at and above this are identity experts, never dispatched
  // Rows each expert gets per micro-batch when expert input is padded to capacity; 0 = no padding.
  int64_t padded_rows = 0;
  // [B, E of the routed experts] where ranks share a micro-batch: how many of the rows that fill up
  // padded_rows come from this one. Empty: it has micro-batches of its own.
  absl::Span<const int32_t> padding = {};

  int64_t tokens() const {
    return slot_offset.empty() ? 0 : static_cast<int64_t>(slot_offset.size()) - 1;
  }
  int64_t slots() const { return static_cast<int64_t>(expert.size()); }
};

}  // namespace moe

#endif  // MOE_GATING_ROUTING_H_
