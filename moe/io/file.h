// Files read whole, and files written whole or not at all.
#ifndef MOE_MOE_IO_FILE_H_
#define MOE_MOE_IO_FILE_H_

#include <cstdint>
#include <string>
#include <utility>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/time/time.h>
#include <absl/types/span.h>

#include "moe/io/file_system.h"

namespace moe {

// The kind of a file error, whatever its code: programs have exit codes for these. Attached to the
// status as a payload.
enum class FileFault : uint8_t {
  kNone,
  kContent,  // it is damaged, or not in the expected format
  kRead,     // the system could not read it
  kWrite,    // it could not be written
};
absl::Status WithFileFault(absl::Status status, FileFault fault);
FileFault FileFaultOf(const absl::Status& status);

// "cannot <what> '<path>': <reason>", for a system call that failed with errno `error`. kRead:
// kNotFound if nothing is there, kPermissionDenied, kInvalidArgument if it is not a file, all
// without a fault; kResourceExhausted without memory; else kUnavailable with the fault. kWrite: the
// last two, and kPermissionDenied with the fault.
absl::Status FileError(absl::string_view what, const std::string& path, int error, FileFault fault);

// Whether a folder exists, following links. Errors of FileError, kRead, except for a missing path.
absl::StatusOr<bool> IsFolder(const std::string& path);

// "<what>: <message>", with the code and the payloads of an error.
absl::Status Prefixed(absl::string_view what, const absl::Status& status);

// The bytes of a file, mapped: they do not count as memory of this process, and are read on access.
// Move-only. If another process shortens the file while it is mapped, this process ends with
// SIGBUS, which `moe` turns into a line and exit code 4: replace files by renaming, as WholeFile
// does.
class MappedFile {
 public:
  // Errors of FileError, kRead; kInvalidArgument: a folder, device or pipe.
  static absl::StatusOr<MappedFile> Open(const std::string& path);
  MappedFile() = default;
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }
  MappedFile& operator=(MappedFile&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  absl::Span<const uint8_t> bytes() const { return bytes_; }
  absl::string_view text() const {
    return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()};
  }

 private:
  absl::Span<const uint8_t> bytes_;
};

// A hash of device, inode, size and times of the file at `path`: on one host, equal only for the
// same file. Errors of MappedFile::Open.
absl::StatusOr<uint64_t> FileIdentity(const std::string& path);

// A file that appears under its name once it is complete: it is written beside it under a temporary
// name, flushed to the disk, and renamed. An existing file is replaced, also if it is a symbolic
// link. An existing device or pipe is written in place.
class WholeFile {
 public:
  // kNotFound: the folder does not exist. kInvalidArgument: `path` is a folder. Else errors of
  // FileError, kWrite, also for a pipe without a reader within `reader_time`.
  static absl::StatusOr<WholeFile> Create(const std::string& path,
                                          absl::Duration reader_time = absl::InfiniteDuration(),
                                          FileSystem& files = RealFileSystem());
  // Removes the temporary file if Commit did not succeed.
  ~WholeFile() { Discard(); }
  WholeFile(WholeFile&& other) noexcept { *this = std::move(other); }
  WholeFile& operator=(WholeFile&& other) noexcept;

  // Errors of FileError, kWrite.
  absl::Status Append(absl::Span<const uint8_t> bytes);
  absl::Status Append(absl::string_view text);
  // Called once, after the last Append.
  absl::Status Commit(PageCache cache = PageCache::kKeep);

 private:
  explicit WholeFile(FileSystem& files) : files_(&files) {}
  void Discard();

  FileSystem* files_ = nullptr;
  std::string path_;
  std::string temporary_;  // empty: written in place
  int file_ = -1;
};

// Writes a whole file at once. Errors of WholeFile.
absl::Status WriteText(const std::string& path, absl::string_view text,
                       FileSystem& files = RealFileSystem());

}  // namespace moe

#endif  // MOE_MOE_IO_FILE_H_
