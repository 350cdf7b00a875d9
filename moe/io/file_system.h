// The system calls that change files and folders, behind an interface with which tests can make any
// of them fail.
#ifndef MOE_MOE_IO_FILE_SYSTEM_H_
#define MOE_MOE_IO_FILE_SYSTEM_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <system_error>
#include <vector>

#include <absl/status/status.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

namespace moe {

// Whether the system keeps written pages in memory for later readers.
enum class PageCache : uint8_t { kKeep, kDrop };

// A small file, as it was when it was opened.
struct SmallFile {
  std::string text;
  int64_t modified_ns = 0;  // time of the last write or touch, by the clock of its file system
};
inline constexpr size_t kMaxSmallFileBytes = size_t{1} << 16;

enum class FileKind : uint8_t { kFile, kFolder, kLink, kOther };

// System calls, with their errno: one call for each change; thread-safe. Larger files are read
// through MappedFile.
class FileSystem {
 public:
  virtual ~FileSystem() = default;
  // Creates a file for writing; EEXIST if the name is in use.
  virtual std::error_code Create(const std::string& path, int& file) = 0;
  // May write fewer bytes than it is given: `written` reports how many.
  virtual std::error_code Write(int file, absl::Span<const uint8_t> bytes, size_t& written) = 0;
  // Returns once the file's bytes are on the disk.
  virtual std::error_code Flush(int file, PageCache cache) = 0;
  virtual std::error_code Close(int file) = 0;
  // Sets the modification time of an open file to now.
  virtual std::error_code Touch(int file) = 0;
  // An existing `to` is replaced; a folder only replaces an empty folder.
  virtual std::error_code Rename(const std::string& from, const std::string& to) = 0;
  virtual std::error_code Unlink(const std::string& path) = 0;
  virtual std::error_code MakeFolder(const std::string& path) = 0;
  virtual std::error_code RemoveFolder(const std::string& path) = 0;  // must be empty
  // Returns once the names in the folder are on the disk.
  virtual std::error_code FlushFolder(const std::string& path) = 0;
  // The kind of the path itself: links are not followed.
  virtual std::error_code Look(const std::string& path, FileKind& kind) = 0;
  // Appends the names in the folder, in any order.
  virtual std::error_code List(const std::string& path, std::vector<std::string>& names) = 0;
  // EINVAL if it is not a regular file, EFBIG beyond kMaxSmallFileBytes. Opens the file anew, so
  // that writes of other hosts are seen.
  virtual std::error_code ReadSmall(const std::string& path, SmallFile& file) = 0;
  // Bytes that this user may still write to the file system of a folder; INT64_MAX: unknown.
  virtual std::error_code FreeBytes(const std::string& path, int64_t& bytes) = 0;
};

// Writes all of `bytes`, in as many calls as needed. EIO: a call wrote none.
std::error_code WriteAll(int file, absl::Span<const uint8_t> bytes, FileSystem& files);
// Creates a file with this text, on the disk and still open. Removes it if a call fails.
std::error_code CreateText(const std::string& path, absl::string_view text, FileSystem& files,
                           int& file);

// OK if there is no error; else FileError (moe/io/file.h), kWrite.
absl::Status StatusOf(std::error_code error, absl::string_view what, const std::string& path);

// The file system of this machine; never destroyed.
FileSystem& RealFileSystem();

}  // namespace moe

#endif  // MOE_MOE_IO_FILE_SYSTEM_H_
