#include "moe/io/file_system.h"

#include <algorithm>
#include <cerrno>
#include <memory>

#include <absl/strings/string_view.h>
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace moe {
namespace {

// One write takes at most this much: Linux cuts longer ones short anyway.
constexpr size_t kMaxWriteBytes = size_t{1} << 30;

std::error_code ErrorOf(int result) {
  return {result < 0 ? errno : 0, std::generic_category()};
}

class SystemCalls : public FileSystem {
 public:
  std::error_code Create(const std::string& path, int& file) override {
    file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    return ErrorOf(file);
  }

  std::error_code Write(int file, absl::Span<const uint8_t> bytes, size_t& written) override {
    const ssize_t n = ::write(file, bytes.data(), std::min(bytes.size(), kMaxWriteBytes));
    written = n < 0 ? 0 : static_cast<size_t>(n);
    return ErrorOf(n < 0 ? -1 : 0);
  }

  std::error_code Flush(int file, PageCache cache) override {
    if (::fsync(file) != 0) return ErrorOf(-1);
    // Pages that were not yet on the disk would stay. It is advice: refusal does not matter.
    if (cache == PageCache::kDrop) ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    return {};
  }
  std::error_code Close(int file) override { return ErrorOf(::close(file)); }

  std::error_code Rename(const std::string& from, const std::string& to) override {
    return ErrorOf(::rename(from.c_str(), to.c_str()));
  }

  std::error_code Unlink(const std::string& path) override {
    return ErrorOf(::unlink(path.c_str()));
  }

  std::error_code MakeFolder(const std::string& path) override {
    return ErrorOf(::mkdir(path.c_str(), 0777));
  }

  std::error_code RemoveFolder(const std::string& path) override {
    return ErrorOf(::rmdir(path.c_str()));
  }

  std::error_code FlushFolder(const std::string& path) override {
    const int folder = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) return ErrorOf(folder);
    const std::error_code error = ErrorOf(::fsync(folder));
    ::close(folder);
    return error;
  }

  // (std::filesystem's iterators take memory where they may not throw.)
  std::error_code List(const std::string& path, std::vector<std::string>& names) override {
    const std::unique_ptr<DIR, int (*)(DIR*)> open(::opendir(path.c_str()), ::closedir);
    while (open != nullptr) {
      errno = 0;
      const dirent* const entry = ::readdir(open.get());
      if (entry == nullptr) break;
      const absl::string_view name = entry->d_name;
      if (name != "." && name != "..") names.emplace_back(name);
    }
    return {errno, std::generic_category()};
  }
};

}  // namespace

FileSystem& RealFileSystem() {
  static SystemCalls& calls = *new SystemCalls;
  return calls;
}

}  // namespace moe
