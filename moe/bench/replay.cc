#include "moe/bench/replay.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "dispatch/placement.h"

namespace moe::bench {

absl::StatusOr<Replay> Replay::Create(const RoutingTrace& trace, int ranks) {
  const int recorded = trace.header.ranks;
  if (ranks < 1 || recorded % ranks != 0) {
    std::vector<int> divisors;
    for (int n = 1; n <= recorded; ++n) {
      if (recorded % n == 0) divisors.push_back(n);
    }
    return absl::InvalidArgumentError(absl::StrCat(
        ranks, " ranks for routing recorded on ", recorded, ", expected ",
        absl::StrJoin(divisors, ", "), ": as many, or so many that neighbours can be merged"));
  }
  Replay replay(trace.header, ranks);
  for (const RoutingTraceRecord& record : trace.records) replay.Add(record);
  return replay;
}

void Replay::Add(const RoutingTraceRecord& recorded) {
  const int experts = header_.num_experts;
  const int merged = header_.ranks / ranks_;
  const ExpertPlacement placement(experts, ranks_);
  Record record{.tokens = std::vector<int64_t>(ranks_, 0),
                .slots = std::vector<int64_t>(static_cast<size_t>(ranks_) * experts, 0),
                .traffic = std::vector<int64_t>(static_cast<size_t>(ranks_) * ranks_, 0)};
  for (int source = 0; source < header_.ranks; ++source) {
    const int rank = source / merged;
    record.tokens[rank] += recorded.tokens[source];
    const auto slots = recorded.of_rank(source, experts);
    for (int e = 0; e < experts; ++e) {
      record.slots[rank * experts + e] += slots[e];
      record.traffic[rank * ranks_ + placement.RankOf(e)] += slots[e];
    }
  }
  for (int r = 0; r < ranks_; ++r) {
    int64_t sent = 0;
    int64_t received = 0;
    for (int p = 0; p < ranks_; ++p) {
      sent += record.traffic[r * ranks_ + p];
      received += record.traffic[p * ranks_ + r];
    }
    largest_ = std::max({largest_, sent, received});
    most_tokens_ = std::max(most_tokens_, record.tokens[r]);
  }
  records_.push_back(std::move(record));
}

}  // namespace moe::bench
