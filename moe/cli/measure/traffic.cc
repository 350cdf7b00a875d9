#include "moe/cli/measure/traffic.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "dispatch/placement.h"
#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"

namespace moe::measure {
namespace {

// [R], sums to 1: the same for every source.
std::vector<double> RankShares(const RoutingSpec& routing, int ranks, int num_experts) {
  std::vector<double> shares(ranks, 1.0 / ranks);
  if (routing.kind == RoutingSpec::kHotRank && ranks > 1) {
    std::fill(shares.begin(), shares.end(), (1 - routing.parameter) / (ranks - 1));
    shares[0] = routing.parameter;
  }
  if (routing.kind == RoutingSpec::kZipf || routing.kind == RoutingSpec::kHotExpert) {
    const ExpertPlacement placement(num_experts, ranks);
    std::fill(shares.begin(), shares.end(), 0);
    const std::vector<double> of_expert = ExpertShares(routing, ranks, num_experts);
    for (int e = 0; e < num_experts; ++e) shares[placement.RankOf(e)] += of_expert[e];
  }
  return shares;
}

Traffic UniformTraffic(int ranks, int64_t count) {
  Traffic traffic(ranks);
  for (int s = 0; s < ranks; ++s) {
    for (int d = 0; d < ranks; ++d) traffic.at(s, d) = count / ranks + (d < count % ranks ? 1 : 0);
  }
  return traffic;
}

Traffic MatrixTraffic(const RoutingSpec& routing, int ranks, int64_t count) {
  MOE_CHECK(routing.weights.size() == static_cast<size_t>(ranks) * ranks);
  const auto weight = [&](int s, int d) {
    return routing.weights[s * ranks + d];
  };
  double largest = 0;
  for (int r = 0; r < ranks; ++r) {
    double sent = 0;
    double received = 0;
    for (int p = 0; p < ranks; ++p) {
      sent += weight(r, p);
      received += weight(p, r);
    }
    largest = std::max({largest, sent, received});
  }
  Traffic traffic(ranks);
  for (int s = 0; s < ranks; ++s) {
    for (int d = 0; d < ranks; ++d) {
      // Share first: weights may be as large as a double holds.
      traffic.at(s, d) =
          static_cast<int64_t>(std::floor(weight(s, d) / largest * static_cast<double>(count)));
    }
  }
  return traffic;
}

Traffic ReplayTraffic(const Replay& replay, int64_t count, int64_t call) {
  Traffic traffic(replay.ranks());
  const std::vector<int64_t> slots = replay.traffic_of(call);
  // Products of slots and elements may be beyond 64 bits.
  const auto largest = static_cast<__int128>(std::max<int64_t>(1, replay.largest()));
  for (int s = 0; s < replay.ranks(); ++s) {
    for (int d = 0; d < replay.ranks(); ++d) {
      const auto product = static_cast<__int128>(slots[s * replay.ranks() + d]) * count;
      traffic.at(s, d) = static_cast<int64_t>(product / largest);
    }
  }
  return traffic;
}

}  // namespace

std::vector<int64_t> Traffic::to(int destination) const {
  std::vector<int64_t> column(ranks_);
  for (int s = 0; s < ranks_; ++s) column[s] = at(s, destination);
  return column;
}

int64_t Traffic::Sent(int rank) const {
  const auto row = from(rank);
  return std::accumulate(row.begin(), row.end(), int64_t{0});
}

int64_t Traffic::Received(int rank) const {
  const auto column = to(rank);
  return std::accumulate(column.begin(), column.end(), int64_t{0});
}

std::vector<int64_t> Traffic::SentByRank() const {
  std::vector<int64_t> sent;
  for (int r = 0; r < ranks_; ++r) sent.push_back(Sent(r));
  return sent;
}

std::vector<int64_t> Traffic::ReceivedByRank() const {
  std::vector<int64_t> received;
  for (int r = 0; r < ranks_; ++r) received.push_back(Received(r));
  return received;
}

int64_t Traffic::Largest() const {
  int64_t largest = 0;
  for (int r = 0; r < ranks_; ++r) largest = std::max({largest, Sent(r), Received(r)});
  return largest;
}

std::vector<double> DestinationShares(const RoutingSpec& routing, int ranks, int num_experts) {
  MOE_CHECK(routing.kind != RoutingSpec::kMatrix && routing.kind != RoutingSpec::kTrace);
  const std::vector<double> row = RankShares(routing, ranks, num_experts);
  std::vector<double> shares;
  for (int s = 0; s < ranks; ++s) shares.insert(shares.end(), row.begin(), row.end());
  return shares;
}

Traffic MakeTraffic(const RoutingSpec& routing, const TrafficOptions& options) {
  const int ranks = options.ranks;
  const int64_t count = options.count;
  if (routing.kind == RoutingSpec::kUniform) return UniformTraffic(ranks, count);
  if (routing.kind == RoutingSpec::kMatrix) return MatrixTraffic(routing, ranks, count);
  if (routing.kind == RoutingSpec::kTrace) {
    MOE_CHECK(routing.replay != nullptr && routing.replay->ranks() == ranks);
    return ReplayTraffic(*routing.replay, count, options.call);
  }
  std::vector<double> up_to = RankShares(routing, ranks, options.num_experts);
  std::partial_sum(up_to.begin(), up_to.end(), up_to.begin());
  const int64_t tokens = std::min(count, kTokensPerRank);
  Traffic traffic(ranks);
  for (int s = 0; s < ranks; ++s) {
    const int64_t mine =
        TokensOfRank(routing, {.rank = s, .ranks = ranks, .tokens = tokens, .seed = options.seed},
                     Draw::kTrafficTokens);
    for (int64_t t = 0; t < mine; ++t) {
      const double u = Uniform(KeyOf(options.seed, Draw::kDestination, s, t));
      const auto d = std::upper_bound(up_to.begin(), up_to.end() - 1, u) - up_to.begin();
      traffic.at(s, static_cast<int>(d)) += count / tokens + (t < count % tokens ? 1 : 0);
    }
  }
  return traffic;
}

Traffic EvenTraffic(int ranks, int64_t each) {
  Traffic traffic(ranks);
  for (int s = 0; s < ranks; ++s) {
    for (int d = 0; d < ranks; ++d) traffic.at(s, d) = each;
  }
  return traffic;
}

double Imbalance(absl::Span<const int64_t> per_rank) {
  const int64_t sum = std::accumulate(per_rank.begin(), per_rank.end(), int64_t{0});
  if (sum == 0) return 1;
  return static_cast<double>(*std::max_element(per_rank.begin(), per_rank.end())) *
         static_cast<double>(per_rank.size()) / static_cast<double>(sum);
}

int Busiest(absl::Span<const int64_t> per_rank) {
  const auto [least, most] = std::minmax_element(per_rank.begin(), per_rank.end());
  if (least == per_rank.end() || *least == *most) return -1;
  return static_cast<int>(std::find(per_rank.begin(), per_rank.end(), *most) - per_rank.begin());
}

Distances DistancesOf(const Traffic& traffic, absl::Span<const uint64_t> nodes) {
  Distances distances;
  for (int s = 0; s < traffic.ranks(); ++s) {
    for (int d = 0; d < traffic.ranks(); ++d) {
      int64_t& where = s == d                 ? distances.self
                       : nodes[s] == nodes[d] ? distances.same_node
                                              : distances.cross_node;
      where += traffic.at(s, d);
    }
  }
  return distances;
}

Traffic TwoHopTraffic(const Traffic& traffic, int node_size) {
  Traffic hops(traffic.ranks());
  for (int s = 0; s < traffic.ranks(); ++s) {
    for (int d = 0; d < traffic.ranks(); ++d) {
      const int middle = d / node_size * node_size + s % node_size;
      hops.at(s, middle) += traffic.at(s, d);
      hops.at(middle, d) += traffic.at(s, d);
    }
  }
  return hops;
}

}  // namespace moe::measure
