// Exports a checkpoint as a model in another program's format.
#ifndef MOE_MOE_CLI_CKPT_EXPORT_H_
#define MOE_MOE_CLI_CKPT_EXPORT_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/statusor.h>

#include "kernels/base/dtype.h"
#include "moe/checkpoint/reader.h"
#include "moe/io/model_files.h"

namespace moe::ckpt {

struct ExportOptions {
  std::string format = "mixtral";  // one of hf::ModelTypes()
  std::string folder;              // is created, or must be empty
  DType type = DType::kFloat32;    // a storage type: masters are rounded to it once
  int64_t max_shard_bytes = kMaxShardBytes;
};

// Writes config.json, generation_config.json and model.safetensors, or numbered shards with
// model.safetensors.index.json, as transformers reads them. Returns warnings, one a line. Memory:
// some million elements. On an error no file is left in the folder.
//   kInvalidArgument: the format cannot express the model (names setting and expectation), the
//     folder is not empty, or a weight is finite only in float32
//   FileFault::kContent (moe/io/file.h): the checkpoint is damaged
//   FileFault::kWrite: a write failed
absl::StatusOr<std::vector<std::string>> Export(CheckpointReader& reader,
                                                const ExportOptions& options);

}  // namespace moe::ckpt

#endif  // MOE_MOE_CLI_CKPT_EXPORT_H_
