#include "moe/io/file_system.h"

#include <algorithm>
#include <cerrno>
#include <limits>
#include <memory>

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "moe/io/file.h"

namespace moe {
namespace {

// Most bytes of one write: Linux shortens longer ones anyway.
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
    // Pages must be on the disk to be dropped. This is advice, so that a refusal does not matter.
    if (cache == PageCache::kDrop) ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    return {};
  }
  std::error_code Close(int file) override { return ErrorOf(::close(file)); }
  std::error_code Touch(int file) override { return ErrorOf(::futimens(file, nullptr)); }

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

  std::error_code Look(const std::string& path, FileKind& kind) override {
    struct stat info = {};
    if (::lstat(path.c_str(), &info) != 0) return ErrorOf(-1);
    kind = S_ISREG(info.st_mode)   ? FileKind::kFile
           : S_ISDIR(info.st_mode) ? FileKind::kFolder
           : S_ISLNK(info.st_mode) ? FileKind::kLink
                                   : FileKind::kOther;
    return {};
  }

  // (std::filesystem's iterators allocate where they may not throw.)
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

  // (Without O_NONBLOCK open would block on a pipe of that name without a writer.)
  std::error_code ReadSmall(const std::string& path, SmallFile& file) override {
    const int open = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (open < 0) return ErrorOf(open);
    const std::error_code error = ReadOpen(open, file);
    ::close(open);
    return error;
  }

  std::error_code FreeBytes(const std::string& path, int64_t& bytes) override {
    struct statvfs facts = {};
    if (::statvfs(path.c_str(), &facts) != 0) return ErrorOf(-1);
    constexpr auto kMost = std::numeric_limits<int64_t>::max();
    const double free = static_cast<double>(facts.f_bavail) * static_cast<double>(facts.f_frsize);
    // File systems that do not count blocks report 0 for all.
    bytes = facts.f_blocks == 0 || free >= 0x1p62 ? kMost : static_cast<int64_t>(free);
    return {};
  }

 private:
  static std::error_code ReadOpen(int open, SmallFile& file) {
    struct stat facts = {};
    if (::fstat(open, &facts) != 0) return ErrorOf(-1);
    if (!S_ISREG(facts.st_mode)) return {EINVAL, std::generic_category()};
    file.modified_ns = int64_t{facts.st_mtim.tv_sec} * 1'000'000'000 + facts.st_mtim.tv_nsec;
    file.text.assign(kMaxSmallFileBytes + 1, 0);
    size_t size = 0;
    while (size < file.text.size()) {
      const ssize_t n = ::read(open, file.text.data() + size, file.text.size() - size);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return ErrorOf(-1);
      if (n == 0) break;
      size += static_cast<size_t>(n);
    }
    if (size == file.text.size()) return {EFBIG, std::generic_category()};
    file.text.resize(size);
    return {};
  }
};

}  // namespace

std::error_code WriteAll(int file, absl::Span<const uint8_t> bytes, FileSystem& files) {
  while (!bytes.empty()) {
    size_t written = 0;
    const std::error_code error = files.Write(file, bytes, written);
    if (error.value() == EINTR) continue;
    if (error) return error;
    if (written == 0) return {EIO, std::generic_category()};
    bytes.remove_prefix(written);
  }
  return {};
}

std::error_code CreateText(const std::string& path, absl::string_view text, FileSystem& files,
                           int& file) {
  if (const std::error_code error = files.Create(path, file)) return error;
  const auto* const bytes = reinterpret_cast<const uint8_t*>(text.data());
  std::error_code error = WriteAll(file, {bytes, text.size()}, files);
  if (!error) error = files.Flush(file, PageCache::kKeep);
  if (!error) return error;
  (void)files.Close(file);
  (void)files.Unlink(path);
  return error;
}

absl::Status StatusOf(std::error_code error, absl::string_view what, const std::string& path) {
  return error ? FileError(what, path, error.value(), FileFault::kWrite) : absl::OkStatus();
}

FileSystem& RealFileSystem() {
  static SystemCalls& calls = *new SystemCalls;
  return calls;
}

}  // namespace moe
