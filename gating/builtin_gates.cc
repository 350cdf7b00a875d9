// The gates that come with the library. Those in which a token's k experts are weighed by their
// scores, or by their scores over their sum, are rows of a table; the others have a file each.
#include "gating/builtin_gates.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "gating/token_choice_gate.h"

namespace moe {
namespace {

struct Row {
  const char* name;
  uint32_t options;  // GateDefinition::options
  ScoreFunction score = ScoreFunction::kSoftmax;
  bool normalised = false;   // weights over their sum; with kGateNormTopK: unless configured
  float epsilon = 0;         // added to that sum, the same way
  bool expert_bias = false;  // score + bias selects
  int32_t group_sum = 1;     // a group is worth so many of its largest
  bool router_bias = false;  // logits have a trained bias
  WeightOn weight_on = WeightOn::kOutput;
  int32_t only_top_k = 0;
};

// What DeepSeek-V3 and Megatron add to a sum of sigmoids.
constexpr float kSigmoidEpsilon = 1e-20f;

constexpr Row kRows[] = {
    // Switch Transformers, arXiv:2101.03961, section 2.1: the one largest p, weighed by p itself.
    // Never renormalised: p / p = 1 would leave the router without a gradient. In training the
    // router may see jittered tokens, x * U[1 - e, 1 + e] (section 2.4: multiplied, not added).
    {.name = "switch", .options = kGateJitter | kGateZeroExperts, .only_top_k = 1},
    // Mixtral, arXiv:2401.04088, section 2.1: softmax over the k selected logits, which is
    // p_sel / sum p_sel. Source: transformers/models/mixtral/modeling_mixtral.py.
    {.name = "mixtral", .options = kGateZeroExperts, .normalised = true},
    // Qwen2-MoE, Qwen3-MoE (arXiv:2505.09388) and OLMoE (arXiv:2409.02060): one gate, Hugging
    // Face's `norm_topk_prob` apart. True (Qwen3): p_sel / sum p_sel; false: p_sel.
    {.name = "qwen2", .options = kGateNormTopK | kGateZeroExperts},
    {.name = "qwen3", .options = kGateNormTopK | kGateZeroExperts, .normalised = true},
    {.name = "olmoe", .options = kGateNormTopK | kGateZeroExperts},
    // DeepSeek-V2 (arXiv:2405.04434): the k largest p, among the group_top_k groups with the
    // largest best p if there are groups; weights p_sel * scaling_factor.
    // Source: transformers/models/deepseek_v2.
    {.name = "deepseek-v2",
     .options = kGateGroups | kGateScaling | kGateNormTopK | kGateZeroExperts},
    // DeepSeek-V3 (arXiv:2412.19437, section 2.1.2): v = sigmoid(l) + b selects, b without
    // gradient; a group is worth its two largest v, and v outside the kept groups is -infinity (a
    // mask of 0, as some ports have, selects a masked expert where v < 0). Weights from the
    // unbiased score: s_sel / (sum s_sel + 1e-20) * scaling_factor; the 1e-20 shows in float32
    // where the logits are below -30. After each step b_i += gamma * sign(mean(c) - c_i).
    // Source: transformers/models/deepseek_v3.
    {.name = "deepseek-v3",
     .options = kGateGroups | kGateScaling | kGateNormTopK | kGateZeroExperts,
     .score = ScoreFunction::kSigmoid,
     .normalised = true,
     .epsilon = kSigmoidEpsilon,
     .expert_bias = true,
     .group_sum = 2},
    // gpt-oss: the k largest logits, which have a trained bias; softmax over the selected logits.
    // Source: transformers/models/gpt_oss/modeling_gpt_oss.py.
    {.name = "gpt-oss", .options = kGateZeroExperts, .normalised = true, .router_bias = true},
    // Llama-4: the k largest logits (k = 1 in every published model), weight sigmoid(l_e) on the
    // expert's input: Expert(sigmoid(l_e) * x).
    // Source: transformers/models/llama4/modeling_llama4.py.
    {.name = "llama4",
     .options = 0,
     .score = ScoreFunction::kSigmoid,
     .weight_on = WeightOn::kInput},
    // LongCat-Flash (arXiv:2509.01322): softmax over routed and identity experts together; p + b
    // selects, b without gradient; weights p_sel * scaling_factor. An identity expert returns the
    // token itself and costs no communication. b moves by the sign rule of DeepSeek-V3 here (the
    // report's own controller aims at a share of identity experts).
    {.name = "longcat",
     .options = kGateScaling | kGateNormTopK | kGateZeroExperts,
     .expert_bias = true},
};

// What a row does not read has its default in `config` (ValidateRouterConfig).
class RowGate final : public ScaledTokenChoiceGate {
 public:
  RowGate(const Row& row, const RouterConfig& config)
      : ScaledTokenChoiceGate({.top_k = config.top_k,
                               .score = row.score,
                               .expert_bias = row.expert_bias,
                               .num_groups = config.num_groups,
                               .group_top_k = config.group_top_k,
                               .group_sum = row.group_sum},
                              config.norm_topk_prob.value_or(row.normalised) ? Weights::kNormalised
                                                                             : Weights::kScores,
                              config.scaling_factor, config.norm_epsilon.value_or(row.epsilon)),
        row_(row),
        input_jitter_(config.input_jitter) {}

