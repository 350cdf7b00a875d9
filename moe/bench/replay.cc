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
  Record record{.tokens = std::vector<int64_t>(ranks_, 0),
                .slots = std::vector<int64_t>(static_cast<size_t>(ranks_) * experts, 0)};
  for (int source = 0; source < header_.ranks; ++source) {
    const int rank = source / merged;
    record.tokens[rank] += recorded.tokens[source];
    const auto slots = recorded.of_rank(source, experts);
    for (int e = 0; e < experts; ++e) record.slots[rank * experts + e] += slots[e];
  }
  const std::vector<int64_t> traffic = TrafficOf(record);
  for (int r = 0; r < ranks_; ++r) {
    int64_t sent = 0;
    int64_t received = 0;
    for (int p = 0; p < ranks_; ++p) {
      sent += traffic[r * ranks_ + p];
      received += traffic[p * ranks_ + r];
    }
    const int64_t tokens = record.tokens[r];
    largest_ = std::max({largest_, sent, received});
    most_tokens_ = std::max(most_tokens_, tokens);
    if (tokens > 0) most_slots_ = std::max(most_slots_, (sent + tokens - 1) / tokens);
  }
  records_.push_back(std::move(record));
}

std::vector<int64_t> Replay::TrafficOf(const Record& record) const {
  const ExpertPlacement placement(header_.num_experts, ranks_);
  std::vector<int64_t> traffic(static_cast<size_t>(ranks_) * ranks_, 0);
  for (int r = 0; r < ranks_; ++r) {
    for (int e = 0; e < header_.num_experts; ++e) {
      traffic[r * ranks_ + placement.RankOf(e)] += record.slots[r * header_.num_experts + e];
    }
  }
  return traffic;
}

}  // namespace moe::bench
