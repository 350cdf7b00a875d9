// Where the files of a model have the tensors of its MoE layers: below which names, and experts one
// by one or fused.
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

// First the family's own, as its models are published. Then, where that is another, the fused one
// of transformers 5's modules: all experts in experts.gate_up_proj [E, 2F, H], gate in the first
// half, and experts.down_proj [E, H, F]. save_pretrained(save_original_format=False) writes it, and
// some models are published so (Qwen3.5).
std::vector<TensorLayout> LayoutsOf(const Family& family);

// What stands before "layers.N." in names: of a language model, of the same inside a larger one, of
// a bare one. Names of every root are looked for in this order.
inline constexpr absl::string_view kRoots[] = {"model.", "language_model.model.",
                                               "model.language_model.", ""};

// Of LayoutsOf, the one whose tensors a layer has below `layer` ("model.layers.3."), though perhaps
// not all of them; the first where it has nothing. kDataLoss, naming two tensors: it has some of
// two layouts, or a router and experts in neither.
absl::StatusOr<TensorLayout> FindLayout(const Checkpoint& checkpoint, const HfConfig& config,
                                        absl::string_view layer);

// "<file>: tensor '<name>': what is, expected what was expected", kDataLoss.
absl::Status BadTensor(absl::string_view file, absl::string_view tensor, absl::string_view what,
                       absl::string_view expected);

}  // namespace moe::hf

#endif  // MOE_MOE_HF_TENSOR_LAYOUT_H_
