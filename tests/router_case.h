// One router with inputs that its tests share, and the same in the oracle's terms.
#ifndef MOE_TESTS_ROUTER_CASE_H_
#define MOE_TESTS_ROUTER_CASE_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "gating/router.h"
#include "kernels/base/rng.h"
#include "tests/routing_oracle.h"

namespace moe {

// One router with its inputs; the router's weight is the identity, so that logits are the tokens
// and the gradient by the tokens is the gradient by the logits, unless a test sets another one.
template <typename T>
struct RouterCase {
  RouterConfig config;
  int64_t tokens = 0;
  std::vector<T> x, weight;
  std::vector<int64_t> sequences, micro_batches;

  Workspace workspace;
  std::unique_ptr<Stream> stream = MakeInlineStream();
  RouterSaved<T> saved;
  RouterStats stats;
  Routing routing;

  Batch batch() const {
    return {.sequence_offsets = sequences, .micro_batch_offsets = micro_batches};
  }
  MatrixView<const T> Tokens() const { return {x.data(), tokens, config.hidden_size}; }
  MatrixView<const T> Weight() const {
    return {weight.data(), config.num_experts, config.hidden_size};
  }
};

template <typename T>
std::vector<T> RandomVector(size_t size, uint64_t seed, double scale = 1) {
  std::vector<T> values(size);
  for (size_t i = 0; i < size; ++i) {
    values[i] = static_cast<T>(static_cast<float>(scale * Normal({.seed = seed, .item = i})));
  }
  return values;
}

inline RouterConfig SmallConfig(const std::string& gate, int32_t experts) {
  const int32_t k = gate == "switch" ? 1 : gate == "gshard" ? 2 : std::min(3, experts);
  return {.gate = gate, .num_experts = experts, .top_k = k, .hidden_size = experts};
}

// Three micro-batches of sequences of 4, 8, 12 | 12, 12 | 24 tokens.
template <typename T = float>
std::unique_ptr<RouterCase<T>> LogitCase(const RouterConfig& config, uint64_t seed) {
  auto c = std::make_unique<RouterCase<T>>();
  c->config = config;
  c->sequences = {0, 4, 12, 24, 36, 48, 72};
  c->micro_batches = {0, 24, 48, 72};
  c->tokens = 72;
  c->x = RandomVector<T>(static_cast<size_t>(72 * config.num_experts), seed);
  c->weight.assign(
      static_cast<size_t>(config.num_experts) * static_cast<size_t>(config.num_experts), T(0.0f));
  for (size_t e = 0; e < static_cast<size_t>(config.num_experts); ++e) {
    c->weight[e * static_cast<size_t>(config.num_experts) + e] = T(1.0f);
  }
  return c;
}

template <typename T>
absl::Status RunForward(RouterCase<T>& c) {
  auto router = Router<T>::Create(c.config);
  if (!router.ok()) return router.status();
  auto routing = (*router)->Forward(c.Tokens(), c.Weight(), c.batch(), c.workspace, *c.stream,
                                    &c.saved, &c.stats);
  if (!routing.ok()) return routing.status();
  c.routing = *routing;
  return absl::OkStatus();
}

template <typename T>
struct RouterGradients {
  std::vector<T> d_tokens;
  std::vector<float> d_weight;
};

template <typename T>
absl::Status RunBackward(RouterCase<T>& c, const std::vector<float>& d_slot, float loss_scale,
                         std::vector<T>& d_tokens, const GradAccumulator& d_weight) {
  const auto router = Router<T>::Create(c.config);
  if (!router.ok()) return router.status();
  return (*router)->Backward(d_slot, c.saved, c.Weight(), loss_scale,
                             MatrixView<T>(d_tokens.data(), c.tokens, c.config.hidden_size),
                             d_weight, c.workspace, *c.stream);
}

// From zero, loss scale 1.
template <typename T>
RouterGradients<T> RunBackward(RouterCase<T>& c, const std::vector<float>& d_slot) {
  RouterGradients<T> g;
  g.d_tokens.assign(c.x.size(), T(0.0f));
  g.d_weight.assign(c.weight.size(), 0.0f);
  const absl::Status status =
      RunBackward(c, d_slot, 1, g.d_tokens, GradAccumulator(absl::MakeSpan(g.d_weight)));
  EXPECT_TRUE(status.ok()) << status;
  return g;
}

inline oracle::RoutingSpec SpecOf(const RouterConfig& config) {
  const int64_t group = config.token_group.tokens;
  const oracle::Unit unit = group == 0    ? oracle::Unit::kMicroBatch
                            : group == -1 ? oracle::Unit::kSequence
                                          : oracle::Unit::kBlock;
  return {.gate = config.gate,
          .experts = config.num_experts,
          .top_k = config.top_k,
          .capacity_factor = config.capacity_factor.value_or(0),
          .drop = config.drop_policy == DropPolicy::kPosition ? oracle::Drop::kByPosition
                                                              : oracle::Drop::kByWeight,
          .capacity_unit = unit,
          .balance_unit =
              config.load_balancing == LoadBalancing::kSeqAuxLoss ? oracle::Unit::kSequence : unit,
          .block = group,
          .aux_coeff = config.load_balancing == LoadBalancing::kNone
                           ? 0
                           : static_cast<double>(config.aux_loss_coeff),
          .z_coeff = static_cast<double>(config.z_loss_coeff)};
}

// x * W^T in float64.
template <typename T>
oracle::RoutingInput InputOf(const RouterCase<T>& c) {
  oracle::RoutingInput input;
  input.sequence_offsets = c.sequences;
  input.micro_batch_offsets = c.micro_batches;
  for (int64_t t = 0; t < c.tokens; ++t) {
    std::vector<double> l;
    for (int64_t e = 0; e < c.config.num_experts; ++e) {
      double sum = 0;
      for (int64_t h = 0; h < c.config.hidden_size; ++h) {
        sum += double{static_cast<float>(c.Tokens()(t, h))} *
               double{static_cast<float>(c.Weight()(e, h))};
      }
      l.push_back(sum);
    }
    input.logits.push_back(l);
  }
  return input;
}

}  // namespace moe

#endif  // MOE_TESTS_ROUTER_CASE_H_
