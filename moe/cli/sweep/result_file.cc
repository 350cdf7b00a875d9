#include "moe/cli/sweep/result_file.h"

#include <algorithm>
#include <cerrno>

#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/string_view.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/base/line_file.h"
#include "moe/io/file.h"

namespace moe::sweep {
namespace {

// The size of a sweep of 100,000 points with settings of a kilobyte.
constexpr int64_t kMostBytes = int64_t{256} << 20;
// Twice that number of points: a row in memory takes some kilobytes, however short its line.
constexpr int64_t kMostRows = 200'000;

// Every line begins with this.
constexpr absl::string_view kRowStart = "{\"schema\":\"moe.sweep/";

absl::StatusOr<std::string> ReadAll(int file, int64_t bytes, const std::string& path) {
  std::string text(static_cast<size_t>(bytes), '\0');
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t n =
        ::pread(file, text.data() + done, text.size() - done, static_cast<off_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return FileError("read", path, errno, FileFault::kRead);
    if (n == 0) break;
    done += static_cast<size_t>(n);
  }
  text.resize(done);
  return text;
}

// Whether `line` may be an incomplete row: other files are not truncated.
bool IsCutRow(absl::string_view line) {
  return absl::StartsWith(line, kRowStart) || absl::StartsWith(kRowStart, line);
}

}  // namespace

absl::StatusOr<ResultFile> ResultFile::Open(const std::string& path, int flags) {
  ResultFile result;
  result.path_ = path;
  result.file_ = Descriptor(::open(path.c_str(), O_RDWR | O_CLOEXEC | flags, 0666));
  // The write end of a pipe or device cannot always be read.
  if (!result.file_.is_open() && errno != EISDIR && errno != ENOENT) {
    result.file_ = Descriptor(::open(path.c_str(), O_WRONLY | O_CLOEXEC | flags, 0666));
  }
  if (!result.file_.is_open()) return FileError("open", path, errno, FileFault::kRead);
  struct stat facts = {};
  if (::fstat(result.file_.number(), &facts) != 0)
    return FileError("look at", path, errno, FileFault::kWrite);
  result.regular_ = S_ISREG(facts.st_mode);
  if (!result.regular_) return result;
  if (::flock(result.file_.number(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return FileError("lock", path, errno, FileFault::kWrite);
    return absl::FailedPreconditionError(
        absl::StrCat("'", path, "' is being written by another sweep"));
  }
  // Its size before the lock may exclude another sweep's last row.
  if (::fstat(result.file_.number(), &facts) != 0)
    return FileError("look at", path, errno, FileFault::kWrite);
  result.size_bytes_ = facts.st_size;
  return result;
}

absl::StatusOr<ResultFile> ResultFile::Create(const std::string& path) {
  MOE_ASSIGN_OR_RETURN(ResultFile result, Open(path, O_CREAT));
  if (result.size_bytes_ == 0) return result;
  return absl::AlreadyExistsError(absl::StrCat("'", path, "' holds something already"));
}

absl::StatusOr<ResultFile> ResultFile::Continue(const std::string& path) {
  MOE_ASSIGN_OR_RETURN(ResultFile result, Open(path, 0));
  if (!result.regular_) {
    return absl::InvalidArgumentError(absl::StrCat("'", path, "' is no regular file"));
  }
  MOE_RETURN_IF_ERROR(result.ReadLines());
  return result;
}

absl::Status ResultFile::ReadLines() {
  if (size_bytes_ > kMostBytes) {
    return absl::DataLossError(
        absl::StrCat(path_, ": ", size_bytes_, " bytes, expected at most ", kMostBytes));
  }
  MOE_ASSIGN_OR_RETURN(const std::string text, ReadAll(file_.number(), size_bytes_, path_));
  const int64_t lines = std::count(text.begin(), text.end(), '\n');
  if (lines > kMostRows) {
    return absl::DataLossError(
        absl::StrCat(path_, ": ", lines, " lines, expected at most ", kMostRows));
  }
  size_t begin = 0;
  for (int64_t number = 1; begin < text.size(); ++number) {
    const size_t end = text.find('\n', begin);
    const bool whole = end != std::string::npos;
    const absl::string_view line =
        absl::string_view(text).substr(begin, whole ? end - begin : std::string::npos);
    if (!absl::StripAsciiWhitespace(line).empty()) {
      absl::StatusOr<SweepRow> row = ParseSweepRow(line);
      if (!row.ok() && (whole || !IsCutRow(line))) {
        return absl::DataLossError(
            absl::StrCat(path_, ": line ", number, ": ", row.status().message()));
      }
      if (!row.ok()) break;  // interrupted while it was written
      lines_.push_back({number, *std::move(row)});
    }
    begin = whole ? end + 1 : text.size();
  }
  size_bytes_ = static_cast<int64_t>(begin);
  if (::ftruncate(file_.number(), size_bytes_) != 0)
    return FileError("cut", path_, errno, FileFault::kWrite);
  // An editor may have removed the last end of line.
  const bool ends = size_bytes_ == 0 || text[begin - 1] == '\n';
  return cli::AppendWhole(file_.number(), path_, ends ? "" : "\n", size_bytes_);
}

absl::Status ResultFile::Append(const SweepRow& row) {
  return cli::AppendWhole(file_.number(), path_, JsonLine(row), size_bytes_);
}

}  // namespace moe::sweep
