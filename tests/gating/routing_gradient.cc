// Gradients of the oracle, by central differences of Route.
#include <cstdint>
#include <type_traits>
#include <vector>

#include "tests/gating/routing_oracle.h"

namespace moe::oracle {
namespace {

using Row = std::vector<double>;

// The micro-batch as an input of its own: nothing in routing crosses it.
RoutingInput OneMicroBatch(const RoutingInput& input, int64_t begin, int64_t end) {
  RoutingInput own = {.micro_batch_offsets = {0, end - begin}};
  own.logits = {input.logits.begin() + begin, input.logits.begin() + end};
  for (const int64_t s : input.sequence_offsets) {
    if (s >= begin && s <= end) own.sequence_offsets.push_back(s - begin);
  }
  own.training = input.training;
  own.expert_bias = input.expert_bias;
  own.expert_share = input.expert_share;
  const auto cut = [&](const auto& all) {
    using All = std::decay_t<decltype(all)>;
    return all.empty() ? All() : All(all.begin() + begin, all.begin() + end);
  };
  own.noise = cut(input.noise);
  own.second_draw = cut(input.second_draw);
  return own;
}

}  // namespace

std::vector<Row> LogitGradient(const RoutingSpec& spec, const RoutingInput& input,
                               const std::vector<Row>& d_weight, double step) {
  std::vector<Row> gradient = input.logits;
  for (size_t b = 0; b + 1 < input.micro_batch_offsets.size(); ++b) {
    const int64_t begin = input.micro_batch_offsets[b];
    RoutingInput moved = OneMicroBatch(input, begin, input.micro_batch_offsets[b + 1]);
    const auto objective = [&] {
      const RoutingResult r = Route(spec, moved);
      double sum = r.aux_loss + r.z_loss;
      for (size_t t = 0; t < r.token.size(); ++t) {
        const Row& d = d_weight[static_cast<size_t>(begin) + t];
        for (size_t j = 0; j < d.size(); ++j) sum += d[j] * r.token[t].weight[j];
      }
      return sum;
    };
    for (size_t t = 0; t < moved.logits.size(); ++t) {
      for (size_t e = 0; e < moved.logits[t].size(); ++e) {
        const double at = moved.logits[t][e];
        moved.logits[t][e] = at + step;
        const double above = objective();
        moved.logits[t][e] = at - step;
        const double below = objective();
        moved.logits[t][e] = at;
        gradient[static_cast<size_t>(begin) + t][e] = (above - below) / (2 * step);
      }
    }
  }
  return gradient;
}

}  // namespace moe::oracle
