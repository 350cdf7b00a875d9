#include "moe/cli/bench/gate_oracle.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "kernels/base/status_macros.h"
#include "moe/cli/bench/routing_spec.h"

namespace moe::bench {

absl::StatusOr<GateLogits> DrawGateLogits(const KernelSpec& spec, int64_t record, int64_t columns) {
  const int experts = spec.router.num_experts;
  SlotOptions options{
      .tokens = spec.tokens, .top_k = spec.router.top_k, .num_experts = experts, .seed = spec.seed};
  std::optional<TokenSlots> given;
  RoutingSpec drawn = spec.routing;
  if (drawn.kind == RoutingSpec::kTrace) {
    MOE_ASSIGN_OR_RETURN(given, KernelSlots(spec, record));
    options.tokens = given->tokens();
    drawn = {};
  }
  GateLogits logits{.tokens = options.tokens,
                    .values = std::vector<float>(options.tokens * columns, 0.0f)};
  const std::vector<float> preference = DrawPreferences(drawn, options);
  for (int64_t t = 0; t < logits.tokens; ++t) {
    float* const row = logits.values.data() + t * columns;
    std::copy_n(preference.begin() + t * experts, experts, row);
    if (!given.has_value()) continue;
    // Above the noise, which ends at 22.2.
    for (int64_t s = given->slot_offset[t]; s < given->slot_offset[t + 1]; ++s) {
      row[given->expert[s]] += 32;
    }
  }
  return logits;
}

std::optional<Weighing> WeighingOf(const RouterConfig& router) {
  const auto with = [&](bool over_chosen) {
    return router.norm_topk_prob.value_or(over_chosen) ? Weighing::kOverChosen : Weighing::kPlain;
  };
  if (router.num_zero_experts > 0) return std::nullopt;
  if (router.gate == "mixtral" || router.gate == "gpt-oss") return Weighing::kOverChosen;
  if (router.gate == "switch") return Weighing::kPlain;
  if (router.gate == "qwen3") return with(true);
  if (router.gate == "qwen2" || router.gate == "olmoe") return with(false);
  return std::nullopt;
}

ExpectedToken ExpectToken(absl::Span<const float> logits, int k, Weighing weighing) {
  ExpectedToken token;
  const auto experts = static_cast<int>(logits.size());
  std::vector<int32_t> ids(experts);
  std::iota(ids.begin(), ids.end(), 0);
  std::partial_sort(ids.begin(), ids.begin() + k, ids.end(), [&](int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  });
  token.expert.assign(ids.begin(), ids.begin() + k);
  const double largest = static_cast<double>(logits[ids[0]]);
  double sum = 0;
  for (const float logit : logits) {
    token.probability.push_back(std::exp(static_cast<double>(logit) - largest));
    sum += token.probability.back();
  }
  for (double& p : token.probability) p /= sum;
  double chosen = 0;
  for (const int32_t e : token.expert) chosen += token.probability[e];
  for (const int32_t e : token.expert) {
    token.weight.push_back(token.probability[e] / (weighing == Weighing::kPlain ? 1 : chosen));
  }
  const double depth = largest - static_cast<double>(logits[token.expert.back()]);
  token.tolerance = 2 * 0x1p-23 * (depth + experts / 16.0 + k + 16);
  return token;
}

bool IsOff(float is, double want, double tolerance) {
  return !(std::abs(static_cast<double>(is) - want) <= tolerance);
}

ExpectedSelection::ExpectedSelection(absl::Span<const float> logits, int64_t experts, int k,
                                     Weighing weighing)
    : count_(experts, 0) {
  for (size_t row = 0; row < logits.size(); row += experts) {
    const ExpectedToken token = ExpectToken(logits.subspan(row, experts), k, weighing);
    for (int j = 0; j < k; ++j) {
      expert_.push_back(token.expert[j]);
      weight_.push_back(token.weight[j]);
      tolerance_.push_back(token.tolerance * token.weight[j] + kUnderflow);
      ++count_[token.expert[j]];
    }
  }
}

int64_t ExpectedSelection::CountWrong(absl::Span<const int32_t> expert,
                                      absl::Span<const float> weight,
                                      absl::Span<const int64_t> count) const {
  int64_t wrong = 0;
  for (size_t s = 0; s < expert_.size(); ++s) {
    wrong += expert[s] != expert_[s];
    wrong += IsOff(weight[s], weight_[s], tolerance_[s]);
  }
  for (size_t e = 0; e < count_.size(); ++e) wrong += count[e] != count_[e];
  return wrong;
}

}  // namespace moe::bench
