#include "moe/cli/line_file.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <unistd.h>

#include "moe/cli/exit_code.h"

namespace moe::cli {

namespace fs = std::filesystem;

absl::Status IoError(absl::string_view what, const std::string& path, int error) {
  return WithExitCode(
      absl::InternalError(absl::StrCat("cannot ", what, " '", path, "': ", std::strerror(error))),
      ExitCode::kIo);
}

absl::StatusOr<std::unique_ptr<LineFile>> LineFile::Create(const std::string& path,
                                                           std::vector<std::string> made) {
  std::error_code ignored;
  if (!fs::exists(path, ignored)) made.insert(made.begin(), path);
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (file < 0) return IoError("write", path, errno);
  return std::unique_ptr<LineFile>(new LineFile(path, std::move(made), file));
}

LineFile::~LineFile() {
  ::close(file_);
  if (size_bytes_ > 0) return;
  std::error_code ignored;  // what stays is an empty file, or a folder that others use
  for (const std::string& path : made_) fs::remove(path, ignored);
}

absl::Status LineFile::Append(absl::string_view lines) {
  // A device or pipe has no length to cut.
  std::error_code ignored;
  if (size_bytes_ == 0 && fs::is_regular_file(path_, ignored) && ::ftruncate(file_, 0) != 0) {
    return IoError("write", path_, errno);
  }
  size_t done = 0;
  while (done < lines.size()) {
    const ssize_t n = ::write(file_, lines.data() + done, lines.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      const int error = n < 0 ? errno : EIO;
      const bool cut = done == 0 || (::ftruncate(file_, size_bytes_) == 0 &&
                                     ::lseek(file_, size_bytes_, SEEK_SET) == size_bytes_);
      if (!cut) {
        return IoError("write, or cut back to whole lines,", path_, error);
      }
      return IoError("write", path_, error);
    }
    done += static_cast<size_t>(n);
  }
  size_bytes_ += static_cast<int64_t>(lines.size());
  return absl::OkStatus();
}

}  // namespace moe::cli
