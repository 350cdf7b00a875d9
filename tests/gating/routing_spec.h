// A router's configuration in the oracle's terms.
#ifndef MOE_TESTS_GATING_ROUTING_SPEC_H_
#define MOE_TESTS_GATING_ROUTING_SPEC_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "gating/router_config.h"
#include "kernels/base/rng.h"
#include "tests/gating/routing_oracle.h"

namespace moe {

inline oracle::RoutingSpec SpecOf(const RouterConfig& config) {
  const int64_t group = config.token_group.tokens;
  const oracle::Unit unit = group == 0    ? oracle::Unit::kMicroBatch
                            : group == -1 ? oracle::Unit::kSequence
                                          : oracle::Unit::kBlock;
  oracle::RoutingSpec spec = oracle::RuleOf(config.gate, config.top_k);
  spec.experts = config.num_outputs();
  spec.zero_experts = config.num_zero_experts;
  spec.capacity_factor = config.capacity_factor.value_or(0);
  spec.drop = config.drop_policy == DropPolicy::kPosition ? oracle::Drop::kByPosition
                                                          : oracle::Drop::kByWeight;
  spec.capacity_unit = unit;
  spec.balance_unit =
      config.load_balancing == LoadBalancing::kSeqAuxLoss ? oracle::Unit::kSequence : unit;
  spec.block = group;
  spec.groups = config.num_groups;
  spec.group_top_k = config.group_top_k;
  spec.scale = static_cast<double>(config.scaling_factor);
  spec.router_jitter = static_cast<double>(config.router_jitter);
  if (config.gate == "topk") {
    spec.sigmoid = config.score_function == ScoreFunction::kSigmoid;
    spec.normalised = spec.sigmoid ? config.top_k > 1 : !config.pre_softmax;
    spec.epsilon = spec.sigmoid ? 1e-20 : 0;
    spec.group_sum = config.group_top_k == 0 ? 1 : std::max(1, config.top_k / config.group_top_k);
  }
  spec.normalised = config.norm_topk_prob.value_or(spec.normalised);
  spec.epsilon = double{config.norm_epsilon.value_or(static_cast<float>(spec.epsilon))};
  spec.aux_coeff = config.load_balancing == LoadBalancing::kNone
                       ? 0
                       : static_cast<double>(config.aux_loss_coeff);
  spec.z_coeff = static_cast<double>(config.z_loss_coeff);
  return spec;
}

// The numbers that a gate draws in training for tokens 0 .. tokens of a step.
inline void DrawRandomNumbers(const RouterConfig& config, int64_t tokens, int64_t step,
                              oracle::RoutingInput& input) {
  for (int64_t t = 0; t < tokens; ++t) {
    RandomKey key = {.seed = config.seed,
                     .layer = config.layer,
                     .step = static_cast<uint64_t>(step),
                     .item = static_cast<uint64_t>(t)};
    key.purpose = RandomPurpose::kNoise;
    std::vector<double> z;
    for (int32_t e = 0; e < config.num_outputs(); ++e) {
      z.push_back(double{static_cast<float>(Normal(key, static_cast<uint32_t>(e)))});
    }
    input.noise.push_back(z);
    key.purpose = RandomPurpose::kSecondExpert;
    input.second_draw.push_back(config.random_second_expert ? Uniform(key) : 0);
  }
}

}  // namespace moe

#endif  // MOE_TESTS_GATING_ROUTING_SPEC_H_
