#include "moe/io/scratch_file.h"

#include <cerrno>
#include <cstdlib>

#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/base/status_macros.h"
#include "moe/io/file.h"

namespace moe {
namespace {

class MappedScratch final : public MemoryResource {
 public:
  MappedScratch(std::string folder, std::string name)
      : folder_(std::move(folder)), name_(std::move(name)) {}

  Device device() const override { return {}; }

  absl::StatusOr<std::byte*> Allocate(int64_t bytes) override {
    const absl::StatusOr<ScratchFile> file = ScratchFile::Create(folder_, name_, bytes);
    if (!file.ok()) return absl::ResourceExhaustedError(file.status().message());
    absl::StatusOr<std::byte*> mapped = file->Map(bytes);
    if (!mapped.ok()) return absl::ResourceExhaustedError(mapped.status().message());
    return mapped;
  }

  void Free(std::byte* data, int64_t bytes) override { ::munmap(data, static_cast<size_t>(bytes)); }

 private:
  const std::string folder_, name_;
};

}  // namespace

absl::StatusOr<ScratchFile> ScratchFile::Create(const std::string& folder, absl::string_view name,
                                                int64_t bytes) {
  MOE_ASSIGN_OR_RETURN(const bool exists, IsFolder(folder));
  if (!exists) {
    return absl::NotFoundError(
        absl::StrCat("there is no folder '", folder, "', expected one for scratch files"));
  }
  std::string path = absl::StrCat(folder, "/", name, "-XXXXXX");
  Descriptor open(::mkostemp(path.data(), O_CLOEXEC));
  if (!open.is_open()) return FileError("create", path, errno, FileFault::kWrite);
  ::unlink(path.c_str());
  ScratchFile file(std::move(path), std::move(open));
  const int error = ::posix_fallocate(file.number(), 0, bytes);
  if (error != 0) {
    return FileError(absl::StrCat("reserve ", bytes, " bytes for"), file.path_, error,
                     FileFault::kWrite);
  }
  // Not while the system fills the file itself, where the file system cannot reserve.
  const int flags = ::fcntl(file.number(), F_GETFL);
  file.direct_ = ::fcntl(file.number(), F_SETFL, flags | O_DIRECT) == 0;
  return file;
}

void ScratchFile::Drop(int64_t offset, size_t bytes) const {
  if (direct_) return;
  ::posix_fadvise(number(), offset, static_cast<off_t>(bytes), POSIX_FADV_DONTNEED);
}

absl::Status ScratchFile::Read(int64_t offset, absl::Span<std::byte> bytes) const {
  for (size_t done = 0; done < bytes.size();) {
    const int64_t at = offset + static_cast<int64_t>(done);
    const ssize_t n = ::pread(number(), bytes.data() + done, bytes.size() - done, at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return FileError("read", path_, errno, FileFault::kRead);
    if (n == 0) {
      const std::string said =
          absl::StrCat("cannot read '", path_, "': it has no byte ", at, ", expected ",
                       offset + static_cast<int64_t>(bytes.size()));
      return WithFileFault(absl::UnavailableError(said), FileFault::kRead);
    }
    done += static_cast<size_t>(n);
  }
  Drop(offset, bytes.size());
  return absl::OkStatus();
}

absl::Status ScratchFile::Write(int64_t offset, absl::Span<const std::byte> bytes) const {
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t n = ::pwrite(number(), bytes.data() + done, bytes.size() - done,
                               offset + static_cast<int64_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return FileError("write", path_, n == 0 ? EIO : errno, FileFault::kWrite);
    done += static_cast<size_t>(n);
  }
  Drop(offset, bytes.size());
  return absl::OkStatus();
}

absl::StatusOr<std::byte*> ScratchFile::Map(int64_t bytes) const {
  void* const at =
      ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, number(), 0);
  if (at == MAP_FAILED) return FileError("map", path_, errno, FileFault::kRead);
  return static_cast<std::byte*>(at);
}

absl::Status ScratchFile::Flush() const {
  if (::fdatasync(number()) != 0) return FileError("write", path_, errno, FileFault::kWrite);
  ::posix_fadvise(number(), 0, 0, POSIX_FADV_DONTNEED);
  return absl::OkStatus();
}

std::shared_ptr<MemoryResource> ScratchMemory(std::string folder, std::string name) {
  return std::make_shared<MappedScratch>(std::move(folder), std::move(name));
}

}  // namespace moe
