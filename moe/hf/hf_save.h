// MoE layers of a store as a Hugging Face model has them in its files.
#ifndef MOE_MOE_HF_HF_SAVE_H_
#define MOE_MOE_HF_HF_SAVE_H_

#include <cstdint>
#include <string>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "moe/hf/hf_config.h"
#include "moe/io/model_files.h"
#include "moe/run/context.h"
#include "moe/state/parameter.h"

namespace moe::hf {

// A layer of the model, by its number, and how its parameters' names begin in the store.
struct StoredLayer {
  int64_t layer = 0;
  std::string prefix = {};
};

struct SaveOptions {
  std::string folder = {};       // is there
  DType type = DType::kFloat32;  // kBFloat16, kFloat16: values are rounded to it once
  int64_t max_shard_bytes = kMaxShardBytes;
};

// Writes the tensors of `layers`, created with these prefixes and config.moe, in names, shapes and
// layouts in which the model's family is published, "model.layers.N.…", into model.safetensors or
// shards with an index: what LayerWeights::Load has read from such files, byte for byte in its own
// type. Rank 0 of the world writes; experts come to it from the ranks that hold them, one by one.
// Collective over the world, blocks. Memory: one expert's part of a tensor on two ranks.
//   kInvalidArgument, on the rank that finds it: the store lacks a parameter of a layer or has it
//     of another size; a value is finite in float32 alone
//   kFailedPrecondition: ZeRO has the masters in parts
//   kUnimplemented, on the rank that finds it: tensor-parallel ranks have a parameter in parts
//   FileFault::kWrite, on rank 0: a write failed
//   kAborted: another rank had one of these
// On an error no file is left.
absl::Status SaveLayers(const HfConfig& config, absl::Span<const StoredLayer> layers,
                        const ParameterStore& store, const Context& context,
                        const SaveOptions& options);

}  // namespace moe::hf

#endif  // MOE_MOE_HF_HF_SAVE_H_
