// Every gate and its losses in plain float64 loops, written from the definitions in
// docs/routing.md. Shares no code with the product: plain types in, plain types out.
#ifndef MOE_TESTS_GATING_ROUTING_ORACLE_H_
#define MOE_TESTS_GATING_ROUTING_ORACLE_H_

#include <cstdint>
#include <string>
#include <vector>

namespace moe::oracle {

enum class Drop { kByWeight, kByPosition };
enum class Unit { kMicroBatch, kSequence, kBlock };

struct RoutingSpec {
  std::string gate;
  int experts = 0;       // router outputs, identity experts included
  int zero_experts = 0;  // of which the last so many are identity experts
  int top_k = 0;
  // What the gate's name stands for; see RuleOf.
  bool sigmoid = false;
  bool normalised = false;
  double epsilon = 0;  // normalised: added to the sum
  double scale = 1;
  int groups = 0;
  int group_top_k = 0;
  int group_sum = 1;
  double router_jitter = 0;    // sparsemixer
  double capacity_factor = 0;  // 0 = dropless
  Drop drop = Drop::kByWeight;
  Unit capacity_unit = Unit::kMicroBatch;
  Unit balance_unit = Unit::kMicroBatch;
  int64_t block = 0;  // tokens of Unit::kBlock
  double aux_coeff = 0;
  double z_coeff = 0;
};

// What the tokens are: logits[t][e], and where sequences and micro-batches end.
struct RoutingInput {
  std::vector<std::vector<double>> logits;
  std::vector<int64_t> sequence_offsets;
  std::vector<int64_t> micro_batch_offsets;
  bool training = true;
  std::vector<double> expert_bias;         // empty = none
  std::vector<std::vector<double>> noise;  // noisy-topk: z[t][e]
  std::vector<double> second_draw;         // gshard: uniform u[t], 0 = keep both
  std::vector<double>
      expert_share;  // balance loss against these shares; empty = counts of the unit
};

// One token, slots in choice order.
struct TokenRouting {
  std::vector<int> expert;
  std::vector<double> weight;  // 0 where dropped
  std::vector<bool> dropped;
  std::vector<double> unlimited_weight;  // without capacity: what decides who is dropped
};

struct RoutingResult {
  std::vector<TokenRouting> token;
  double aux_loss = 0;  // sums over micro-batches
  double z_loss = 0;
};

// The definition behind a gate's name, for k choices: everything of a spec that is not the user's.
RoutingSpec RuleOf(const std::string& gate, int top_k);

RoutingResult Route(const RoutingSpec& spec, const RoutingInput& input);

// d_logits[t][e] of  sum_ts d_weight[t][s] * weight[t][s] + aux_loss + z_loss, by central
// differences of Route; the routing must not change within +-step of any logit.
std::vector<std::vector<double>> LogitGradient(const RoutingSpec& spec, const RoutingInput& input,
                                               const std::vector<std::vector<double>>& d_weight,
                                               double step = 1e-5);

// Distance of the nearest selection or drop decision to a tie: tests that compare decisions made
// in float32 first make sure that this is well above rounding.
double DecisionMargin(const RoutingSpec& spec, const RoutingInput& input);

}  // namespace moe::oracle

#endif  // MOE_TESTS_GATING_ROUTING_ORACLE_H_
