#include "moe/io/file.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iterator>
#include <system_error>

#include <absl/strings/cord.h>
#include <absl/strings/str_cat.h>
#include <absl/time/clock.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "comm/descriptor.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/xxh3.h"

namespace moe {
namespace {

absl::Status ReadError(absl::string_view what, const std::string& path, int error) {
  return FileError(what, path, error, FileFault::kRead);
}

// Also for a lack of permission, like a full disk.
absl::Status WriteError(const std::string& path, int error) {
  return FileError("write", path, error, FileFault::kWrite);
}

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return path.substr(0, slash + 1);
}

// A name beside `path` that no other writer on this machine uses.
std::string TemporaryName(const std::string& path) {
  static std::atomic<int64_t> count = 0;
  return absl::StrCat(path, ".tmp-", ::getpid(), "-", count.fetch_add(1));
}

// Opens a device, or a pipe that a reader opens within `longest`; else -1 with ENXIO in errno.
int OpenForReader(const std::string& path, absl::Duration longest) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  int file = -1;
  while ((file = ::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NONBLOCK)) < 0) {
    if (errno != ENXIO || absl::FromChrono(Clock::now() - begin) > longest) return -1;
    absl::SleepFor(absl::Milliseconds(5));
  }
  ::fcntl(file, F_SETFL, ::fcntl(file, F_GETFL) & ~O_NONBLOCK);
  return file;
}

constexpr char kFaultPayload[] = "moe/file-fault";
constexpr absl::string_view kFaults[] = {"none", "content", "read", "write"};  // by FileFault

}  // namespace

absl::Status WithFileFault(absl::Status status, FileFault fault) {
  if (!status.ok() && fault != FileFault::kNone) {
    status.SetPayload(kFaultPayload, absl::Cord(kFaults[static_cast<int>(fault)]));
  }
  return status;
}

FileFault FileFaultOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kFaultPayload);
  if (!payload.has_value()) return FileFault::kNone;
  return static_cast<FileFault>(std::find(std::begin(kFaults), std::end(kFaults), *payload) -
                                std::begin(kFaults));
}

absl::Status FileError(absl::string_view what, const std::string& path, int error,
                       FileFault fault) {
  const std::string said = absl::StrCat("cannot ", what, " '", path, "': ", std::strerror(error));
  const bool reads = fault == FileFault::kRead;
  switch (error) {
    case ENOMEM:
      return absl::ResourceExhaustedError(said);
    case EACCES:
    case EPERM:
      return reads ? absl::PermissionDeniedError(said)
                   : WithFileFault(absl::PermissionDeniedError(said), fault);
    case ENOENT:
    case ENOTDIR:
      if (reads) return absl::NotFoundError(said);
      break;
    case EISDIR:
    case ELOOP:
    case ENAMETOOLONG:
    case ENXIO:  // a socket
      if (reads) return absl::InvalidArgumentError(said);
      break;
    default:
      break;
  }
  return WithFileFault(absl::UnavailableError(said), fault);
}

absl::StatusOr<bool> IsFolder(const std::string& path) {
  struct stat info = {};
  if (::stat(path.c_str(), &info) == 0) return S_ISDIR(info.st_mode);
  const absl::Status error = ReadError("look at", path, errno);
  if (absl::IsNotFound(error)) return false;
  return error;
}

absl::Status Prefixed(absl::string_view what, const absl::Status& status) {
  absl::Status prefixed(status.code(), absl::StrCat(what, ": ", status.message()));
  status.ForEachPayload([&](absl::string_view type, const absl::Cord& payload) {
    prefixed.SetPayload(type, payload);
  });
  return prefixed;
}

absl::StatusOr<MappedFile> MappedFile::Open(const std::string& path) {
  // Without O_NONBLOCK open would block on a pipe without a writer.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.is_open()) return ReadError("open", path, errno);
  struct stat info = {};
  if (::fstat(file.number(), &info) != 0) return ReadError("look at", path, errno);
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", path, "' is a ", S_ISDIR(info.st_mode) ? "folder" : "device or pipe",
                     ", expected a file"));
  }
  MappedFile mapped;
  if (info.st_size == 0) return mapped;  // mmap refuses a length of 0
  const auto size = static_cast<size_t>(info.st_size);
  void* const at = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.number(), 0);
  if (at == MAP_FAILED) return ReadError("map", path, errno);
  mapped.bytes_ = {static_cast<const uint8_t*>(at), size};
  return mapped;
}

