// The correspondence of tensors of a Hugging Face checkpoint and parameters of MoeLayer.
#ifndef MOE_MOE_HF_TENSOR_RULE_H_
#define MOE_MOE_HF_TENSOR_RULE_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/strings/string_view.h>

#include "moe/layer/moe_layer.h"

namespace moe::hf {

// The parameters that MoeLayer::Create adds to its store. Fs: width of the shared expert.
enum class ParameterKind : uint8_t {
  kRouterWeight,      // [E, H]
  kRouterBias,        // [E]
  kExpertBias,        // [E], not trained
  kExpertGateUp,      // [2F, H] of every expert
  kExpertGateUpBias,  // [2F]
  kExpertDown,        // [H, F]
  kExpertDownBias,    // [H]
  kSharedGateUp,      // [2Fs, H]
  kSharedDown,        // [H, Fs]
  kSharedOutputGate,  // [1, H]
};

// Which rows of the parameter a tensor holds.
enum class TensorRows : uint8_t {
  kAll,
  kGate,         // the first half
  kUp,           // the second half
  kInterleaved,  // all: gate row 0, up row 0, gate row 1, up row 1, ...
};

// Where a tensor of a parameter per expert stores the experts.
enum class ExpertAxis : uint8_t {
  kNone,      // not of experts: the router, the shared expert
  kNumbered,  // a tensor per expert, {e} in its name
  kStacked,   // one tensor, experts are its first dimension
};

// A tensor, or a tensor per expert, of the family's published models; its form in transformers'
// memory follows from it (tensor_layout.h).
struct TensorRule {
  absl::string_view name;  // below "model.layers.N.<block>.": "experts.{e}.up_proj.weight"
  ParameterKind parameter = ParameterKind::kRouterWeight;
  ExpertAxis experts = ExpertAxis::kNone;
  TensorRows rows = TensorRows::kAll;
  bool transposed = false;  // columns first
  bool row_vector = false;  // a vector of n as [1, n]
  // A stacked tensor also has rows of the identity experts, which are ignored.
  bool counts_zero_experts = false;
  absl::string_view fused_name = {};  // in the fused layout, if it differs
};

// A parameter's shape; cols 0 = a vector of `rows` elements.
struct ParameterShape {
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t size() const { return cols == 0 ? rows : rows * cols; }
};
ParameterShape ShapeOf(ParameterKind kind, const MoeLayerConfig& config);

inline bool IsTrained(ParameterKind kind) {
  return kind != ParameterKind::kExpertBias;
}
// The tensors of a shared expert are absent if its width is 0.
bool IsPresent(const TensorRule& rule, const MoeLayerConfig& config);
// Its name in a store whose layer was created with the prefix "". `expert` is ignored by kinds that
// belong to no expert.
std::string ParameterName(ParameterKind kind, int32_t expert);

// Its name as a canonical tensor (moe/state/canonical_tensor.h) of a layer without prefix: gate and
// up, which are halves of one parameter, have one each.
std::string CanonicalName(const TensorRule& rule, int32_t expert);

// Tensors of a rule: one per expert for numbered ones, otherwise one.
int32_t TensorCount(const TensorRule& rule, const MoeLayerConfig& config);
// The tensor's name (without prefix) and shape.
std::string TensorName(const TensorRule& rule, int32_t expert);
std::vector<int64_t> TensorShape(const TensorRule& rule, const MoeLayerConfig& config);

// Calls copy(i, j) for every element j of the tensor (stacked: of one expert's part of it), which
// is element i of the parameter. Import and export share this loop, so that they are inverse.
template <typename Copy>
void ForEachElement(const TensorRule& rule, const MoeLayerConfig& config, Copy copy) {
  const ParameterShape shape = ShapeOf(rule.parameter, config);
  const int64_t cols = shape.cols == 0 ? 1 : shape.cols;
  const int64_t half = shape.rows / 2;
  const bool is_half = rule.rows == TensorRows::kGate || rule.rows == TensorRows::kUp;
  const int64_t rows = is_half ? half : shape.rows;
  for (int64_t r = 0; r < rows; ++r) {
    int64_t row = r;
    if (rule.rows == TensorRows::kUp) row = half + r;
    if (rule.rows == TensorRows::kInterleaved) row = r / 2 + (r % 2) * half;
    for (int64_t c = 0; c < cols; ++c) {
      copy(row * cols + c, rule.transposed ? c * rows + r : r * cols + c);
    }
  }
}

}  // namespace moe::hf

#endif  // MOE_MOE_HF_TENSOR_RULE_H_
