// Traffic matrices: who sends how much to whom, even or skewed.
#ifndef MOE_MOE_CLI_MEASURE_TRAFFIC_H_
#define MOE_MOE_CLI_MEASURE_TRAFFIC_H_

#include <cstdint>
#include <vector>

#include <absl/types/span.h>

#include "moe/cli/measure/routing_spec.h"

namespace moe::measure {

// at(s, d): elements that rank s sends to rank d, its own part (s = d) included.
class Traffic {
 public:
  Traffic() = default;
  explicit Traffic(int ranks) : ranks_(ranks), elements_(static_cast<size_t>(ranks) * ranks, 0) {}

  int ranks() const { return ranks_; }
  int64_t& at(int source, int destination) { return elements_[source * ranks_ + destination]; }
  int64_t at(int source, int destination) const { return elements_[source * ranks_ + destination]; }
  absl::Span<const int64_t> from(int source) const {  // [R] by destination
    return absl::MakeConstSpan(elements_).subspan(source * ranks_, ranks_);
  }
  std::vector<int64_t> to(int destination) const;  // [R] by source

  // Adds `times` the traffic of as many ranks.
  void Add(const Traffic& other, int64_t times) {
    for (size_t i = 0; i < elements_.size(); ++i) elements_[i] += times * other.elements_[i];
  }

  int64_t Sent(int rank) const;
  int64_t Received(int rank) const;
  std::vector<int64_t> SentByRank() const;
  std::vector<int64_t> ReceivedByRank() const;
  // max over ranks of max(sent, received).
  int64_t Largest() const;

 private:
  int ranks_ = 0;
  std::vector<int64_t> elements_;
};

// The share of each rank's tokens that goes to each destination, [R][R]; a row sums to 1. Experts
// are placed as ExpertPlacement does (dispatch/placement.h). Not for kMatrix and kTrace.
std::vector<double> DestinationShares(const RoutingSpec& routing, int ranks, int num_experts);

struct TrafficOptions {
  int ranks = 1;
  int64_t count = 0;    // elements of a rank with all its tokens
  int num_experts = 1;  // over all ranks, for kZipf and kHotExpert
  uint64_t seed = 0;
  int64_t call = 0;  // kTrace: which record
};

// Tokens of one rank: its elements are cut into at most this many, equal but for a remainder of
// one, and travel token by token.
inline constexpr int64_t kTokensPerRank = 4096;

// uniform: count / R to every rank, the remainder to the lowest; nothing is drawn. matrix: the
// given shares, scaled so that Largest() is count (but for rounding down). trace: the slots of the
// record, scaled so that the largest of all records' Largest() is count. All others: every token
// of rank s draws its destination from DestinationShares, independently (a multinomial), and
//   ragged     rank s has floor(u * (T + 1)) of its T tokens, u uniform in (0, 1)
//   zero_rank  rank R - 1 has none of them
// Depends on the arguments only: every rank computes the same.
Traffic MakeTraffic(const RoutingSpec& routing, const TrafficOptions& options);

// `each` elements between every two ranks and inside every rank.
Traffic EvenTraffic(int ranks, int64_t each);

// max / mean; 1 when nothing moves.
double Imbalance(absl::Span<const int64_t> per_rank);
// The lowest rank that has the most; -1 when all have the same.
int Busiest(absl::Span<const int64_t> per_rank);

// Elements by how far they travel, summed over ranks.  nodes [R]: the same for ranks of one node.
struct Distances {
  int64_t self = 0, same_node = 0, cross_node = 0;
};
Distances DistancesOf(const Traffic& traffic, absl::Span<const uint64_t> nodes);

// Traffic of hierarchical dispatch for `traffic` (dispatch/two_hop_exchange.h), along
// rank (m, l) -> (m', l) -> (m', l'). Every element is counted once per hop. node_size divides R.
Traffic TwoHopTraffic(const Traffic& traffic, int node_size);

}  // namespace moe::measure

#endif  // MOE_MOE_CLI_MEASURE_TRAFFIC_H_
