// Where the files of a model store the tensors of its MoE layers: below which names, and experts
// one by one or fused.
#ifndef MOE_MOE_HF_TENSOR_LAYOUT_H_
#define MOE_MOE_HF_TENSOR_LAYOUT_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

#include "moe/hf/hf_config.h"
#include "moe/hf/tensor_rule.h"
#include "moe/io/checkpoint.h"

namespace moe::hf {

// The tensors of one layer's block.
struct TensorLayout {
  absl::string_view block;          // below "model.layers.N."
  std::vector<TensorRule> tensors;  // the router's weight first
};

// The family's own layout first, as its models are published. Then, if it differs, the fused layout
// of transformers 5's modules: all experts in experts.gate_up_proj [E, 2F, H], gate in the first
// half, and experts.down_proj [E, H, F]. save_pretrained(save_original_format=False) writes it, and
// some models are published so (Qwen3.5).
std::vector<TensorLayout> LayoutsOf(const Family& family);

// Prefixes of "layers.N." in names: of a language model, of one inside a larger model, of a bare
// one. They are searched in this order.
inline constexpr absl::string_view kRoots[] = {"model.", "language_model.model.",
                                               "model.language_model.", ""};

// The one of LayoutsOf in which the layer below `layer` ("model.layers.3.") has tensors, though
// perhaps not all of them; the first if it has none. kDataLoss, naming two tensors: the layer has
// tensors of two layouts, or a router and experts in neither.
absl::StatusOr<TensorLayout> FindLayout(const Checkpoint& checkpoint, const HfConfig& config,
                                        absl::string_view layer);

// "<file>: tensor '<name>': what is, expected what was expected", kDataLoss.
absl::Status BadTensor(absl::string_view file, absl::string_view tensor, absl::string_view what,
                       absl::string_view expected);

}  // namespace moe::hf

#endif  // MOE_MOE_HF_TENSOR_LAYOUT_H_
