// What differs between the public models' MoE layers: keys, defaults, names, layouts.
#ifndef MOE_MOE_HF_FAMILY_H_
#define MOE_MOE_HF_FAMILY_H_

#include <array>

#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "moe/hf/config_keys.h"
#include "moe/hf/hf_config.h"
#include "moe/hf/tensor_rule.h"

namespace moe::hf {

struct Family {
  absl::string_view model_type;
  // The model_type of a model that has this one's keys in its "text_config"; empty = none.
  absl::string_view nested_in;
  absl::string_view block;  // of "model.layers.N."
  // From keys to config.moe and config.has_experts. The source of every default is transformers'
  // configuration class.
  void (*read)(ConfigKeys& keys, HfConfig& config);
  absl::Span<const TensorRule> tensors;  // the router's weight first
};

extern const Family kMixtral, kQwen2Moe, kQwen3Moe, kOlmoe, kDeepSeekV2, kDeepSeekV3, kGptOss,
    kLlama4;

// "hidden_act", which every model has. Others than silu and gelu are unsupported.
Activation ReadActivation(ConfigKeys& keys);

// gate_proj, up_proj and down_proj, a tensor each, as most models name them.
inline constexpr std::array<TensorRule, 3> kNumberedExperts = {{
    {"experts.{e}.gate_proj.weight", ParameterKind::kExpertGateUp, ExpertAxis::kNumbered,
     TensorRows::kGate},
    {"experts.{e}.up_proj.weight", ParameterKind::kExpertGateUp, ExpertAxis::kNumbered,
     TensorRows::kUp},
    {"experts.{e}.down_proj.weight", ParameterKind::kExpertDown, ExpertAxis::kNumbered},
}};

}  // namespace moe::hf

#endif  // MOE_MOE_HF_FAMILY_H_
