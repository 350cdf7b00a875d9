// Whole public models as moe::lm::Transformer has them: config.json and names of tensors, in both
// directions. Beside the MoE layers, whose rules are the families' (family.h).
#ifndef MOE_MOE_HF_MODEL_RULE_H_
#define MOE_MOE_HF_MODEL_RULE_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

#include "moe/lm/transformer.h"

namespace moe::hf {

struct Family;

// What the models of a family have. A row of a table in model_rule.cc.
struct ModelRule {
  absl::string_view model_type;
  absl::string_view architecture;  // transformers' class
  const char* experts_key = "num_experts";
  bool assumes_kv_heads = false;  // "num_key_value_heads" may be left out: as many as of queries
  bool own_head_dim = false;      // heads that are no part of the hidden size
  bool dense_layers = false;      // "decoder_sparse_step", "intermediate_size"
  bool shared_expert = false;     // always there, with its gate
  bool chooses_norm = false;      // "norm_topk_prob"; false: weights always add up to 1
  bool chooses_qkv_bias = false;  // "qkv_bias"; false: none
  lm::QkNorm qk_norm = lm::QkNorm::kNone;
  const char* window_key = nullptr;  // set: attention over a window, which is not computed here
  const char* bias_key = nullptr;    // set: biases that are not computed here
  double rope_theta = 10000;         // where config.json says none
  double rms_norm_eps = 1e-6;

  const Family& family() const;
};

// "mixtral", "olmoe", "qwen2_moe", "qwen3_moe".
std::vector<std::string> ModelTypes();
const ModelRule* FindModelRule(absl::string_view model_type);  // nullptr: none

// A tensor of a checkpoint, and the one of the reference model that has its elements in its order.
struct ModelTensor {
  std::string name;            // "model.layers.0.block_sparse_moe.experts.1.w2.weight"
  std::vector<int64_t> shape;  // one dimension where the canonical tensor is a row
  std::string canonical;       // "model.layers.0.mlp.experts.1.down_proj.weight"
};

// Experts' tensors and one a layer: what an untrusted configuration must not have more of than
// memory for TensorsOf.
int64_t LeastTensors(const lm::TransformerConfig& config);

// Every tensor of a model that is valid (ValidateTransformerConfig), in its order.
std::vector<ModelTensor> TensorsOf(const ModelRule& rule, const lm::TransformerConfig& config);

// The model of a config.json, for training or evaluation: no capacity, no losses of the router.
// `file` is the name in messages, which name file, key, value and what was expected.
//   kDataLoss: malformed JSON, a value out of range, keys that contradict each other
//   kUnimplemented: another family, or what is not computed here: sliding windows, clipped or
//     scaled positions, other biases, other activations, quantised weights, layers that are dense
//     in another order than every N-th
struct ModelConfig {
  const ModelRule* rule = nullptr;  // never null in a result
  lm::TransformerConfig model;
};
absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view file, absl::string_view document);
// The same of config.json in a folder. Also errors of MappedFile::Open.
absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& folder);

// kInvalidArgument "--num-zero-experts is 1, expected 0" for the first setting that the family
// cannot express.
absl::Status CheckExpressible(const ModelRule& rule, const lm::TransformerConfig& config);

// The config.json of what CheckExpressible lets pass; `dtype` as transformers names it. Ends with a
// line feed. Numbers that are float32 here are written as the shortest decimals that read back.
std::string ModelConfigJson(const ModelRule& rule, const lm::TransformerConfig& config,
                            int64_t max_positions, absl::string_view dtype);

}  // namespace moe::hf

#endif  // MOE_MOE_HF_MODEL_RULE_H_
