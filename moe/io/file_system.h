// The system calls that change files and folders, behind a class so that tests can make any of them
// fail.
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

// Whether the system keeps what was written in memory, for who reads it next.
enum class PageCache : uint8_t { kKeep, kDrop };

// A small file, as it was when it was opened.
struct SmallFile {
  std::string text;
  int64_t modified_ns = 0;  // when it was last written or touched, by the clock of its file system
};
inline constexpr size_t kMaxSmallFileBytes = size_t{1} << 16;

enum class FileKind : uint8_t { kFile, kFolder, kLink, kOther };

// System calls, with their errno: one each where they change something; thread-safe. What is not
// small is read through MappedFile.
class FileSystem {
 public:
  virtual ~FileSystem() = default;
  // A new file, to be written; EEXIST if something has the name.
  virtual std::error_code Create(const std::string& path, int& file) = 0;
  // May take fewer bytes than it is given: `written` says how many.
  virtual std::error_code Write(int file, absl::Span<const uint8_t> bytes, size_t& written) = 0;
  // Returns once the file's bytes are on the disk.
  virtual std::error_code Flush(int file, PageCache cache) = 0;
  virtual std::error_code Close(int file) = 0;
  // Makes now the time at which an open file was last written.
  virtual std::error_code Touch(int file) = 0;
  // What had the name `to` is replaced; a folder replaces an empty folder alone.
  virtual std::error_code Rename(const std::string& from, const std::string& to) = 0;
  virtual std::error_code Unlink(const std::string& path) = 0;
  virtual std::error_code MakeFolder(const std::string& path) = 0;
  virtual std::error_code RemoveFolder(const std::string& path) = 0;  // an empty one
  // Returns once the names in the folder are on the disk.
  virtual std::error_code FlushFolder(const std::string& path) = 0;
  // What has the name itself: links are not followed.
  virtual std::error_code Look(const std::string& path, FileKind& kind) = 0;
  // Adds the names in the folder, in no order.
  virtual std::error_code List(const std::string& path, std::vector<std::string>& names) = 0;
  // EINVAL for what is no regular file, EFBIG beyond kMaxSmallFileBytes. Opens the file anew, so
  // that what other hosts wrote is seen.
  virtual std::error_code ReadSmall(const std::string& path, SmallFile& file) = 0;
  // What this user may still write to the file system of a folder; INT64_MAX: it does not say.
  virtual std::error_code FreeBytes(const std::string& path, int64_t& bytes) = 0;
};

// All of `bytes`, in as many calls as it takes. EIO: a call takes none.
std::error_code WriteAll(int file, absl::Span<const uint8_t> bytes, FileSystem& files);
// A new file with this text, on the disk and still open. What was made of it when a call fails
// goes.
std::error_code CreateText(const std::string& path, absl::string_view text, FileSystem& files,
                           int& file);

// OK where there is no error; else FileError (moe/io/file.h), kWrite.
absl::Status StatusOf(std::error_code error, absl::string_view what, const std::string& path);

// The machine's own; never destroyed.
FileSystem& RealFileSystem();

}  // namespace moe

#endif  // MOE_MOE_IO_FILE_SYSTEM_H_
