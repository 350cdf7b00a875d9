#include "moe/cli/bench/slots.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "dispatch/placement.h"
#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"

namespace moe::bench {
namespace {

// What a random number is for; traffic.cc has its own.
enum Draw : uint32_t { kPreference = 2, kRaggedTokens = 3 };

RandomKey KeyOf(const SlotOptions& options, Draw draw, int64_t token) {
  return {.seed = options.seed,
          .purpose = RandomPurpose::kData,
          .layer = draw,
          .step = static_cast<uint64_t>(options.rank),
          .item = static_cast<uint64_t>(token)};
}

// `hot` experts share P, the others the rest.
std::vector<double> HotShares(int hot, int experts, double hot_share) {
  std::vector<double> shares(experts, (1 - hot_share) / std::max(1, experts - hot));
  std::fill_n(shares.begin(), hot, hot == experts ? 1.0 / hot : hot_share / hot);
  return shares;
}

bool IsDrawn(const RoutingSpec& routing) {
  return routing.kind == RoutingSpec::kZipf || routing.kind == RoutingSpec::kHotExpert ||
         routing.kind == RoutingSpec::kHotRank;
}

TokenSlots EmptySlots(int64_t tokens, int64_t each) {
  TokenSlots slots;
  for (int64_t t = 1; t <= tokens; ++t) slots.slot_offset.push_back(t * each);
  slots.expert.resize(tokens * each);
  return slots;
}

}  // namespace

std::vector<double> ExpertShares(const RoutingSpec& routing, int ranks, int num_experts) {
  MOE_CHECK(routing.kind != RoutingSpec::kMatrix && routing.kind != RoutingSpec::kTrace);
  if (routing.kind == RoutingSpec::kHotExpert) {
    return HotShares(1, num_experts, routing.parameter);
  }
  if (routing.kind == RoutingSpec::kHotRank) {
    return HotShares(ExpertPlacement(num_experts, ranks).LocalExperts(0), num_experts,
                     routing.parameter);
  }
  // S = 0 where nothing is skewed.
  std::vector<double> shares(num_experts);
  for (int e = 0; e < num_experts; ++e) shares[e] = std::pow(e + 1.0, -routing.parameter);
  const double sum = std::accumulate(shares.begin(), shares.end(), 0.0);
  for (double& share : shares) share /= sum;
  return shares;
}

std::vector<float> DrawPreferences(const RoutingSpec& routing, const SlotOptions& options) {
  // log(1e-300) is further down than noise (-3.1 to 22.2 for 32-bit uniforms) lifts anything.
  std::vector<double> log_share =
      ExpertShares(routing, options.expert_parallel_size, options.num_experts);
  for (double& share : log_share) share = std::log(std::max(share, 1e-300));
  const int64_t tokens = TokensOfRank(routing, options);
  std::vector<float> preference;
  preference.reserve(tokens * options.num_experts);
  for (int64_t t = 0; t < tokens; ++t) {
    const RandomKey key = KeyOf(options, kPreference, t);
    for (int e = 0; e < options.num_experts; ++e) {
      const double noise = -std::log(-std::log(Uniform(key, static_cast<uint32_t>(e))));
      preference.push_back(static_cast<float>(log_share[e] + noise));
    }
  }
  return preference;
}

int64_t TokensOfRank(const RoutingSpec& routing, const SlotOptions& options) {
  MOE_CHECK(routing.kind != RoutingSpec::kMatrix && routing.kind != RoutingSpec::kTrace);
  if (routing.kind == RoutingSpec::kZeroRank && options.rank == options.ranks - 1) return 0;
  if (routing.kind != RoutingSpec::kRagged) return options.tokens;
  const double u = Uniform(KeyOf(options, kRaggedTokens, 0));
  return static_cast<int64_t>(u * static_cast<double>(options.tokens + 1));
}

TokenSlots DrawSlots(const RoutingSpec& routing, const SlotOptions& options) {
  const int64_t tokens = TokensOfRank(routing, options);
  const int experts = options.num_experts;
  const int k = options.top_k;
  TokenSlots slots = EmptySlots(tokens, k);
  if (!IsDrawn(routing)) {
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t global = options.rank * options.tokens + t;
      for (int j = 0; j < k; ++j) {
        slots.expert[t * k + j] = static_cast<int32_t>((global + j * (experts / k)) % experts);
      }
    }
    return slots;
  }
  const std::vector<float> preference = DrawPreferences(routing, options);
  std::vector<int32_t> ids(experts);
  for (int64_t t = 0; t < tokens; ++t) {
    const float* const of_token = preference.data() + t * experts;
    std::iota(ids.begin(), ids.end(), 0);
    std::partial_sort(ids.begin(), ids.begin() + k, ids.end(), [&](int32_t a, int32_t b) {
      return of_token[a] != of_token[b] ? of_token[a] > of_token[b] : a < b;
    });
    std::copy_n(ids.begin(), k, slots.expert.begin() + t * k);
  }
  return slots;
}

TokenSlots DealSlots(absl::Span<const int64_t> count, int64_t tokens) {
  TokenSlots slots;
  slots.slot_offset.assign(tokens + 1, 0);
  const int64_t total = std::accumulate(count.begin(), count.end(), int64_t{0});
  if (total == 0) return slots;
  for (int64_t t = 0; t < tokens; ++t) {
    slots.slot_offset[t + 1] = slots.slot_offset[t] + total / tokens + (t < total % tokens ? 1 : 0);
  }
  slots.expert.resize(total);
  int64_t dealt = 0;
  for (size_t e = 0; e < count.size(); ++e) {
    MOE_CHECK(count[e] >= 0 && count[e] <= tokens);
    for (int64_t i = 0; i < count[e]; ++i, ++dealt) {
      slots.expert[slots.slot_offset[dealt % tokens] + dealt / tokens] = static_cast<int32_t>(e);
    }
  }
  return slots;
}

std::vector<int64_t> CountSlots(const TokenSlots& slots, int num_experts) {
  std::vector<int64_t> count(num_experts, 0);
  for (const int32_t e : slots.expert) ++count[e];
  return count;
}

}  // namespace moe::bench
