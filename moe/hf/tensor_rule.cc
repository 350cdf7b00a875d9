#include "moe/hf/tensor_rule.h"

#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>

namespace moe::hf {

ParameterShape ShapeOf(ParameterKind kind, const MoeLayerConfig& config) {
  const int64_t hidden = config.router.hidden_size;
  const int64_t experts = config.router.num_outputs();
  const int64_t width = config.ffn_hidden_size;
  const int64_t shared = config.shared_expert_ffn_hidden_size;
  switch (kind) {
    case ParameterKind::kRouterWeight:
      return {experts, hidden};
    case ParameterKind::kRouterBias:
    case ParameterKind::kExpertBias:
      return {experts};
    case ParameterKind::kExpertGateUp:
      return {2 * width, hidden};
    case ParameterKind::kExpertGateUpBias:
      return {2 * width};
    case ParameterKind::kExpertDown:
      return {hidden, width};
    case ParameterKind::kExpertDownBias:
      return {hidden};
    case ParameterKind::kSharedGateUp:
      return {2 * shared, hidden};
    case ParameterKind::kSharedDown:
      return {hidden, shared};
    case ParameterKind::kSharedOutputGate:
      return {1, hidden};
  }
  return {};
}

bool IsTrained(ParameterKind kind) {
  return kind != ParameterKind::kExpertBias;
}

bool IsPresent(const TensorRule& rule, const MoeLayerConfig& config) {
  const ParameterKind kind = rule.parameter;
  const bool shared = kind == ParameterKind::kSharedGateUp || kind == ParameterKind::kSharedDown ||
                      kind == ParameterKind::kSharedOutputGate;
  return !shared || config.shared_expert_ffn_hidden_size > 0;
}

std::string ParameterName(ParameterKind kind, int32_t expert) {
  const auto of_expert = [&](absl::string_view name) {
    return absl::StrCat("experts.", expert, ".", name);
  };
  switch (kind) {
    case ParameterKind::kRouterWeight:
      return "gate.weight";
    case ParameterKind::kRouterBias:
      return "gate.bias";
    case ParameterKind::kExpertBias:
      return "gate.e_score_correction_bias";
    case ParameterKind::kExpertGateUp:
      return of_expert("gate_up_proj.weight");
    case ParameterKind::kExpertGateUpBias:
      return of_expert("gate_up_proj.bias");
    case ParameterKind::kExpertDown:
      return of_expert("down_proj.weight");
    case ParameterKind::kExpertDownBias:
      return of_expert("down_proj.bias");
    case ParameterKind::kSharedGateUp:
      return "shared_expert.gate_up_proj.weight";
    case ParameterKind::kSharedDown:
      return "shared_expert.down_proj.weight";
    case ParameterKind::kSharedOutputGate:
      return "shared_expert_gate.weight";
  }
  return "";
}

std::string CanonicalName(const TensorRule& rule, int32_t expert) {
  const bool is_half = rule.rows == TensorRows::kGate || rule.rows == TensorRows::kUp;
  const std::string name = ParameterName(rule.parameter, expert);
  if (!is_half) return name;
  return absl::StrReplaceAll(
      name, {{"gate_up_proj", rule.rows == TensorRows::kGate ? "gate_proj" : "up_proj"}});
}

std::string TensorName(const TensorRule& rule, int32_t expert) {
  if (rule.experts != ExpertAxis::kNumbered) return std::string(rule.name);
  return absl::StrReplaceAll(rule.name, {{"{e}", absl::StrCat(expert)}});
}

std::vector<int64_t> TensorShape(const TensorRule& rule, const MoeLayerConfig& config) {
  ParameterShape part = ShapeOf(rule.parameter, config);
  if (rule.rows == TensorRows::kGate || rule.rows == TensorRows::kUp) part.rows /= 2;
  std::vector<int64_t> shape;
  if (rule.experts == ExpertAxis::kStacked) shape.push_back(config.router.num_experts);
  if (rule.row_vector) shape.push_back(1);
  if (rule.transposed) shape.push_back(part.cols);
  shape.push_back(part.rows);
  if (part.cols != 0 && !rule.transposed) shape.push_back(part.cols);
  return shape;
}

}  // namespace moe::hf
