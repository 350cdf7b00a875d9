#include "moe/cli/base/line_file.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/base/status_macros.h"
#include "moe/io/file.h"

namespace moe::cli {

namespace fs = std::filesystem;

absl::Status MakeFolder(absl::string_view flag, const std::string& folder,
                        std::vector<std::string>& made) {
  std::error_code error;
  const fs::file_status status = fs::status(folder, error);
  if (fs::is_directory(status)) return absl::OkStatus();
  if (fs::exists(status)) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, " is '", folder, "', which is a file, expected a folder"));
  }
  fs::path missing = fs::path(folder).lexically_normal();
  if (!missing.has_filename()) missing = missing.parent_path();  // "run/"
  for (; !missing.empty() && !fs::exists(missing, error); missing = missing.parent_path()) {
    made.push_back(missing.string());
  }
  fs::create_directories(folder, error);
  if (error) return FileError("make the folder", folder, error.value(), FileFault::kWrite);
  return absl::OkStatus();
}

absl::Status AppendWhole(int file, const std::string& path, absl::string_view text,
                         int64_t& size_bytes) {
  (void)::lseek(file, size_bytes, SEEK_SET);  // a pipe has no place to go to
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t n = ::write(file, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      const int error = n < 0 ? errno : EIO;
      const bool whole = done == 0 || ::ftruncate(file, size_bytes) == 0;
      return FileError(whole ? "write" : "write, or cut back to whole lines,", path, error,
                       FileFault::kWrite);
    }
    done += static_cast<size_t>(n);
  }
  size_bytes += static_cast<int64_t>(text.size());
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<LineFile>> LineFile::Create(const std::string& path,
                                                           std::vector<std::string> made) {
  std::error_code ignored;
  if (!fs::exists(path, ignored)) made.insert(made.begin(), path);
  // Without O_NONBLOCK this call would block on a pipe that nobody reads.
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
  if (file < 0) return FileError("write", path, errno, FileFault::kWrite);
  ::fcntl(file, F_SETFL, ::fcntl(file, F_GETFL) & ~O_NONBLOCK);
  auto lines = std::unique_ptr<LineFile>(new LineFile(path, std::move(made), file));
  MOE_RETURN_IF_ERROR(lines->Lock());
  return lines;
}

absl::Status LineFile::Lock() {
  struct stat facts = {};
  if (::fstat(file_, &facts) != 0) return FileError("look at", path_, errno, FileFault::kWrite);
  if (!S_ISREG(facts.st_mode)) return absl::OkStatus();
  // On a file system without locks, whoever starts runs must keep them apart.
  if (::flock(file_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    made_.clear();  // the other's
    return absl::InvalidArgumentError(
        absl::StrCat("'", path_, "' is being written by another run, expected a file of its own"));
  }
  replaces_ = facts.st_size > 0;
  return absl::OkStatus();
}

LineFile::~LineFile() {
  ::close(file_);
  if (size_bytes_ > 0) return;
  // A path that cannot be removed is an empty file, or a folder that others use.
  for (const std::string& path : made_) (void)std::remove(path.c_str());
}

absl::Status LineFile::Append(absl::string_view lines) {
  struct stat facts = {};
  if (::fstat(file_, &facts) == 0 && facts.st_nlink == 0) {
    return WithFileFault(
        absl::UnavailableError(absl::StrCat("cannot write '", path_, "': it was deleted")),
        FileFault::kWrite);
  }
  // A device or pipe has no length to cut.
  if (size_bytes_ == 0 && S_ISREG(facts.st_mode) && ::ftruncate(file_, 0) != 0) {
    return FileError("write", path_, errno, FileFault::kWrite);
  }
  return AppendWhole(file_, path_, lines, size_bytes_);
}

}  // namespace moe::cli
