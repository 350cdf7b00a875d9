// Tensors by name from a Hugging Face checkpoint: one safetensors file, or several with an index.
#ifndef MOE_MOE_IO_CHECKPOINT_H_
#define MOE_MOE_IO_CHECKPOINT_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

#include "moe/io/safetensors.h"

namespace moe {

// Maps the name of a tensor to the name of the file that holds it, beside the index.
using ShardMap = std::map<std::string, std::string>;

// The "weight_map" of an index {"metadata": {...}, "weight_map": {tensor: file}}. Other keys of the
// document are ignored. kDataLoss "<file>: what is, what was expected"; also for a file name that
// is not a plain "*.safetensors" of the same folder: with a '/', a leading '.', a NUL. Allocates at
// most the size of the document and 64 MiB.
absl::StatusOr<ShardMap> ParseShardIndex(absl::string_view file, absl::string_view document);

// A tensor and its file, both valid as long as the checkpoint exists.
struct CheckpointTensor {
  const SafetensorsFile* file = nullptr;
  const SafetensorsTensor* tensor = nullptr;
};

// Move-only. Used by one thread at a time, since Find opens files; any thread may read what it
// returned.
class Checkpoint {
 public:
  // `path` is a *.safetensors file, an index (*.json), or a folder with model.safetensors or, if
  // there is none, model.safetensors.index.json. Files of an index are opened when first needed.
  // kNotFound: no such path, or a folder with neither. Else errors of SafetensorsFile::Open and
  // ParseShardIndex.
  static absl::StatusOr<Checkpoint> Open(const std::string& path);

  const std::string& path() const { return path_; }
  bool Contains(absl::string_view name) const;
  // Names of all tensors, in order.
  std::vector<std::string> Names() const;
  // The files that may be read: the given one, or those of the index.
  std::vector<std::string> Files() const;
  // kNotFound if the checkpoint has no such tensor. The first tensor of a file opens it: errors of
  // SafetensorsFile::Open; kDataLoss if the file is missing or lacks a tensor that the index lists
  // (names tensor and file).
  absl::StatusOr<CheckpointTensor> Find(absl::string_view name);

 private:
  Checkpoint() = default;
  static absl::StatusOr<Checkpoint> OpenIndex(const std::string& path);
  absl::StatusOr<const SafetensorsFile*> Shard(const std::string& name);

  std::string path_;    // path of the file or the index
  std::string folder_;  // folder of the index, with its '/'
  ShardMap shard_of_;   // empty without an index
  // By file name; without an index the one file, as "". Pointers, so that a move of the checkpoint
  // moves no file.
  std::map<std::string, std::unique_ptr<SafetensorsFile>> open_;
};

}  // namespace moe

#endif  // MOE_MOE_IO_CHECKPOINT_H_
