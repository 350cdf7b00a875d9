// Recorded routing (moe/io/routing_trace.h) on the ranks of a benchmark.
#ifndef MOE_MOE_BENCH_REPLAY_H_
#define MOE_MOE_BENCH_REPLAY_H_

#include <cstdint>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "moe/io/routing_trace.h"

namespace moe::bench {

// n ranks stand for the R that were recorded: the R / n neighbours r R/n .. (r + 1) R/n - 1 are the
// sources that rank r stands for. All n share one set of experts, placed as ExpertPlacement does,
// whatever expert_parallel_size was.
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
  // Calls take the records in turn, from the first again after the last.
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

}  // namespace moe::bench

#endif  // MOE_MOE_BENCH_REPLAY_H_
