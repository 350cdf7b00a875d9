#include "moe/plan/model_cost.h"

#include <algorithm>
#include <cmath>

#include "gating/gate.h"
#include "kernels/activation/activation_kind.h"

namespace moe::plan {

ModelSize SizeOf(const lm::TransformerConfig& config) {
  const int64_t hidden = config.hidden_size;
  const MoeLayerConfig& moe = config.moe;
  const int64_t matrices = IsGated(moe.activation) ? 3 : 2;
  const int64_t biases = moe.projection_biases ? (matrices - 1) * moe.ffn_hidden_size + hidden : 0;
  const int64_t expert = matrices * hidden * moe.ffn_hidden_size + biases;
  const GateDefinition* const gate = FindGate(moe.router.gate);
  const GateTraits traits = gate == nullptr ? GateTraits() : gate->make(moe.router)->traits();
  const int64_t logits = int64_t{traits.logit_sets} * moe.router.num_outputs();
  const int64_t router = logits * hidden + (traits.router_bias ? logits : 0);
  const int64_t shared = matrices * hidden * moe.shared_expert_ffn_hidden_size +
                         (moe.gated_shared_expert ? hidden : 0);
  const int64_t heads = config.num_attention_heads, kv_heads = config.key_value_heads();
  const int64_t qkv = (heads + 2 * kv_heads) * config.head_dim();
  int64_t attention = hidden * (qkv + heads * config.head_dim()) + (config.qkv_bias ? qkv : 0);
  if (config.qk_norm == lm::QkNorm::kHead) attention += 2 * config.head_dim();
  if (config.qk_norm == lm::QkNorm::kHeads) attention += (heads + kv_heads) * config.head_dim();
  const int64_t moe_layers = config.num_layers / config.moe_layer_freq;
  const int64_t dense_layers = config.num_layers - moe_layers;
  ModelSize size;
  size.active = (config.tied_embeddings ? 1 : 2) * config.vocab_size * hidden + hidden +
                config.num_layers * (attention + 2 * hidden) +
                dense_layers * matrices * hidden * config.dense_width() +
                moe_layers * (router + moe.router.top_k * expert + shared);
  size.total = size.active + moe_layers * (moe.router.num_experts - moe.router.top_k) * expert;
  return size;
}

ModelCost CostOf(const lm::TransformerConfig& config) {
  const auto hidden = static_cast<double>(config.hidden_size);
  const MoeLayerConfig& moe = config.moe;
  const double matrices = IsGated(moe.activation) ? 3 : 2;
  const auto width = static_cast<double>(moe.ffn_hidden_size);
  const double biases = moe.projection_biases ? (matrices - 1) * width + hidden : 0;
  return {.layers = config.num_layers,
          .dense_layers = config.num_layers - config.num_layers / config.moe_layer_freq,
          .hidden = hidden,
          .vocab = static_cast<double>(config.vocab_size),
          .parameters = static_cast<double>(SizeOf(config).total),
          .attention = hidden * static_cast<double>(config.qkv_cols() + config.q_cols()),
          .attended = 2 * static_cast<double>(config.q_cols()),
          .sums_of_heads = config.qk_norm == lm::QkNorm::kHeads ? 2.0 : 0.0,
          .experts = static_cast<double>(moe.router.num_experts),
          .top_k = static_cast<double>(moe.router.top_k),
          .expert = matrices * hidden * width + biases,
          .width = width,
          .shared = matrices * hidden * static_cast<double>(moe.shared_expert_ffn_hidden_size),
          .dense = matrices * hidden * static_cast<double>(config.dense_width())};
}

double TokenFlops(const ModelCost& cost, double length) {
  const double matrices =
      cost.layers * cost.attention +
      cost.moe_layers() * (cost.top_k * cost.expert + cost.shared + cost.hidden * cost.experts) +
      cost.dense_layers * cost.dense + cost.vocab * cost.hidden;
  return 6 * matrices + 3 * cost.layers * cost.attended * length;
}

double RanksOfToken(double experts, double ep, double top_k) {
  // E / EP may not be whole: some ranks then hold one expert more.
  const double least = std::floor(experts / ep), more = experts - least * ep;
  // C(E - held, K) / C(E, K), which is the same with K and held exchanged, factor by factor.
  const auto reached = [&](double held) {
    const double few = std::min(held, top_k), many = std::max(held, top_k);
    double none = 1;
    for (double i = 0; i < few && none > 1e-18; ++i) {
      none *= std::max(0.0, experts - many - i) / (experts - i);
    }
    return 1 - none;
  };
  return more * reached(least + 1) + (ep - more) * reached(least);
}

}  // namespace moe::plan
