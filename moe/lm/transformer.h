// The reference model: a decoder-only transformer with mixture-of-experts layers.
#ifndef MOE_MOE_LM_TRANSFORMER_H_
#define MOE_MOE_LM_TRANSFORMER_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/base/choice.h"
#include "moe/layer/experts.h"
#include "moe/layer/moe_layer.h"
#include "moe/run/context.h"
#include "moe/run/pass.h"
#include "moe/state/module.h"
#include "moe/state/parameter.h"

namespace moe::lm {

// How RMSNorm normalises queries and keys before they are rotated.
enum class QkNorm : uint8_t {
  kNone,
  kHead,   // each head by itself, weights [D], as Qwen3
  kHeads,  // all heads of a token together, weights of their width, as OLMoE
};
inline constexpr Choice<QkNorm> kQkNormWords[] = {
    {"none", QkNorm::kNone}, {"head", QkNorm::kHead}, {"heads", QkNorm::kHeads}};

struct TransformerConfig {
  int64_t vocab_size = 256;
  int64_t hidden_size = 128;
  int num_layers = 4;
  int num_attention_heads = 4;
  int num_query_groups = 0;  // heads of keys and values; 0 = as many as of queries
  int64_t kv_channels = 0;   // D, the width of a head; 0 = hidden_size / num_attention_heads
  bool qkv_bias = false;
  QkNorm qk_norm = QkNorm::kNone;
  bool tied_embeddings = false;  // the output layer shares the embedding's weights
  float rotary_base = 10000.0f;
  float norm_epsilon = 1e-5f;
  double init_std = 0.02;
  // Layers l with l % moe_layer_freq == moe_layer_freq - 1 are MoE layers; the others have a dense
  // feed-forward network of dense_ffn_hidden_size. 1 = every layer.
  int moe_layer_freq = 1;
  int64_t dense_ffn_hidden_size = 0;  // 0: top_k * the expert width
  MoeLayerConfig moe = {};            // router.hidden_size is filled in
  // Not read by any pass, but by users of the model: the longest sequence (0: that of training),
  // and ids of the tokens that begin and that end a text.
  int64_t max_position_embeddings = 0;
  std::optional<int64_t> bos_token_id = {};
  std::vector<int32_t> eos_token_ids = {};

  int key_value_heads() const {
    return num_query_groups > 0 ? num_query_groups : num_attention_heads;
  }
  int64_t head_dim() const {
    return kv_channels > 0 ? kv_channels : hidden_size / std::max(num_attention_heads, 1);
  }
  int64_t dense_width() const {
    return dense_ffn_hidden_size > 0 ? dense_ffn_hidden_size
                                     : moe.router.top_k * moe.ffn_hidden_size;
  }
  bool has_experts(int64_t layer) const { return layer % moe_layer_freq == moe_layer_freq - 1; }
  // Columns of a token's queries, of its keys (or values), and of these side by side.
  int64_t q_cols() const { return num_attention_heads * head_dim(); }
  int64_t kv_cols() const { return key_value_heads() * head_dim(); }
  int64_t qk_cols() const { return q_cols() + kv_cols(); }
  int64_t qkv_cols() const { return qk_cols() + kv_cols(); }
  // Standard deviation of output projections (o_proj, down_proj), as in GPT-2.
  double out_init_std() const { return init_std / std::sqrt(2.0 * num_layers); }
};

// kInvalidArgument naming field, value and nearest valid choice.
absl::Status ValidateTransformerConfig(const TransformerConfig& config);

// Tokens of a round and their losses in nats: arrays [T] in memory of the host.
struct TokenBatch {
  absl::Span<const int32_t> tokens, targets;
  absl::Span<float> row_loss;
};

template <typename T>
class KeyValueCache;

// Pre-norm blocks: x += Attention(RMSNorm(x)); x += FeedForward(RMSNorm(x)); then RMSNorm and an
// output layer. Residual stream in T (float, BFloat16 or Float16); logits and loss in
// float32. Names follow Hugging Face: "model.layers.L.self_attn.qkv_proj.weight"
// [(heads + 2 key-value heads) D, H], and its ".bias", "…self_attn.q_norm.weight" and "k_norm",
// "…self_attn.o_proj.weight", "…input_layernorm.weight", "…post_attention_layernorm.weight",
// "…mlp.…", "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight".
template <typename T>
class Transformer final : public TrainedModule {
 public:
  // Collective.
  static absl::StatusOr<std::unique_ptr<Transformer>> Create(const TransformerConfig& config,
                                                             ParameterStore& store,
                                                             const Context& context);
  ~Transformer() override;

  // pass.router_stats, of both: of moe_layers(), or empty.
  // Computes the loss only. Collective over the expert-parallel group.
  absl::Status Evaluate(const Pass& pass, const TokenBatch& batch);

  // Forward of the tokens [T] that follow those of `cache`, to which they are added; logits [n, V]
  // of the last n <= T of them: the bits of one Forward over the whole sequence where a router
  // decides about each token by itself. Other ranks, without a sequence, call it without tokens.
  // kInvalidArgument, before any communication: ids outside the vocabulary, no room in the cache;
  // kUnimplemented on a CUDA device. Collective over the expert-parallel group; blocks.
  absl::Status Extend(const Context& context, absl::Span<const int32_t> tokens,
                      KeyValueCache<T>& cache, MatrixView<float> logits);

  // Forward and backward of one round (one micro-batch, or none: T = 0) in pass.stash. Gradients are those of
  // pass.d_loss * (mean of row_loss + the router's losses). `ready` is called for every parameter
  // exactly once, in the same order on all ranks, when its gradient of this round is complete.
  absl::Status ForwardBackward(const Pass& pass, const TokenBatch& batch, GradientReady ready);

  // MoeLayer::router_share of every MoE layer.
  std::vector<ModuleState> states() override;
  // Slots [MoE layer][E] chosen by the routers in calls of ForwardBackward with router_stats; EndStep
  // passes them to MoeLayer::EndStep.
  int64_t count_size() const override;
  absl::Status TakeCounts(absl::Span<int64_t> counts) override;
  absl::Status EndStep(absl::Span<const int64_t> counts) override;
  // [MoE layer][E]: the counts of the last EndStep, identity experts last.
  const std::vector<std::vector<int64_t>>& expert_load() const;

  // MoeLayer::CountSlots for every MoE layer: slots [MoE layer][E], borrowed; empty = no longer.
  void CountSlots(absl::Span<int64_t> slots);

  int moe_layers() const;
  // Sum over the MoE layers.
  ExchangeBytes exchange_bytes() const;

 private:
  struct Impl;
  explicit Transformer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moe::lm

#endif  // MOE_MOE_LM_TRANSFORMER_H_
