// The safetensors format (github.com/huggingface/safetensors): named tensors in one file. The file
// is 8 bytes N, little-endian; N bytes of JSON: {"name": {"dtype": "F32", "shape": [2, 3],
// "data_offsets": [begin, end]}, ..., "__metadata__": {"key": "text"}}; then the data.
#ifndef MOE_MOE_IO_SAFETENSORS_H_
#define MOE_MOE_IO_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "moe/io/file.h"

namespace moe {

// Element types of the format; most of them are only stored, not computed with.
enum class SafetensorsType : uint8_t {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};
inline constexpr int kNumSafetensorsTypes = 22;
// "F32": the format's name.
const char* NameOf(SafetensorsType type);
int BitsOf(SafetensorsType type);

// Files beyond these limits are refused. The first is the format's, the others keep the table of a
// hostile file small; a file of a published model has at most some thousand tensors, of rank up to
// 5.
inline constexpr int64_t kMaxSafetensorsHeaderBytes = 100'000'000;
inline constexpr int64_t kMaxSafetensorsTensors = 100'000;
inline constexpr int64_t kMaxSafetensorsMetadata = 10'000;
inline constexpr int64_t kMaxSafetensorsNameBytes = 1024;
inline constexpr int64_t kMaxSafetensorsRank = 16;

struct SafetensorsTensor {
  std::string name;
  SafetensorsType type = SafetensorsType::kF32;
  std::vector<int64_t> shape;  // empty: a scalar
  int64_t num_elements = 0;
  int64_t begin_bytes = 0;  // offset in the data
  int64_t size_bytes = 0;
};

using SafetensorsMetadata = std::map<std::string, std::string>;

// A file whose header was checked completely, without reading its data. Move-only. Thread-safe.
class SafetensorsFile {
 public:
  // Maps the file and checks it: the header is at most kMaxSafetensorsHeaderBytes and within the
  // file, starts with '{' and has no unknown keys; no key occurs twice; products of shapes fit in
  // int64 and match exactly the bytes of the tensor; tensors are contiguous, in any order, without
  // gap, overlap or rest. Errors of MappedFile::Open; kDataLoss "<path>: tensor '<name>': what is,
  // what was expected". Allocates at most the size of the file and 64 MiB, whatever the header
  // says.
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);
  // The same for bytes in memory, which must outlive the result. `name` is used in messages.
  static absl::StatusOr<SafetensorsFile> Parse(std::string name, absl::Span<const uint8_t> bytes);

  const std::string& path() const { return path_; }
  // By name, ascending.
  absl::Span<const SafetensorsTensor> tensors() const { return tensors_; }
  const SafetensorsMetadata& metadata() const { return metadata_; }
  // nullptr if there is none.
  const SafetensorsTensor* Find(absl::string_view name) const;

  // The bytes of a tensor of this file, row-major, little-endian, without alignment.
  absl::Span<const uint8_t> Data(const SafetensorsTensor& tensor) const;
  // Keeps the memory of Data valid after this object; null after Parse.
  std::shared_ptr<const MappedFile> mapping() const { return file_; }
  // out [num_elements] = the tensor as float32: F32 unchanged, F16 and BF16 exactly, F64 rounded to
  // nearest even. kInvalidArgument for another type or length.
  absl::Status ReadFloat32(const SafetensorsTensor& tensor, absl::Span<float> out) const;

 private:
  SafetensorsFile() = default;

  std::string path_;
  std::shared_ptr<const MappedFile> file_;  // shared with borrowers
  absl::Span<const uint8_t> data_;
  std::vector<SafetensorsTensor> tensors_;
  SafetensorsMetadata metadata_;
};

// A tensor to write. `bytes` are row-major and little-endian.
struct SafetensorsSource {
  std::string name = {};
  SafetensorsType type = SafetensorsType::kF32;
  std::vector<int64_t> shape = {};
  absl::Span<const uint8_t> bytes = {};
};
template <typename T>
absl::Span<const uint8_t> BytesOf(absl::Span<const T> values) {
  return {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(T)};
}

// Writes the tensors with SafetensorsStream (safetensors_stream.h).
absl::Status WriteSafetensors(const std::string& path, absl::Span<const SafetensorsSource> tensors,
                              const SafetensorsMetadata& metadata = {});

}  // namespace moe

#endif  // MOE_MOE_IO_SAFETENSORS_H_
