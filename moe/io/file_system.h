// The system calls that change files and folders, behind a class so that tests can make any of them
// fail.
#ifndef MOE_MOE_IO_FILE_SYSTEM_H_
#define MOE_MOE_IO_FILE_SYSTEM_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <system_error>
#include <vector>

#include <absl/types/span.h>

namespace moe {

// Whether the system keeps what was written in memory, for who reads it next.
enum class PageCache : uint8_t { kKeep, kDrop };

// One system call each, with its errno; thread-safe. Reading goes through MappedFile.
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
  // What had the name `to` is replaced; a folder replaces an empty folder alone.
  virtual std::error_code Rename(const std::string& from, const std::string& to) = 0;
  virtual std::error_code Unlink(const std::string& path) = 0;
  virtual std::error_code MakeFolder(const std::string& path) = 0;
  virtual std::error_code RemoveFolder(const std::string& path) = 0;  // an empty one
  // Returns once the names in the folder are on the disk.
  virtual std::error_code FlushFolder(const std::string& path) = 0;
  // Adds the names in the folder, in no order.
  virtual std::error_code List(const std::string& path, std::vector<std::string>& names) = 0;
};

// The machine's own; never destroyed.
FileSystem& RealFileSystem();

}  // namespace moe

#endif  // MOE_MOE_IO_FILE_SYSTEM_H_
