// A safetensors file whose data need not be in memory at once: the header first, then data of any
// size.
#ifndef MOE_MOE_IO_SAFETENSORS_STREAM_H_
#define MOE_MOE_IO_SAFETENSORS_STREAM_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "moe/io/file.h"
#include "moe/io/file_system.h"
#include "moe/io/safetensors.h"

namespace moe {

// A tensor of a file that is being written.
struct SafetensorsEntry {
  std::string name = {};
  SafetensorsType type = SafetensorsType::kF32;
  std::vector<int64_t> shape = {};
  int64_t size_bytes = 0;  // must match `type` and `shape`
};

// Writes a file that SafetensorsFile::Open reads, tensors and data in the given order, the header
// padded with spaces to a multiple of 8 bytes: the same input gives the same bytes. The file
// appears under its name complete or not at all. Move-only; holds the header, not the data.
class SafetensorsStream {
 public:
  // kInvalidArgument, with no file touched, for what Open would refuse; else errors of WholeFile.
  static absl::StatusOr<SafetensorsStream> Create(const std::string& path,
                                                  absl::Span<const SafetensorsEntry> tensors,
                                                  const SafetensorsMetadata& metadata = {},
                                                  FileSystem& files = RealFileSystem());

  // The bytes before the data: 8 bytes of length, then JSON.
  const std::string& header() const { return header_; }
  // Appends the tensors' bytes, row-major and little-endian, one tensor after the other, in any
  // portions. kInvalidArgument beyond the last tensor; errors of WholeFile::Append.
  absl::Status Append(absl::Span<const uint8_t> bytes);
  // Called once, at the end. kFailedPrecondition if bytes are missing; errors of WholeFile::Commit.
  absl::Status Commit(PageCache cache = PageCache::kKeep);

 private:
  SafetensorsStream(std::string path, WholeFile file, std::string header, int64_t left_bytes)
      : path_(std::move(path)),
        file_(std::move(file)),
        header_(std::move(header)),
        left_bytes_(left_bytes) {}

  std::string path_;
  WholeFile file_;
  std::string header_;
  int64_t left_bytes_;  // bytes of data still to be appended
};

}  // namespace moe

#endif  // MOE_MOE_IO_SAFETENSORS_STREAM_H_
