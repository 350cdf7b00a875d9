#include "moe/plan/routing_sim.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "dispatch/placement.h"
#include "kernels/base/rng.h"

namespace moe::plan {
namespace {

// Random numbers of one key, one after the other.
class Draws {
 public:
  explicit Draws(const RandomKey& key) : key_(key) {}

  // Of mean `shape`, at least 0.
  double Gamma(double shape) {
    if (shape < 1) return Gamma(shape + 1) * std::pow(Uniform(), 1 / shape);
    const double d = shape - 1.0 / 3, c = 1 / std::sqrt(9 * d);
    while (true) {
      const double x = Normal(), v = std::pow(1 + c * x, 3);
      if (v > 0 && std::log(Uniform()) < x * x / 2 + d - d * v + d * std::log(v)) return d * v;
    }
  }

  // Of `slots`, those that have an event of this probability. Where many are expected and many are
  // not, by the normal distribution, which is then within a slot of it.
  double Binomial(double slots, double probability) {
    constexpr double kMany = 30;
    if (slots <= 0 || probability <= 0) return 0;
    if (probability >= 1) return slots;
    if (probability > 0.5) return slots - Binomial(slots, 1 - probability);
    const double mean = slots * probability, variance = mean * (1 - probability);
    if (variance > kMany) {
      return std::clamp(std::round(mean + std::sqrt(variance) * Normal()), 0.0, slots);
    }
    double count = 0, left = Uniform();
    double term = std::exp(slots * std::log1p(-probability));
    while (left > term && count < slots) {
      left -= term;
      term *= (slots - count) / (count + 1) * probability / (1 - probability);
      ++count;
    }
    return count;
  }

 private:
  double Uniform() { return moe::Uniform(key_, index_++); }
  double Normal() { return moe::Normal(key_, index_++); }

  const RandomKey key_;
  uint32_t index_ = 0;
};

RandomKey KeyOf(uint64_t seed, uint32_t pass, uint64_t group) {
  return {.seed = seed, .purpose = RandomPurpose::kData, .layer = pass, .item = group};
}

// Each at most 1/K of all, the rest in proportion.
std::vector<double> Capped(std::vector<double> shares, int top_k) {
  double sum = 0;
  for (double& share : shares) sum += share = std::min(share, 1.0 / top_k);
  for (double& share : shares) share /= sum;
  return shares;
}

// Shares of contiguous blocks of experts.
std::vector<double> SharesOfBlocks(const std::vector<double>& shares, int blocks) {
  const ExpertPlacement placement(static_cast<int32_t>(shares.size()), blocks);
  std::vector<double> sums(static_cast<size_t>(blocks));
  for (int b = 0; b < blocks; ++b) {
    sums[b] = std::accumulate(shares.begin() + placement.FirstExpert(b),
                              shares.begin() + placement.FirstExpert(b + 1), 0.0);
  }
  return sums;
}

// Slots of the rank with the most, of a group's that are dealt by `shares`.
double MostSlots(const std::vector<double>& shares, double slots, Draws draws) {
  double most = 0, left = 1;
  for (const double share : shares) {
    const double count = draws.Binomial(slots, left > share ? share / left : 1);
    most = std::max(most, count);
    slots -= count;
    left -= share;
  }
  return most;
}

}  // namespace

PassShares DirichletShares(int experts, double concentration, int passes, uint64_t seed) {
  // No group has this number: draws of shares and of slots are apart.
  constexpr uint64_t kShares = ~uint64_t{0};
  PassShares all(static_cast<size_t>(passes));
  for (size_t pass = 0; pass < all.size(); ++pass) {
    Draws draws(KeyOf(seed, static_cast<uint32_t>(pass), kShares));
    double sum = 0;
    for (int e = 0; e < experts; ++e) sum += all[pass].emplace_back(draws.Gamma(concentration));
    for (double& share : all[pass]) share /= sum;
  }
  return all;
}

PassShares TraceShares(const RoutingTrace& trace) {
  PassShares all;
  const auto experts = static_cast<size_t>(trace.header.num_experts);
  for (const RoutingTraceRecord& record : trace.records) {
    std::vector<double> shares(experts, 0);
    double sum = 0;
    for (size_t i = 0; i < record.slots.size(); ++i) {
      const auto slots = static_cast<double>(record.slots[i]);
      shares[i % experts] += slots;
      sum += slots;
    }
    if (sum == 0) continue;
    for (double& share : shares) share /= sum;
    all.push_back(std::move(shares));
  }
  return all;
}

Imbalance SimulateRouting(const PassShares& shares, const RoutedWorld& world) {
  const auto groups = static_cast<size_t>(world.ranks / world.expert);
  const double even = static_cast<double>(world.tokens) * world.top_k;
  std::vector<double> sums(groups, 0);
  double worst = 0;
  for (size_t pass = 0; pass < shares.size(); ++pass) {
    const auto ranks = SharesOfBlocks(Capped(shares[pass], world.top_k), world.expert);
    for (size_t g = 0; g < groups; ++g) {
      const Draws draws(KeyOf(world.seed, static_cast<uint32_t>(pass), g));
      const double most = MostSlots(ranks, even * world.expert, draws) / even;
      sums[g] += most;
      worst = std::max(worst, most);
    }
  }
  const auto passes = static_cast<double>(shares.size());
  const double all = std::accumulate(sums.begin(), sums.end(), 0.0);
  return {.mean_group = all / static_cast<double>(groups) / passes,
          .slowest_group = *std::max_element(sums.begin(), sums.end()) / passes,
          .worst_pass = worst};
}

double NodesOfToken(const PassShares& shares, int nodes, int top_k) {
  double reached = 0;
  for (const std::vector<double>& pass : shares) {
    for (const double share : SharesOfBlocks(Capped(pass, top_k), nodes)) {
      reached += 1 - std::pow(1 - std::min(1.0, share), top_k);
    }
  }
  return reached / static_cast<double>(shares.size());
}

}  // namespace moe::plan
