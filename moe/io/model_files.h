// Writes the tensors of a whole model in the files that Hugging Face uses.
#ifndef MOE_MOE_IO_MODEL_FILES_H_
#define MOE_MOE_IO_MODEL_FILES_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/types/span.h>

#include "kernels/base/dtype.h"
#include "moe/io/safetensors_stream.h"

namespace moe {

// Bytes of data in a shard; a larger tensor has a file of its own.
inline constexpr int64_t kMaxShardBytes = 5'000'000'000;

// kFloat32, kBFloat16 or kFloat16.
SafetensorsType SafetensorsTypeOf(DType type);

struct ModelText {
  std::string name = {};  // "config.json"
  std::string text = {};
};

// Writes model.safetensors into `folder`, which must exist, or numbered shards with
// model.safetensors.index.json, then `texts` in their order. append(i, stream) appends the data of
// tensors[i], i from 0 on. On an error, append's included, none of the files is left.
//   FileFault::kWrite (moe/io/file.h): a write failed
absl::Status WriteModelFiles(const std::string& folder, absl::Span<const SafetensorsEntry> tensors,
                             int64_t max_shard_bytes,
                             absl::FunctionRef<absl::Status(size_t, SafetensorsStream&)> append,
                             std::vector<ModelText> texts = {});

// Appends values of tensor `name`, each rounded to `type` once. kInvalidArgument for a value that
// is finite only in float32; else errors of SafetensorsStream::Append, as FileFault::kWrite.
absl::Status AppendRounded(absl::string_view name, absl::Span<const float> values, DType type,
                           SafetensorsStream& stream);

}  // namespace moe

#endif  // MOE_MOE_IO_MODEL_FILES_H_
