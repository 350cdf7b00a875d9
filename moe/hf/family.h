// What differs between the public models' MoE layers: keys, defaults, names, layouts. A family is a
// row of a table (family_softmax.cc, family_sigmoid.cc, family_own.cc).
#ifndef MOE_MOE_HF_FAMILY_H_
#define MOE_MOE_HF_FAMILY_H_

#include <array>
#include <vector>

#include <absl/functional/function_ref.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "moe/hf/config_keys.h"
#include "moe/hf/hf_config.h"
#include "moe/hf/tensor_rule.h"

namespace moe::hf {

// The keys of numbers that most models have, with the other spelling that transformers accepts
// (its attribute_map). nullptr: the model has none.
struct FamilyKeys {
  Key layers = "num_hidden_layers";
  Key hidden = "hidden_size";
  Key width;  // of an expert
  Key experts;
  Key top_k = "num_experts_per_tok";
  Key shared_experts;  // of an expert's width, which are one
  Key shared_width;    // of the one shared expert
  Key groups, kept_groups;
  Key dense;  // the first layers without experts
  Key norm;
  Key scaling;
};

// Where a key is absent: what transformers' configuration class has. 0 = the file must have it.
struct FamilyDefaults {
  int64_t layers = 0, hidden = 0, width = 0, experts = 0, top_k = 0;
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

struct Family {
  absl::string_view model_type;
  // The model_type of a model that has this one's keys in its "text_config"; empty = none.
  absl::string_view nested_in = {};
  absl::string_view block = "mlp";  // of "model.layers.N."
  const char* gate = "";
  FamilyKeys keys = {};
  FamilyDefaults defaults = {};
  SparseLayers* sparse = EveryLayer;
  bool gated_shared_expert = false;
  bool reads_activation = true;  // "hidden_act"; others than silu and gelu are unsupported
  // What the above does not say.
  void (*more)(ConfigKeys& keys, HfConfig& config) = nullptr;
  absl::Span<const TensorRule> tensors = {};  // the router's weight first
};

// ParseHfConfig (hf_config.h), which then calls `more`: for other keys of the model.
absl::StatusOr<HfConfig> ParseHfConfig(absl::string_view file, absl::string_view document,
                                       absl::FunctionRef<void(const HfConfig&, ConfigKeys&)> more);

// From keys to config.moe and config.has_experts.
void ReadFamily(const Family& family, ConfigKeys& keys, HfConfig& config);

// The tables: scores by softmax over all experts; by sigmoid, with a bias for the selection; and
// models with layouts or experts of their own.
extern const absl::Span<const Family> kSoftmaxFamilies, kSigmoidFamilies, kOwnFamilies;
std::vector<const Family*> Families();

// Names of a tensor per projection, as most models have them and as Mixtral has.
inline constexpr TensorRule kGateProj = {"experts.{e}.gate_proj.weight",
                                         ParameterKind::kExpertGateUp, ExpertAxis::kNumbered,
                                         TensorRows::kGate},
                            kUpProj = {"experts.{e}.up_proj.weight", ParameterKind::kExpertGateUp,
                                       ExpertAxis::kNumbered, TensorRows::kUp},
                            kDownProj = {"experts.{e}.down_proj.weight", ParameterKind::kExpertDown,
                                         ExpertAxis::kNumbered},
                            kW1 = {"experts.{e}.w1.weight", ParameterKind::kExpertGateUp,
                                   ExpertAxis::kNumbered, TensorRows::kGate},
                            kW3 = {"experts.{e}.w3.weight", ParameterKind::kExpertGateUp,
                                   ExpertAxis::kNumbered, TensorRows::kUp},
                            kW2 = {"experts.{e}.w2.weight", ParameterKind::kExpertDown,
                                   ExpertAxis::kNumbered};
// The same of a shared expert.
constexpr TensorRule SharedGate(absl::string_view name) {
  return {name, ParameterKind::kSharedGateUp, ExpertAxis::kNone, TensorRows::kGate};
}
constexpr TensorRule SharedUp(absl::string_view name) {
  return {name, ParameterKind::kSharedGateUp, ExpertAxis::kNone, TensorRows::kUp};
}
constexpr TensorRule SharedDown(absl::string_view name) {
  return {name, ParameterKind::kSharedDown};
}
constexpr TensorRule Router(absl::string_view name) {
  return {name, ParameterKind::kRouterWeight};
}
constexpr TensorRule ExpertBias(absl::string_view name) {
  return {name, ParameterKind::kExpertBias};
}

}  // namespace moe::hf

#endif  // MOE_MOE_HF_FAMILY_H_
