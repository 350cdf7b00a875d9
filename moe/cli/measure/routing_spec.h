// How skewed the traffic of a benchmark is: --routing.
#ifndef MOE_MOE_CLI_MEASURE_ROUTING_SPEC_H_
#define MOE_MOE_CLI_MEASURE_ROUTING_SPEC_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "kernels/base/rng.h"
#include "moe/io/routing_trace.h"

namespace moe::measure {

// A trace of R ranks as n ranks replay it: rank r has the tokens and slots of the R / n recorded
// neighbours r R/n .. (r + 1) R/n - 1. All n share one set of experts, placed as ExpertPlacement
// does, whatever expert_parallel_size was.
class Replay {
 public:
  struct Record {
    std::vector<int64_t> tokens;  // [n]
    std::vector<int64_t> slots;   // [n][E]
  };

  // kInvalidArgument unless n divides R.
  static absl::StatusOr<Replay> Create(const RoutingTrace& trace, int ranks);

  const RoutingTraceHeader& header() const { return header_; }
  int ranks() const { return ranks_; }
  // Calls use the records in turn, and begin again with the first after the last.
  int64_t records() const { return static_cast<int64_t>(records_.size()); }
  const Record& record(int64_t call) const { return records_[call % records()]; }
  absl::Span<const int64_t> slots_of(int64_t call, int rank) const {  // [E]
    return absl::MakeConstSpan(record(call).slots)
        .subspan(static_cast<size_t>(rank) * header_.num_experts, header_.num_experts);
  }
  // [n][n] slots of source s for the experts of rank d.
  std::vector<int64_t> traffic_of(int64_t call) const { return TrafficOf(record(call)); }
  // max over records and ranks of max(slots sent, slots received).
  int64_t largest() const { return largest_; }
  // max over records and ranks.
  int64_t most_tokens() const { return most_tokens_; }
  // max over records and ranks of slots / tokens, rounded up.
  int64_t most_slots_of_a_token() const { return most_slots_; }

 private:
  Replay(const RoutingTraceHeader& header, int ranks) : header_(header), ranks_(ranks) {}

  void Add(const RoutingTraceRecord& recorded);
  std::vector<int64_t> TrafficOf(const Record& record) const;

  const RoutingTraceHeader header_;
  const int ranks_;
  std::vector<Record> records_;
  int64_t largest_ = 0, most_tokens_ = 0, most_slots_ = 1;
};

struct RoutingSpec {
  enum Kind : uint8_t {
    kUniform,    // every pair the same
    kZipf,       // expert e is chosen with probability proportional to 1 / (e + 1)^S
    kHotExpert,  // expert 0 has a share P, the other experts the rest evenly
    kHotRank,    // rank 0 has a share P, the other ranks the rest evenly
    kRagged,     // ranks have 0 .. all of the tokens, at random; destinations are even
    kZeroRank,   // the last rank has no tokens; destinations are even
    kMatrix,     // given shares
    kTrace,      // recorded by moe train --record-routing, call by call
  };
  Kind kind = kUniform;
  double parameter = 0;                  // S or P
  std::string path;                      // file of the matrix or trace
  std::vector<double> weights;           // [R][R] of the matrix, source by source
  std::shared_ptr<const Replay> replay;  // the trace; shared by the ranks of a process
  std::string text = "uniform";
};

// "uniform", "zipf:S" (S >= 0), "hot_expert:P", "hot_rank:P" (0 <= P <= 1), "ragged", "zero_rank",
// "matrix:FILE" (read it with ParseTrafficMatrix), "trace:FILE" (ParseRoutingTrace, then Replay).
// kInvalidArgument for all else.
absl::StatusOr<RoutingSpec> ParseRouting(absl::string_view text);

// Number of different calls: the records of a trace, else 1.
int64_t CallsOf(const RoutingSpec& routing);

// R lines of R numbers >= 0: line s, column d is what rank s sends to rank d, in any unit. Numbers
// are separated by blanks or commas; '#' starts a comment. kInvalidArgument with line and reason.
absl::StatusOr<std::vector<double>> ParseTrafficMatrix(absl::string_view text, int ranks);

// Purpose of a random number of a routing: traffic, or slots.
enum class Draw : uint32_t { kDestination, kTrafficTokens, kPreference, kSlotTokens };
RandomKey KeyOf(uint64_t seed, Draw draw, int rank, int64_t token);

// Experts to which the tokens of a rank are sent, by --routing.

// Slots of T tokens: token t has slots [slot_offset[t], slot_offset[t + 1]), whose experts differ.
struct TokenSlots {
  std::vector<int64_t> slot_offset = {0};  // [T + 1]
  std::vector<int32_t> expert;             // [slots]

  int64_t tokens() const { return static_cast<int64_t>(slot_offset.size()) - 1; }
};

struct SlotOptions {
  int rank = 0, ranks = 1;       // rank, and ranks of the world
  int expert_parallel_size = 1;  // ranks that share the experts, placed as ExpertPlacement does
  int64_t tokens = 0;            // tokens of a rank that has all its tokens
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

// Tokens that the rank has: all; ragged: floor(u * (T + 1)) of them, u uniform; zero_rank: none on
// the last rank. Not for matrix and trace.
int64_t TokensOfRank(const RoutingSpec& routing, const SlotOptions& options,
                     Draw draw = Draw::kSlotTokens);

// K slots for each of TokensOfRank tokens. uniform, ragged, zero_rank: nothing is drawn; slot j of
// global token t is expert (t + j * floor(E / K)) mod E, so that loads are even. Others:
// DrawPreferences. Not for matrix and trace.
TokenSlots DrawSlots(const RoutingSpec& routing, const SlotOptions& options);

// Slots in given numbers: expert after expert, each expert's slots are dealt to the tokens that
// follow the last one of the expert before, cyclically. count [E], each at most `tokens`; tokens
// get the same number of slots but for one.
TokenSlots DealSlots(absl::Span<const int64_t> count, int64_t tokens);

// [E] slots of each expert.
std::vector<int64_t> CountSlots(const TokenSlots& slots, int num_experts);

}  // namespace moe::measure

#endif  // MOE_MOE_CLI_MEASURE_ROUTING_SPEC_H_
