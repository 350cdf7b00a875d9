// Reads checkpoints (docs/checkpoint.md), whatever layout wrote them.
#ifndef MOE_MOE_CHECKPOINT_READER_H_
#define MOE_MOE_CHECKPOINT_READER_H_

#include <cstdint>
#include <limits>
#include <mutex>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "kernels/base/tensor_view.h"
#include "moe/checkpoint/manifest.h"
#include "moe/io/file.h"
#include "moe/io/safetensors.h"
#include "moe/state/canonical_tensor.h"

namespace moe {

// The manifest of a step folder, under its checksum; nothing else is looked at. Errors of Open.
absl::StatusOr<CheckpointManifest> ReadManifest(const std::string& path);

// One checkpoint. Move-only; for one thread.
class CheckpointReader {
 public:
  // `path` is a step folder: "run/checkpoints/step-00000120". Checks the manifest, that its boxes
  // tile every tensor, that it is of the step in the folder's name, and every file's size and
  // header. kNotFound: no such folder, or no manifest in it. kDataLoss "CheckpointReader: <path>:
  // what is, what was expected": damaged.
  // kPermissionDenied, kUnavailable: the system refuses.
  static absl::StatusOr<CheckpointReader> Open(const std::string& path);

  const std::string& path() const { return path_; }
  const CheckpointManifest& manifest() const { return manifest_; }
  // 16 hexadecimal digits: the hash of all of a state (unit_grid.h); empty: there is none.
  std::string StateHash(absl::string_view state) const;
  // nullptr if the checkpoint has no such tensor.
  const ManifestTensor* Find(absl::string_view tensor) const;

  // out [rows of `box`, columns of `box`] = that part of a state. Every stored box that it touches
  // is hashed in full, once per reader. kNotFound: no such tensor or state. kInvalidArgument:
  // another type than the tensor's, a box beyond its shape, another size of `out`. kDataLoss: a box
  // with another hash than the manifest's; `out` is then undefined.
  absl::Status ReadBox(absl::string_view tensor, absl::string_view state, const TensorBox& box,
                       MatrixView<float> out);
  absl::Status ReadBox(absl::string_view tensor, absl::string_view state, const TensorBox& box,
                       MatrixView<double> out);

  // Without hashing: for whoever then compares StateHash with the hash of all that was read. `out`
  // may hold what is damaged, and Verify names where.
  absl::Status ReadUnchecked(absl::string_view tensor, absl::string_view state,
                             const TensorBox& box, MatrixView<float> out);

  // Hashes every box on `threads` >= 1 threads. kDataLoss names the first box, in the manifest's
  // order, that is damaged or has float32 values that are not finite.
  absl::Status Verify(int threads);
  // Hashes all of each state on `threads` >= 1 threads: kDataLoss names one that has another hash
  // than StateHash. `tensors`: those of the model, whose axes no manifest has (unit_grid.h). OK
  // where the manifest has no hash of any state.
  absl::Status VerifyStates(absl::Span<const CanonicalTensor> tensors, int threads);

 private:
  struct Shard {
    MappedFile file;
    std::once_flag parse;  // when a box of it is first needed
    absl::StatusOr<SafetensorsFile> tensors = absl::UnknownError("");
  };

  CheckpointReader() = default;
  // The bytes of a stored box; CheckedBox: whose hash is right. Thread-safe.
  absl::StatusOr<absl::Span<const uint8_t>> BoxBytes(const ManifestBox& box);
  absl::StatusOr<absl::Span<const uint8_t>> CheckedBox(size_t box);
  absl::Status CheckFinite(size_t box);
  template <typename T>
  absl::Status Read(absl::string_view tensor, absl::string_view state, const TensorBox& box,
                    MatrixView<T> out, bool check = true);

  std::string path_;
  CheckpointManifest manifest_;
  std::vector<Shard> shards_;   // as manifest_.files
  std::vector<bool> verified_;  // as manifest_.boxes
};

struct FoundCheckpoint {
  std::string path;  // empty: there is none
  int64_t step = 0;
  std::vector<std::string> warnings;  // a line for each newer one that is damaged
};

// The newest checkpoint of a step below `before` in `folder` ("run/checkpoints") that
// CheckpointReader::Open takes. A folder that is not there has none. kPermissionDenied,
// kUnavailable: the system refuses.
absl::StatusOr<FoundCheckpoint> FindCheckpoint(
    const std::string& folder, int64_t before = std::numeric_limits<int64_t>::max());

// "<path> is passed over: <why>": of a checkpoint in whose stead an older one is taken.
std::string PassedOver(const std::string& path, const absl::Status& why);

}  // namespace moe

#endif  // MOE_MOE_CHECKPOINT_READER_H_