absl::StatusOr<uint64_t> FileIdentity(const std::string& path) {
  struct stat info = {};
  if (::stat(path.c_str(), &info) != 0) return ReadError("look at", path, errno);
  const int64_t facts[] = {static_cast<int64_t>(info.st_dev),
                           static_cast<int64_t>(info.st_ino),
                           info.st_size,
                           info.st_mtim.tv_sec,
                           info.st_mtim.tv_nsec,
                           info.st_ctim.tv_sec,
                           info.st_ctim.tv_nsec};
  return Xxh3(facts, sizeof(facts));
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<uint8_t*>(bytes_.data()), bytes_.size());
}

WholeFile& WholeFile::operator=(WholeFile&& other) noexcept {
  std::swap(files_, other.files_);
  std::swap(path_, other.path_);
  std::swap(temporary_, other.temporary_);
  std::swap(file_, other.file_);
  return *this;
}

absl::StatusOr<WholeFile> WholeFile::Create(const std::string& path, absl::Duration reader_time,
                                            FileSystem& files) {
  struct stat info = {};
  const bool exists = ::stat(path.c_str(), &info) == 0;
  if (exists && S_ISDIR(info.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot write '", path, "': it is a folder, expected a file"));
  }
  WholeFile whole(files);
  whole.path_ = path;
  int error = 0;
  if (exists && !S_ISREG(info.st_mode)) {
    whole.file_ = OpenForReader(path, reader_time);
    error = errno;
  } else {
    std::string name = TemporaryName(path);
    error = files.Create(name, whole.file_).value();
    if (error == 0) whole.temporary_ = std::move(name);
  }
  if (whole.file_ >= 0) return whole;
  if (error == ENXIO && S_ISFIFO(info.st_mode)) {
    return WithFileFault(absl::UnavailableError(absl::StrCat(
                             "cannot write '", path, "': it is a pipe, and nobody reads it")),
                         FileFault::kWrite);
  }
  if (error == ENOENT || error == ENOTDIR) {
    return absl::NotFoundError(absl::StrCat("cannot write '", path, "': its folder is not there"));
  }
  return WriteError(path, error);
}

absl::Status WholeFile::Append(absl::Span<const uint8_t> bytes) {
  const std::error_code error = WriteAll(file_, bytes, *files_);
  return error ? WriteError(path_, error.value()) : absl::OkStatus();
}

absl::Status WholeFile::Append(absl::string_view text) {
  return Append(absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(text.data()), text.size()));
}

absl::Status WholeFile::Commit(PageCache cache) {
  // A device or pipe has nothing to flush, and returns EINVAL.
  if (!temporary_.empty()) {
    const std::error_code error = files_->Flush(file_, cache);
    if (error) return WriteError(path_, error.value());
  }
  const int file = std::exchange(file_, -1);
  if (const std::error_code error = files_->Close(file)) return WriteError(path_, error.value());
  if (temporary_.empty()) return absl::OkStatus();
  if (const std::error_code error = files_->Rename(temporary_, path_)) {
    return WriteError(path_, error.value());
  }
  temporary_.clear();
  // The name is on the disk once its folder is flushed. If that fails, the file is complete all the
  // same, so that it is no reason to fail.
  (void)files_->FlushFolder(FolderOf(path_));
  return absl::OkStatus();
}

void WholeFile::Discard() {
  if (file_ >= 0) (void)files_->Close(std::exchange(file_, -1));
  if (!temporary_.empty()) (void)files_->Unlink(temporary_);
  temporary_.clear();
}

absl::Status WriteText(const std::string& path, absl::string_view text, FileSystem& files) {
  MOE_ASSIGN_OR_RETURN(WholeFile file, WholeFile::Create(path, absl::InfiniteDuration(), files));
  MOE_RETURN_IF_ERROR(file.Append(text));
  return file.Commit();
}

}  // namespace moe
