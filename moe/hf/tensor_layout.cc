#include "moe/hf/tensor_layout.h"

#include <algorithm>
#include <set>
#include <utility>

#include <absl/strings/str_cat.h>

#include "moe/hf/family.h"
#include "moe/io/bounded_json.h"

namespace moe::hf {
namespace {

// `rule` in the fused layout. For experts one by one, the gate's rule becomes that of gate and up.
TensorRule Fused(const TensorRule& rule) {
  TensorRule fused = rule;
  if (!rule.fused_name.empty()) fused.name = rule.fused_name;
  if (rule.experts != ExpertAxis::kNumbered) return fused;
  const bool gate_up = rule.parameter == ParameterKind::kExpertGateUp;
  fused.name = gate_up ? "experts.gate_up_proj" : "experts.down_proj";
  fused.experts = ExpertAxis::kStacked;
  fused.rows = TensorRows::kAll;
  fused.counts_zero_experts = gate_up;
  return fused;
}

// All names of a layer's tensors in the layout.
std::vector<std::string> NamesOf(const TensorLayout& layout, const MoeLayerConfig& config,
                                 absl::string_view layer) {
  std::vector<std::string> names;
  for (const TensorRule& rule : layout.tensors) {
    if (!IsPresent(rule, config)) continue;
    for (int32_t e = 0; e < TensorCount(rule, config); ++e) {
      names.push_back(absl::StrCat(layer, layout.block, ".", TensorName(rule, e)));
    }
  }
  return names;
}

}  // namespace

absl::Status BadTensor(absl::string_view file, absl::string_view tensor, absl::string_view what,
                       absl::string_view expected) {
  return absl::DataLossError(
      absl::StrCat(file, ": tensor '", Shown(tensor), "': ", what, ", expected ", expected));
}

std::vector<TensorLayout> LayoutsOf(const Family& family) {
  const TensorLayout published = {.block = family.block,
                                  .tensors = {family.tensors.begin(), family.tensors.end()}};
  TensorLayout fused = {.block = family.fused_block.empty() ? family.block : family.fused_block};
  bool differs = fused.block != published.block;
  for (const TensorRule& rule : published.tensors) {
    differs = differs || rule.experts == ExpertAxis::kNumbered || !rule.fused_name.empty();
    const bool in_gates = rule.experts == ExpertAxis::kNumbered && rule.rows == TensorRows::kUp;
    if (!in_gates) fused.tensors.push_back(Fused(rule));
  }
  if (!differs) return {published};
  return {published, std::move(fused)};
}

absl::StatusOr<TensorLayout> FindLayout(const Checkpoint& checkpoint, const HfConfig& config,
                                        absl::string_view layer) {
  std::vector<TensorLayout> layouts = LayoutsOf(*config.family);
  if (layouts.size() == 1) return std::move(layouts.front());
  const std::vector<std::string> names[] = {NamesOf(layouts[0], config.moe, layer),
                                            NamesOf(layouts[1], config.moe, layer)};
  std::string first[2], there[2];  // names that the other layout lacks
  for (const int i : {0, 1}) {
    const std::set<std::string> others(names[1 - i].begin(), names[1 - i].end());
    for (const std::string& name : names[i]) {
      if (others.count(name) != 0) continue;
      if (first[i].empty()) first[i] = name;
      if (there[i].empty() && checkpoint.Contains(name)) there[i] = name;
    }
  }
  if (!there[0].empty() && !there[1].empty()) {
    return BadTensor(checkpoint.path(), there[0],
                     absl::StrCat("is there, and so is '", Shown(there[1]), "'"),
                     "the layer's experts one by one or fused");
  }
  const bool has_router = checkpoint.Contains(names[0].front());
  if (there[0].empty() && there[1].empty() && has_router) {
    return BadTensor(checkpoint.path(), first[0],
                     absl::StrCat("is missing, and so is '", Shown(first[1]), "'"),
                     "one of them from the configuration");
  }
  return std::move(layouts[there[1].empty() ? 0 : 1]);
}

}  // namespace moe::hf
