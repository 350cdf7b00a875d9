#include "moe/hf/tensor_rule.h"

#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>

namespace moe::hf {
namespace {

// `name` with {e} replaced by the expert's number.
std::string OfExpert(absl::string_view name, int32_t expert) {
  return absl::StrReplaceAll(name, {{"{e}", absl::StrCat(expert)}});
}

}  // namespace

ParameterShape ShapeOf(ParameterKind kind, const MoeLayerConfig& config) {
  const int64_t hidden = config.router.hidden_size;
  const int64_t experts = config.router.num_outputs();
  const int64_t width = config.ffn_hidden_size;
  const int64_t shared = config.shared_expert_ffn_hidden_size;
  const ParameterShape shapes[] = {
      {experts, hidden},     // kRouterWeight; the others follow in the enum's order
      {experts},             // kRouterBias
      {experts},             // kExpertBias
      {2 * width, hidden},   // kExpertGateUp
      {2 * width},           // kExpertGateUpBias
      {hidden, width},       // kExpertDown
      {hidden},              // kExpertDownBias
      {2 * shared, hidden},  // kSharedGateUp
      {hidden, shared},      // kSharedDown
      {1, hidden},           // kSharedOutputGate
  };
  return shapes[static_cast<size_t>(kind)];
}

bool IsPresent(const TensorRule& rule, const MoeLayerConfig& config) {
  const ParameterKind kind = rule.parameter;
  const bool shared = kind == ParameterKind::kSharedGateUp || kind == ParameterKind::kSharedDown ||
                      kind == ParameterKind::kSharedOutputGate;
  return !shared || config.shared_expert_ffn_hidden_size > 0;
}

std::string ParameterName(ParameterKind kind, int32_t expert) {
  constexpr absl::string_view kNames[] = {"gate.weight",  // as ShapeOf
                                          "gate.bias",
                                          "gate.e_score_correction_bias",
                                          "experts.{e}.gate_up_proj.weight",
                                          "experts.{e}.gate_up_proj.bias",
                                          "experts.{e}.down_proj.weight",
                                          "experts.{e}.down_proj.bias",
                                          "shared_expert.gate_up_proj.weight",
                                          "shared_expert.down_proj.weight",
                                          "shared_expert_gate.weight"};
  return OfExpert(kNames[static_cast<size_t>(kind)], expert);
}

std::string CanonicalName(const TensorRule& rule, int32_t expert) {
  const bool is_half = rule.rows == TensorRows::kGate || rule.rows == TensorRows::kUp;
  const std::string name = ParameterName(rule.parameter, expert);
  if (!is_half) return name;
  return absl::StrReplaceAll(
      name, {{"gate_up_proj", rule.rows == TensorRows::kGate ? "gate_proj" : "up_proj"}});
}

int32_t TensorCount(const TensorRule& rule, const MoeLayerConfig& config) {
  return rule.experts == ExpertAxis::kNumbered ? config.router.num_experts : 1;
}

std::string TensorName(const TensorRule& rule, int32_t expert) {
  return OfExpert(rule.name, expert);
}

std::vector<int64_t> TensorShape(const TensorRule& rule, const MoeLayerConfig& config) {
  ParameterShape part = ShapeOf(rule.parameter, config);
  if (rule.rows == TensorRows::kGate || rule.rows == TensorRows::kUp) part.rows /= 2;
  std::vector<int64_t> shape;
  if (rule.experts == ExpertAxis::kStacked) {
    shape.push_back(rule.counts_zero_experts ? config.router.num_outputs()
                                             : config.router.num_experts);
  }
  if (rule.row_vector) shape.push_back(1);
  if (rule.transposed) shape.push_back(part.cols);
  shape.push_back(part.rows);
  if (part.cols != 0 && !rule.transposed) shape.push_back(part.cols);
  return shape;
}

}  // namespace moe::hf
