// What a reference model is: sizes, layers, choices.
#ifndef MOE_MOE_LM_TRANSFORMER_CONFIG_H_
#define MOE_MOE_LM_TRANSFORMER_CONFIG_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include <absl/status/status.h>

#include "kernels/base/choice.h"
#include "moe/layer/moe_layer.h"
#include "moe/recompute/recompute.h"

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
  // What is computed again just before its backward, for memory; the same bits.
  Recompute recompute = Recompute::kNone;
  // Layers of each part of a pipeline, in the order of PipelineShape's parts; empty: as even as
  // they can be. The same bits.
  std::vector<int32_t> pipeline_layout = {};
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
  // The first layer of part `part` of `parts`; that of part `parts` is num_layers.
  int first_layer(int part, int parts) const;
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

// kInvalidArgument, naming the nearest layout that does, unless pipeline_layout is empty or gives
// each of `parts` parts a layer at least, and all layers to some part.
absl::Status CheckPipelineLayout(const TransformerConfig& config, int parts);

}  // namespace moe::lm

#endif  // MOE_MOE_LM_TRANSFORMER_CONFIG_H_
