#include <algorithm>
#include <cmath>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "gating/gate.h"
#include "gating/router.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

template <typename Value>
absl::Status Wrong(absl::string_view field, const Value& value, absl::string_view expected) {
  return absl::InvalidArgumentError(
      absl::StrCat("RouterConfig.", field, " is ", value, ", expected ", expected));
}

absl::Status CheckGate(const RouterConfig& config) {
  const GateEntry* const gate = FindGate(config.gate);
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
  if (config.top_k > config.num_experts) {
    return Wrong("top_k", config.top_k,
                 absl::StrCat("at most ", config.num_experts, " (num_experts)"));
  }
  return absl::OkStatus();
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
