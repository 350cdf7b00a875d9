// One router with inputs that its tests share.
#ifndef MOE_TESTS_GATING_ROUTER_CASE_H_
#define MOE_TESTS_GATING_ROUTER_CASE_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "gating/router.h"
#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"

namespace moe {

// One router with its inputs; the router's weight is the identity, so that logits are the tokens
// and the gradient by the tokens is the gradient by the logits, unless a test sets another one.
template <typename T>
struct RouterCase {
  RouterConfig config;
  int64_t tokens = 0;
  std::vector<T> x, weight;
  std::vector<float> bias, expert_bias;  // where the gate has them
  int64_t step = 0;
  Mode mode = Mode::kTraining;
  std::vector<int64_t> sequences, micro_batches;

  Workspace workspace;
  std::unique_ptr<Stream> stream = MakeInlineStream();
  RouterSaved<T> saved;
  RouterStats stats;
  Routing routing;

  Batch batch() const {
    return {.sequence_offsets = sequences,
            .micro_batch_offsets = micro_batches,
            .step = step,
            .mode = mode};
  }
  MatrixView<const T> Tokens() const { return {x.data(), tokens, config.hidden_size}; }
  MatrixView<const T> Weight() const {
    const auto rows = static_cast<int64_t>(weight.size()) / config.hidden_size;
    return {weight.data(), rows, config.hidden_size};
  }
  RouterCall<T> Call() {
    return {.tokens = Tokens(),
            .inputs = {.weight = Weight(), .bias = bias, .expert_bias = expert_bias},
            .batch = batch(),
            .workspace = workspace,
            .host = workspace,
            .stream = *stream};
  }
};

// What a gate adds to a router, without a router.
inline GateTraits TraitsOf(const RouterConfig& config) {
  return FindGate(config.gate)->make(config)->traits();
}

template <typename T>
std::vector<T> RandomVector(size_t size, uint64_t seed, double scale = 1) {
  std::vector<T> values(size);
  for (size_t i = 0; i < size; ++i) {
    values[i] = static_cast<T>(static_cast<float>(scale * Normal({.seed = seed, .item = i})));
  }
  return values;
}

inline RouterConfig SmallConfig(const std::string& gate, int32_t experts) {
  const int32_t only = FindGate(gate)->only_top_k;
  RouterConfig config = {.gate = gate,
                         .num_experts = experts,
                         .top_k = only != 0 ? only : std::min(3, experts),
                         .hidden_size = experts};
  config.hidden_size *= TraitsOf(config).logit_sets;
  return config;
}

// Three micro-batches of sequences of 4, 8, 12 | 12, 12 | 24 tokens.
template <typename T = float>
std::unique_ptr<RouterCase<T>> LogitCase(const RouterConfig& config, uint64_t seed) {
  auto c = std::make_unique<RouterCase<T>>();
  c->config = config;
  c->sequences = {0, 4, 12, 24, 36, 48, 72};
  c->micro_batches = {0, 24, 48, 72};
  c->tokens = 72;
  const GateTraits traits = TraitsOf(config);
  const auto outputs = static_cast<size_t>(config.num_outputs());
  const size_t rows = outputs * static_cast<size_t>(traits.logit_sets);
  c->x = RandomVector<T>(static_cast<size_t>(c->tokens) * rows, seed);
  c->weight.assign(rows * static_cast<size_t>(config.hidden_size), T(0.0f));
  for (size_t e = 0; e < std::min(rows, static_cast<size_t>(config.hidden_size)); ++e) {
    c->weight[e * static_cast<size_t>(config.hidden_size) + e] = T(1.0f);
  }
  if (traits.router_bias) c->bias = RandomVector<float>(rows, seed + 1);
  if (traits.expert_bias) c->expert_bias = RandomVector<float>(outputs, seed + 2, 0.3);
  return c;
}

template <typename T>
absl::Status Route(const Router<T>& router, const RouterCall<T>& call, RouterSaved<T>& saved,
                   RouterStats* stats) {
  MOE_RETURN_IF_ERROR(router.Logits(call, saved));
  return router.Decide(call, saved, stats);
}

template <typename T>
absl::Status RunForward(RouterCase<T>& c) {
  MOE_ASSIGN_OR_RETURN(const auto router, Router<T>::Create(c.config));
  MOE_RETURN_IF_ERROR(Route(*router, c.Call(), c.saved, &c.stats));
  c.routing = c.saved.routing;
  return absl::OkStatus();
}

// A LogitCase that has been routed.
template <typename T = float>
std::unique_ptr<RouterCase<T>> RoutedCase(const RouterConfig& config, uint64_t seed) {
  auto c = LogitCase<T>(config, seed);
  const absl::Status status = RunForward(*c);
  EXPECT_TRUE(status.ok()) << status;
  return c;
}

template <typename T>
struct CaseGradients {
  std::vector<T> d_tokens;
  std::vector<float> d_weight, d_bias;
};

template <typename T>
absl::Status RunBackward(RouterCase<T>& c, const std::vector<float>& d_slot, float loss_scale,
                         std::vector<T>& d_tokens, const GradAccumulator& d_weight,
                         const GradAccumulator& d_bias = {}) {
  const auto router = Router<T>::Create(c.config);
  if (!router.ok()) return router.status();
  const int64_t held = c.workspace.used_bytes();
  const absl::Status status =
      (*router)->Backward({.d_weight = d_slot,
                           .weight = c.Weight(),
                           .loss_scale = loss_scale,
                           .d_tokens = {d_tokens.data(), c.tokens, c.config.hidden_size},
                           .gradients = RouterGradients{.weight = d_weight, .bias = d_bias},
                           .workspace = c.workspace,
                           .host = c.workspace,
                           .stream = *c.stream},
                          c.saved);
  EXPECT_EQ(c.workspace.used_bytes(), held);
  return status;
}

// From zero, loss scale 1.
template <typename T>
CaseGradients<T> RunBackward(RouterCase<T>& c, const std::vector<float>& d_slot) {
  CaseGradients<T> g;
  g.d_tokens.assign(c.x.size(), T(0.0f));
  g.d_weight.assign(c.weight.size(), 0.0f);
  g.d_bias.assign(c.bias.size(), 0.0f);
  const absl::Status status =
      RunBackward(c, d_slot, 1, g.d_tokens, GradAccumulator(absl::MakeSpan(g.d_weight)),
                  GradAccumulator(absl::MakeSpan(g.d_bias)));
  EXPECT_TRUE(status.ok()) << status;
  return g;
}

}  // namespace moe

#endif  // MOE_TESTS_GATING_ROUTER_CASE_H_
