// Which experts the tokens of a rank are sent to, as --routing says.
#ifndef MOE_MOE_CLI_BENCH_SLOTS_H_
#define MOE_MOE_CLI_BENCH_SLOTS_H_

#include <cstdint>
#include <vector>

#include <absl/types/span.h>

#include "moe/cli/bench/routing_spec.h"

namespace moe::bench {

// Slots of T tokens: token t has slots [slot_offset[t], slot_offset[t + 1]), whose experts differ.
struct TokenSlots {
  std::vector<int64_t> slot_offset = {0};  // [T + 1]
  std::vector<int32_t> expert;             // [slots]

  int64_t tokens() const { return static_cast<int64_t>(slot_offset.size()) - 1; }
};

struct SlotOptions {
  int rank = 0, ranks = 1;       // of the world
  int expert_parallel_size = 1;  // ranks that share the experts, placed as ExpertPlacement does
  int64_t tokens = 0;            // of a rank with all its tokens
  int top_k = 1;
  int num_experts = 1;
  uint64_t seed = 0;
};

// [E] probability of each expert as a token's first choice; sums to 1.
//   uniform, ragged, zero_rank   1 / E
//   zipf:S                       proportional to 1 / (e + 1)^S
//   hot_expert:P                 expert 0: P, the others (1 - P) / (E - 1)
//   hot_rank:P                   P evenly over the experts of rank 0, 1 - P over the others
// Where all experts are hot: evenly. Not for matrix and trace.
std::vector<double> ExpertShares(const RoutingSpec& routing, int ranks, int num_experts);

// [T, E]: log p_e + Gumbel noise keyed by (seed, rank, token, expert). The k largest of a row are k
// experts drawn one after the other without replacement, each with a probability proportional to p
// among those that are left (Yellott 1977; Kool et al., arXiv:1903.06059). Experts of p = 0 come
// after all others.
std::vector<float> DrawPreferences(const RoutingSpec& routing, const SlotOptions& options);

// Tokens that the rank has: all, ragged: floor(u * (T + 1)) of them, u uniform; zero_rank: none on
// the last rank. Not for matrix and trace.
int64_t TokensOfRank(const RoutingSpec& routing, const SlotOptions& options);

// K slots for each of TokensOfRank tokens. uniform, ragged, zero_rank: nothing is drawn; slot j of
// global token t is expert (t + j * floor(E / K)) mod E, so that loads are even. Others:
// DrawPreferences. Not for matrix and trace.
TokenSlots DrawSlots(const RoutingSpec& routing, const SlotOptions& options);

// Slots in given numbers: expert after expert, each expert's go to the tokens that follow the last
// one's, around and around. count [E], each at most `tokens`; tokens get the same number of slots
// but for one.
TokenSlots DealSlots(absl::Span<const int64_t> count, int64_t tokens);

// [E] slots of each expert.
std::vector<int64_t> CountSlots(const TokenSlots& slots, int num_experts);

}  // namespace moe::bench

#endif  // MOE_MOE_CLI_BENCH_SLOTS_H_
