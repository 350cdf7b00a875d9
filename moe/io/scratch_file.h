// A file without a name, for what does not fit in memory: it goes with whoever made it.
#ifndef MOE_MOE_IO_SCRATCH_FILE_H_
#define MOE_MOE_IO_SCRATCH_FILE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "comm/descriptor.h"
#include "kernels/base/buffer.h"

namespace moe {

// Its name is removed as soon as it is open, so that a process leaves nothing, however it ends. Its
// bytes pass by the system's page cache where the file system can read and write memory directly
// (O_DIRECT); elsewhere the cache is asked to drop them. Two threads may use it at once.
class ScratchFile {
 public:
  // Offsets, sizes and addresses of reads and writes are multiples of it.
  static constexpr int64_t kAlignment = 4096;

  // `bytes` zeros in `folder`, all of them reserved on the disk. `name` begins the file's name in
  // messages. kNotFound: there is no such folder. Else errors of FileError, kWrite, which name path
  // and bytes: a disk that is full, a limit of the process.
  static absl::StatusOr<ScratchFile> Create(const std::string& folder, absl::string_view name,
                                            int64_t bytes);

  // Both block. FileError with kRead, also for a file that is shorter than it was made, and kWrite.
  absl::Status Read(int64_t offset, absl::Span<std::byte> bytes) const;
  absl::Status Write(int64_t offset, absl::Span<const std::byte> bytes) const;

  // The first `bytes`, mapped: what is written there the system writes to the file when it needs
  // room. The caller unmaps them. FileError with kRead. A disk that fails meanwhile ends the
  // process with SIGBUS, as with MappedFile.
  absl::StatusOr<std::byte*> Map(int64_t bytes) const;
  // Returns when the disk has what was written, through a mapping too, and drops it from the page
  // cache. FileError with kWrite.
  absl::Status Flush() const;

  int number() const { return file_.number(); }
  const std::string& path() const { return path_; }

 private:
  ScratchFile(std::string path, Descriptor file) : path_(std::move(path)), file_(std::move(file)) {}
  void Drop(int64_t offset, size_t bytes) const;

  std::string path_;  // where it was
  Descriptor file_;
  bool direct_ = false;
};

// Host memory whose pages the system writes to a scratch file in `folder` when it needs room, one
// file an Allocate: for what is read and written in order, once. kResourceExhausted names path,
// bytes and cause. A disk that fails later ends the process with SIGBUS, as with MappedFile.
std::shared_ptr<MemoryResource> ScratchMemory(std::string folder, std::string name);

}  // namespace moe

#endif  // MOE_MOE_IO_SCRATCH_FILE_H_
