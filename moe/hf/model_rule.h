// Whole public models as moe::lm::Stage: config.json and names of tensors, in both
// directions. The rules of MoE layers are the families' (family.h).
#ifndef MOE_MOE_HF_MODEL_RULE_H_
#define MOE_MOE_HF_MODEL_RULE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

#include "moe/hf/tensor_layout.h"
#include "moe/lm/transformer_config.h"

namespace moe::hf {

struct Family;

// Properties of the models of a family. A row of a table in model_rule.cc.
struct ModelRule {
  absl::string_view model_type;
  absl::string_view architecture;  // transformers' class
  const char* experts_key = "num_experts";
  bool assumes_kv_heads = false;  // "num_key_value_heads" may be absent: as many as query heads
  bool own_head_dim = false;      // heads have a size of their own
  bool dense_layers = false;      // "decoder_sparse_step", "intermediate_size"
  bool shared_expert = false;     // always present, with its gate
  bool chooses_norm = false;      // "norm_topk_prob"; false: weights always add up to 1
  bool chooses_qkv_bias = false;  // "qkv_bias"; false: none
  lm::QkNorm qk_norm = lm::QkNorm::kNone;
  const char* window_key = nullptr;  // set: attention over a window, which is not implemented here
  const char* bias_key = nullptr;    // set: biases that are not implemented here
  double rope_theta = 10000;         // if config.json has none
  double rms_norm_eps = 1e-6;
  // Defaults of values that no pass uses.
  int64_t max_position_embeddings = 32768;
  std::optional<int64_t> bos_token_id;
  std::optional<int32_t> eos_token_id;
  double router_aux_loss_coef = 0.001;
  bool router_jitter = false;  // "router_jitter_noise"

  const Family& family() const;  // not of DenseModelTypes
};

// How a dense model becomes one with experts.
struct Upcycling {
  int32_t experts = 0;     // copies of each dense network; 0: the model has experts
  int moe_layer_freq = 1;  // every N-th layer gets them, the others stay dense
  double noise = 0;        // standard deviation of what is added to each weight of a copy
  uint64_t seed = 0;       // of the noise
};

// "mixtral", "olmoe", "qwen2_moe", "qwen3_moe".
std::vector<std::string> ModelTypes();
const ModelRule* FindModelRule(absl::string_view model_type);  // nullptr: none
// "llama", "mistral", "qwen2", "qwen3": those without experts, for Upcycling.
std::vector<std::string> DenseModelTypes();

// A tensor of a checkpoint, or a range of one, and the tensor of the reference model with the same
// elements in the same order.
struct ModelTensor {
  std::string name;            // "model.layers.0.block_sparse_moe.experts.1.w2.weight"
  std::vector<int64_t> shape;  // one dimension where the canonical tensor is a row
  std::string canonical;       // "model.layers.0.mlp.experts.1.down_proj.weight"
  // One expert's range of a tensor of all experts; empty: all of the tensor.
  int64_t first = 0;  // first element
  std::vector<int64_t> part_shape = {};
};

// Prefix and layout of a model's names in a checkpoint.
struct ModelLayout {
  absl::string_view root = "model.";  // one of kRoots
  std::vector<TensorLayout> layers;   // layout of each layer; ignored for dense ones
  // Experts are copies of a dense network, and their router is in no file; `layers` is ignored.
  bool upcycled = false;
};

// Number of experts' tensors plus one a layer, to check that an untrusted configuration does not
// exceed the memory for TensorsOf.
int64_t LeastTensors(const lm::TransformerConfig& config);

// Every tensor of a valid model (ValidateTransformerConfig), in its order. The default layout is
// that of the family's published models.
std::vector<ModelTensor> TensorsOf(const ModelRule& rule, const lm::TransformerConfig& config);
std::vector<ModelTensor> TensorsOf(const lm::TransformerConfig& config, const ModelLayout& layout);

// Settings with which transformers trains a model, beside its loss.
struct ModelTraining {
  // The coefficient of docs/routing.md whose balance loss equals that of router_aux_loss_coef for
  // one layer; none: without output_router_logits there is no such loss.
  std::optional<double> aux_loss_coeff;
  double attention_dropout = 0;
  double router_jitter_noise = 0;  // jitter of the input of router and experts
};

// The model of a config.json, for training or evaluation: no capacity, no losses of the router.
// `file` is the name in messages, which name file, key, value and what was expected.
//   kDataLoss: malformed JSON, a value out of range, keys that contradict each other
//   kUnimplemented: another family, or a setting that is not implemented here: sliding windows,
//     clipped or scaled positions, other biases, other activations, quantised weights, dense layers
//     in an order other than every N-th
struct ModelConfig {
  const ModelRule* rule = nullptr;  // never null in a result
  HfConfig layer;                   // what LayerWeights reads of it
  lm::TransformerConfig model;
  ModelTraining training;
  // Keys of the model that this library does not know, but for those that say how a file was made.
  std::vector<std::string> unread;
};
absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view file, absl::string_view document);
// The same of a dense model, whose layers get experts: router and top-k are the defaults. Another
// family, one with experts among them, is kUnimplemented.
absl::StatusOr<ModelConfig> ParseDenseConfig(absl::string_view file, absl::string_view document,
                                             const Upcycling& upcycling);
// The same for config.json in a folder. Also errors of MappedFile::Open.
absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& folder,
                                            const Upcycling& upcycling = {});

// kInvalidArgument "--num-zero-experts is 1, expected 0" for the first setting that the family
// cannot express.
absl::Status CheckExpressible(const ModelRule& rule, const lm::TransformerConfig& config);

// The config.json of a model that CheckExpressible accepts; `dtype` as transformers names it,
// max_position_embeddings at least sequence_length. Ends with a line feed. Numbers that are float32
// here are written as the shortest decimals that read back.
std::string ModelConfigJson(const ModelRule& rule, const lm::TransformerConfig& config,
                            int64_t sequence_length, absl::string_view dtype);
// The generation_config.json beside it: if it exists, transformers reads the tokens from it alone.
std::string GenerationConfigJson(const lm::TransformerConfig& config);

// The tokens that end a text of the public model in `folder` when transformers generates: those of
// generation_config.json or, if it is absent, of config.json. Errors of ReadModelConfig.
absl::StatusOr<std::vector<int32_t>> ReadEndTokens(const std::string& folder);

}  // namespace moe::hf

#endif  // MOE_MOE_HF_MODEL_RULE_H_
