// What moe ckpt computes from whole checkpoints: their differences, and models in another program's
// format.
#ifndef MOE_MOE_CLI_CKPT_CKPT_H_
#define MOE_MOE_CLI_CKPT_CKPT_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/statusor.h>

#include "kernels/base/dtype.h"
#include "moe/checkpoint/reader.h"
#include "moe/io/model_files.h"
#include "moe/state/canonical_tensor.h"

namespace moe::ckpt {

// Boxes of at most a million elements, consecutive in the tensor, row-major: it is read in these
// and need not fit into memory.
std::vector<TensorBox> PiecesOf(const ManifestTensor& tensor);

// One state of one tensor.
struct StateDifference {
  std::string tensor, state;
  int64_t elements = 0;
  int64_t different = 0;  // elements whose bits differ
  // The largest distance of two elements: the number of representable numbers between them, plus
  // one. 0 between +0 and -0; NaNs count by their bits.
  uint64_t max_ulps = 0;
  double max_abs = 0;  // the largest |a - b|; NaNs are ignored
  std::string only;    // "A", "B": the other lacks this state, or has one of another shape or type
};

// Every state of either checkpoint, in order of names. Errors of CheckpointReader::ReadBox. Memory:
// some million elements of each.
absl::StatusOr<std::vector<StateDifference>> Diff(CheckpointReader& a, CheckpointReader& b);

struct ExportOptions {
  std::string format = "mixtral";  // one of hf::ModelTypes()
  std::string folder;              // is created, or must be empty
  DType type = DType::kFloat32;    // a storage type: masters are rounded to it once
  int64_t max_shard_bytes = kMaxShardBytes;
};

// Writes config.json, generation_config.json, the run's tokenizer.json if it has one, and
// model.safetensors, or numbered shards with
// model.safetensors.index.json, as transformers reads them. Returns warnings, one a line. Memory:
// some million elements. On an error no file is left in the folder.
//   kInvalidArgument: the format cannot express the model (names setting and expectation), the
//     folder is not empty, or a weight is finite only in float32
//   FileFault::kContent (moe/io/file.h): the checkpoint is damaged
//   FileFault::kWrite: a write failed
absl::StatusOr<std::vector<std::string>> Export(CheckpointReader& reader,
                                                const ExportOptions& options);

}  // namespace moe::ckpt

#endif  // MOE_MOE_CLI_CKPT_CKPT_H_
