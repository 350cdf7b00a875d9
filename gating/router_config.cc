#include "gating/router_config.h"

#include <algorithm>
#include <cmath>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "gating/gate.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

template <typename Value>
absl::Status Wrong(absl::string_view field, const Value& value, absl::string_view expected) {
  return absl::InvalidArgumentError(
      absl::StrCat("RouterConfig.", field, " is ", value, ", expected ", expected));
}

// A field that the gate does not read must not have been set: it would silently do nothing.
absl::Status CheckOptions(const RouterConfig& config, const GateDefinition& gate) {
  const RouterConfig plain;
  const struct {
    uint32_t option;
    bool is_set;
    absl::string_view field;
  } rules[] = {
      {kGateScoreFunction, config.score_function != plain.score_function, "score_function"},
      {kGateScoreFunction, config.pre_softmax, "pre_softmax"},
      {kGateGroups, config.num_groups != 0, "num_groups"},
      {kGateGroups, config.group_top_k != 0, "group_top_k"},
      {kGateScaling, config.scaling_factor != plain.scaling_factor, "scaling_factor"},
      {kGateNormTopK, config.norm_topk_prob.has_value(), "norm_topk_prob"},
      {kGateNormTopK, config.norm_epsilon.has_value(), "norm_epsilon"},
      {kGateExpertBias, config.expert_bias, "expert_bias"},
      {kGateJitter, config.input_jitter != 0, "input_jitter"},
      {kGateRandomSecond, config.random_second_expert, "random_second_expert"},
      {kGateZeroExperts, config.num_zero_experts != 0, "num_zero_experts"},
      {kGateRouterJitter, config.router_jitter != plain.router_jitter, "router_jitter"},
  };
  for (const auto& rule : rules) {
    if (rule.is_set && (gate.options & rule.option) == 0) {
      return Wrong(rule.field, "set",
                   absl::StrCat("its default: gate '", gate.name, "' does not read it"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckGroups(const RouterConfig& config) {
  if (config.num_groups == 0 && config.group_top_k == 0) return absl::OkStatus();
  const int32_t groups = config.num_groups;
  if (groups < 1 || config.num_outputs() % groups != 0) {
    return Wrong("num_groups", groups,
                 absl::StrCat("a divisor of ", config.num_outputs(), " (the router's outputs)"));
  }
  if (config.group_top_k < 1 || config.group_top_k > groups) {
    return Wrong("group_top_k", config.group_top_k, absl::StrCat("1 to ", groups, " (num_groups)"));
  }
  const int32_t within = config.num_outputs() / groups * config.group_top_k;
  if (config.top_k > within) {
    return Wrong("top_k", config.top_k,
                 absl::StrCat("at most ", within, ", the experts of group_top_k groups"));
  }
  return absl::OkStatus();
}

absl::Status CheckRange(absl::string_view field, float value, float least, float most,
                        absl::string_view expected) {
  if (value >= least && value <= most) return absl::OkStatus();
  return Wrong(field, value, expected);
}

absl::Status CheckGate(const RouterConfig& config) {
  const GateDefinition* const gate = FindGate(config.gate);
  if (gate == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "RouterConfig.gate is '", config.gate, "', expected one of ",
        absl::StrJoin(GateNames(), ", "), "; did you mean '", NearestGateName(config.gate), "'?"));
  }
  if (gate->only_top_k != 0 && config.top_k != gate->only_top_k) {
    return Wrong("top_k", config.top_k,
                 absl::StrCat(gate->only_top_k, ", the only one of gate '", gate->name, "'"));
  }
  if (config.top_k < 1) return Wrong("top_k", config.top_k, "at least 1");
  if (config.top_k > config.num_outputs()) {
    return Wrong("top_k", config.top_k,
                 absl::StrCat("at most ", config.num_outputs(),
                              config.num_zero_experts > 0 ? " (num_experts + num_zero_experts)"
                                                          : " (num_experts)"));
  }
  MOE_RETURN_IF_ERROR(CheckOptions(config, *gate));
  MOE_RETURN_IF_ERROR(CheckGroups(config));
  MOE_RETURN_IF_ERROR(CheckRange("input_jitter", config.input_jitter, 0, 0.999f, "0 to below 1"));
  MOE_RETURN_IF_ERROR(
      CheckRange("router_jitter", config.router_jitter, 0, 1e30f, "a finite number, 0 or more"));
  MOE_RETURN_IF_ERROR(CheckRange("norm_epsilon", config.norm_epsilon.value_or(0), 0, 1, "0 to 1"));
  MOE_RETURN_IF_ERROR(CheckRange("scaling_factor", config.scaling_factor, 1e-30f, 1e30f,
                                 "a finite number above 0"));
  return CheckRange("bias_update_rate", config.bias_update_rate, 0, 1e30f,
                    "a finite number, 0 (off) or more");
}

absl::Status CheckPadding(const RouterConfig& config) {
  if (!config.capacity_factor.has_value()) {
    return Wrong("pad_to_capacity", "true", "a capacity_factor with it, 1.25 say");
  }
  if (config.token_group.tokens == TokenGroup::kSequence) {
    return Wrong("token_group", "the sequence",
                 "the micro-batch or N tokens with pad_to_capacity: sequences differ in length");
  }
  if (config.micro_batch_tokens == 0) {
    return Wrong("micro_batch_tokens", 0, "the tokens of a micro-batch with pad_to_capacity");
  }
  return absl::OkStatus();
}

absl::Status CheckTokenGroup(const RouterConfig& config) {
  const int64_t group = config.token_group.tokens;
  if (group < TokenGroup::kSequence) {
    return Wrong("token_group", group, "-1 (sequence), 0 (micro-batch) or N > 0 tokens");
  }
  const int64_t micro_batch = config.micro_batch_tokens;
  if (micro_batch < 0) return Wrong("micro_batch_tokens", micro_batch, "0 (unknown) or more");
  if (group <= 0 || micro_batch % group == 0) return absl::OkStatus();
  int64_t nearest = std::min(group, micro_batch);
  while (micro_batch % nearest != 0) --nearest;
  return Wrong("token_group", group,
               absl::StrCat("a divisor of ", micro_batch, " (micro_batch_tokens), ", nearest,
                            " for example"));
}

absl::Status CheckCoefficient(absl::string_view field, float value) {
  if (std::isfinite(value) && value >= 0) return absl::OkStatus();
  return Wrong(field, value, "a finite number, 0 (off) or more");
}

}  // namespace

absl::Status ValidateRouterConfig(const RouterConfig& config) {
  if (config.num_experts < 1) return Wrong("num_experts", config.num_experts, "at least 1");
  if (config.num_zero_experts < 0) {
    return Wrong("num_zero_experts", config.num_zero_experts, "0 or more");
  }
  if (config.hidden_size < 1) return Wrong("hidden_size", config.hidden_size, "at least 1");
  MOE_RETURN_IF_ERROR(CheckGate(config));
  if (config.capacity_factor.has_value() &&
      !(std::isfinite(*config.capacity_factor) && *config.capacity_factor > 0)) {
    return Wrong("capacity_factor", *config.capacity_factor,
                 "a finite number above 0, or none (dropless)");
  }
  MOE_RETURN_IF_ERROR(CheckTokenGroup(config));
  if (config.pad_to_capacity) MOE_RETURN_IF_ERROR(CheckPadding(config));
  MOE_RETURN_IF_ERROR(CheckCoefficient("aux_loss_coeff", config.aux_loss_coeff));
  return CheckCoefficient("z_loss_coeff", config.z_loss_coeff);
}

}  // namespace moe