  GateTraits traits() const override {
    GateTraits traits = ScaledTokenChoiceGate::traits();
    traits.router_bias = row_.router_bias;
    traits.input_jitter = input_jitter_;
    traits.weight_on = row_.weight_on;
    return traits;
  }

 private:
  const Row row_;
  const float input_jitter_;
};

// The gate that Megatron's --moe-router-* flags describe, every one of them at its own setting
// (megatron/core/transformer/moe/moe_utils.py, topk_routing_with_score_function); the rows above
// are points of it.
//   softmax              k largest logits; softmax over the selected
//   softmax, pre_softmax k largest p; weights p_sel
//   sigmoid              k largest s (+ expert bias); weights s_sel / (sum s_sel + 1e-20), k = 1:
//                        s_sel
// A group is worth the sum of its k / group_top_k largest values.
Row TopKRow(const RouterConfig& config) {
  const bool sigmoid = config.score_function == ScoreFunction::kSigmoid;
  return {.name = "topk",
          .options = 0,
          .score = config.score_function,
          .normalised = sigmoid ? config.top_k > 1 : !config.pre_softmax,
          .epsilon = sigmoid ? kSigmoidEpsilon : 0.0f,
          .expert_bias = config.expert_bias,
          .group_sum = std::max(1, config.top_k / std::max(1, config.group_top_k))};
}

GateDefinition DefinitionOf(const Row& row) {
  return {.name = row.name,
          .only_top_k = row.only_top_k,
          .options = row.options,
          .make = [row](const RouterConfig& config) {
            return std::make_unique<RowGate>(row, config);
          }};
}

}  // namespace

std::vector<GateDefinition> BuiltinGates() {
  GateDefinition topk = {.name = "topk",
                         .options = kGateScoreFunction | kGateGroups | kGateScaling |
                                    kGateNormTopK | kGateExpertBias | kGateZeroExperts,
                         .make = [](const RouterConfig& config) {
                           return std::make_unique<RowGate>(TopKRow(config), config);
                         }};
  std::vector<GateDefinition> gates;
  for (const Row& row : kRows) gates.push_back(DefinitionOf(row));
  // The documentation's order.
  gates.insert(gates.begin() + 1, {GshardGateDefinition(), std::move(topk)});
  gates.insert(gates.end(), {ExpertChoiceGateDefinition(), NoisyTopKGateDefinition(),
                             SinkhornGateDefinition(), SparseMixerGateDefinition()});
  return gates;
}

}  // namespace moe
