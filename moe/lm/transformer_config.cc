#include "moe/lm/transformer_config.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "kernels/base/status_macros.h"

namespace moe::lm {
namespace {

absl::Status AtLeast(const char* field, int64_t value, int64_t least) {
  if (value >= least) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("Transformer: ", field, " is ", value, ", expected at least ", least));
}

absl::Status Positive(const char* field, double value, double nearest) {
  if (value > 0 && std::isfinite(value)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "Transformer: ", field, " is ", value, ", expected a positive number, such as ", nearest));
}

// Rotary positions turn pairs, so a head must have an even width.
absl::Status CheckHeadWidth(const TransformerConfig& config) {
  const int64_t hidden_size = config.hidden_size, heads = config.num_attention_heads;
  if (config.kv_channels > 0) {
    if (config.kv_channels % 2 == 0) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("Transformer: kv_channels is ", config.kv_channels,
                     ", expected an even number, nearest ", config.kv_channels + 1));
  }
  const int64_t unit = 2 * heads;
  if (hidden_size % unit == 0) return absl::OkStatus();
  const int64_t nearest = std::max<int64_t>(1, (hidden_size + heads) / unit) * unit;
  return absl::InvalidArgumentError(absl::StrCat("Transformer: hidden_size is ", hidden_size,
                                                 ", expected an even multiple of the ", heads,
                                                 " attention heads, nearest ", nearest));
}

absl::Status CheckHeads(const TransformerConfig& config) {
  MOE_RETURN_IF_ERROR(AtLeast("num_attention_heads", config.num_attention_heads, 1));
  MOE_RETURN_IF_ERROR(AtLeast("num_query_groups", config.num_query_groups, 0));
  MOE_RETURN_IF_ERROR(AtLeast("kv_channels", config.kv_channels, 0));
  MOE_RETURN_IF_ERROR(CheckHeadWidth(config));
  int nearest = std::min(config.key_value_heads(), config.num_attention_heads);
  while (config.num_attention_heads % nearest != 0) --nearest;
  if (nearest == config.key_value_heads()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "Transformer: num_query_groups is ", config.num_query_groups, ", expected a divisor of the ",
      config.num_attention_heads, " attention heads, nearest ", nearest));
}

// Takes layers of the last parts, or adds layers to the part that has the fewest.
std::vector<int32_t> NearestLayout(std::vector<int32_t> layout, int parts, int layers) {
  layout.resize(static_cast<size_t>(parts), 1);
  for (int32_t& of_part : layout) of_part = std::clamp(of_part, 1, layers);
  int64_t over = std::accumulate(layout.begin(), layout.end(), int64_t{0}) - layers;
  if (over < 0) *std::min_element(layout.rbegin(), layout.rend()) -= static_cast<int32_t>(over);
  for (auto of_part = layout.rbegin(); over > 0; ++of_part) {
    const int64_t taken = std::min<int64_t>(over, *of_part - 1);
    *of_part -= static_cast<int32_t>(taken);
    over -= taken;
  }
  return layout;
}

}  // namespace

int TransformerConfig::first_layer(int part, int parts) const {
  if (pipeline_layout.empty()) return static_cast<int>(int64_t{num_layers} * part / parts);
  return std::accumulate(pipeline_layout.begin(), pipeline_layout.begin() + part, 0);
}

absl::Status CheckPipelineLayout(const TransformerConfig& config, int parts) {
  const std::vector<int32_t>& layout = config.pipeline_layout;
  if (layout.empty()) return absl::OkStatus();
  const std::vector<int32_t> nearest = NearestLayout(layout, parts, config.num_layers);
  if (layout == nearest) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--pipeline-layout is ", absl::StrJoin(layout, ","), ", expected the ", config.num_layers,
      " layers in ", parts, parts == 1 ? " part" : " parts of at least one", ", such as ",
      absl::StrJoin(nearest, ",")));
}

absl::Status ValidateTransformerConfig(const TransformerConfig& config) {
  MOE_RETURN_IF_ERROR(AtLeast("vocab_size", config.vocab_size, 1));
  if (config.vocab_size > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(absl::StrCat("Transformer: vocab_size is ", config.vocab_size,
                                                   ", expected at most ",
                                                   std::numeric_limits<int32_t>::max()));
  }
  MOE_RETURN_IF_ERROR(AtLeast("hidden_size", config.hidden_size, 2));
  MOE_RETURN_IF_ERROR(AtLeast("num_layers", config.num_layers, 1));
  MOE_RETURN_IF_ERROR(CheckHeads(config));
  MOE_RETURN_IF_ERROR(Positive("rotary_base", config.rotary_base, 10000));
  MOE_RETURN_IF_ERROR(Positive("norm_epsilon", config.norm_epsilon, 1e-5));
  MOE_RETURN_IF_ERROR(Positive("init_std", config.init_std, 0.02));
  MOE_RETURN_IF_ERROR(AtLeast("moe_layer_freq", config.moe_layer_freq, 1));
  if (config.moe_layer_freq > config.num_layers) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Transformer: moe_layer_freq is ", config.moe_layer_freq, ", expected at most num_layers ",
        config.num_layers, ", or there is no MoE layer"));
  }
  MOE_RETURN_IF_ERROR(AtLeast("dense_ffn_hidden_size", config.dense_ffn_hidden_size, 0));
  MOE_RETURN_IF_ERROR(AtLeast("ffn_hidden_size", config.moe.ffn_hidden_size, 1));
  MOE_RETURN_IF_ERROR(
      AtLeast("shared_expert_ffn_hidden_size", config.moe.shared_expert_ffn_hidden_size, 0));
  MOE_RETURN_IF_ERROR(AtLeast("overlap_degree", config.moe.overlap_degree, 1));
  RouterConfig router = config.moe.router;
  router.hidden_size = config.hidden_size;
  return ValidateRouterConfig(router);
}

}  // namespace moe::lm
