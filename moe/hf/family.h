// The differences between public models' MoE layers: keys, defaults, names, layouts. A family is a
// row of a table (families.cc).
#ifndef MOE_MOE_HF_FAMILY_H_
#define MOE_MOE_HF_FAMILY_H_

#include <vector>

#include <absl/functional/function_ref.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "moe/hf/config_keys.h"
#include "moe/hf/hf_config.h"
#include "moe/hf/tensor_rule.h"

namespace moe::hf {

// Keys of numbers that most models have, with the alternative spelling that transformers accepts.
// nullptr: the model has none.
struct FamilyKeys {
  Key layers = "num_hidden_layers";
  Key hidden = "hidden_size";
  Key width;  // width of an expert
  Key experts;
  Key top_k = "num_experts_per_tok";
  Key shared_experts;  // number of shared experts, fused into one of as many widths
  Key shared_width;    // width of the one shared expert
  Key groups, kept_groups;
  Key dense;  // number of first layers without experts
  Key norm;
  Key scaling;
};

// Values of absent keys, from transformers' configuration class. 0 = the file must have the key.
struct FamilyDefaults {
  struct Sizes {
    int64_t layers = 0, hidden = 0, width = 0, experts = 0, top_k = 0;  // L, H, F, E, K
  } sizes;
  int64_t shared_experts = 0, shared_width = 0;
  int64_t groups = 1, kept_groups = 1;
  int64_t dense = 0;
  bool norm = true;
  double scaling = 1.0;
};

struct Family;
// Which of `layers` layers have experts.
using SparseLayers = std::vector<bool>(const Family& family, ConfigKeys& keys, int64_t layers);
SparseLayers EveryLayer;
SparseLayers LayersAfterDense;  // keys.dense
// "mlp_layer_types", and without it LayersAfterDense.
SparseLayers ListedLayers;
SparseLayers EverySparseStep;  // "decoder_sparse_step", "mlp_only_layers"
SparseLayers JambaLayers;      // "expert_layer_period", "expert_layer_offset"
SparseLayers ErnieLayers;      // "moe_layer_interval", from a start to an end
SparseLayers Llama4Layers;     // "moe_layers"; without it "interleave_moe_layer_step"

struct Family {
  absl::string_view model_type;
  // The model_type of a model whose "text_config" has this family's keys; empty = none.
  absl::string_view nested_in = {};
  absl::string_view block = "mlp";     // below "model.layers.N."
  absl::string_view fused_block = {};  // the same in the fused layout, if it differs
  const char* gate = "";
  FamilyKeys keys = {};
  FamilyDefaults defaults = {};
  SparseLayers* sparse = EveryLayer;
  bool gated_shared_expert = false;
  bool reads_activation = true;  // "hidden_act"; others than silu and gelu are unsupported
  // Reads what the fields above do not express.
  void (*more)(ConfigKeys& keys, HfConfig& config) = nullptr;
  absl::Span<const TensorRule> tensors = {};  // the router's weight first
};

// ParseHfConfig (hf_config.h), which then calls `more` to read other keys of the model.
absl::StatusOr<HfConfig> ParseHfConfig(absl::string_view file, absl::string_view document,
                                       absl::FunctionRef<void(const HfConfig&, ConfigKeys&)> more);

// "hidden_act".
Activation ReadActivation(ConfigKeys& keys);

// Fills config.moe and config.has_experts from the keys.
void ReadFamily(const Family& family, ConfigKeys& keys, HfConfig& config);

absl::Span<const Family> Families();

}  // namespace moe::hf

#endif  // MOE_MOE_HF_FAMILY_H_
