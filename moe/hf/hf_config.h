// The config.json of a public MoE model, as one MoeLayer.
#ifndef MOE_MOE_HF_HF_CONFIG_H_
#define MOE_MOE_HF_HF_CONFIG_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

#include "moe/layer/moe_layer.h"

namespace moe::hf {

struct Family;

// One layer as the model computes it: no capacity, no losses, evaluation.
struct HfConfig {
  const Family* family = nullptr;  // never null in a result
  MoeLayerConfig moe;
  std::vector<bool> has_experts;  // [layers] by the configuration; layers without experts are dense

  int64_t num_layers() const { return static_cast<int64_t>(has_experts.size()); }
  absl::string_view model_type() const;
};

// `document`: its model_type, or that of its text_config, must be in a table (family.h). An absent
// key has the value that transformers (5.24) gives it. Keys that do not concern the MoE layer are
// ignored, even if they are Python's NaN or Infinity. `file` is the name in messages.
//   kDataLoss: malformed JSON, a value out of range, keys that contradict each other
//   kUnimplemented: another model, or a setting that is not computed here: activations other than
//     silu and gelu, biases of MLPs, quantised weights
// Both name file, key, value and what was expected.
absl::StatusOr<HfConfig> ParseHfConfig(absl::string_view file, absl::string_view document);
// The same for a file. Also errors of MappedFile::Open.
absl::StatusOr<HfConfig> ReadHfConfig(const std::string& path);

}  // namespace moe::hf

#endif  // MOE_MOE_HF_HF_CONFIG_H_
