#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "comm/descriptor.h"
#include "comm/mpi/mpi_group.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

constexpr char kName[] = "AllocatePeerBuffer";

// A mapping of a whole file, or of nothing.
class Mapping {
 public:
  Mapping() = default;
  // flags: besides MAP_SHARED.
  Mapping(const Descriptor& file, size_t bytes, int protection, int flags)
      : bytes_(bytes),
        data_(::mmap(nullptr, bytes, protection, MAP_SHARED | flags, file.number(), 0)) {
    if (data_ == MAP_FAILED) data_ = nullptr;
  }
  Mapping(Mapping&& other) noexcept
      : bytes_(other.bytes_), data_(std::exchange(other.data_, nullptr)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~Mapping() {
    if (data_ != nullptr) ::munmap(data_, bytes_);
  }
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  size_t bytes_ = 0;
  void* data_ = nullptr;
};

class MpiPeerBuffer final : public PeerBuffer {
 public:
  MpiPeerBuffer(Mapping own, int64_t bytes, std::vector<Mapping> peers)
      : own_(std::move(own)), bytes_(bytes), peers_(std::move(peers)) {}

  absl::Span<std::byte> local() const override {
    return {own_.data(), static_cast<size_t>(bytes_)};
  }
  const std::byte* peer(int r) const override {
    return peers_[r].data() == nullptr ? own_.data() : peers_[r].data();
  }

 private:
  const Mapping own_;
  const int64_t bytes_;
  const std::vector<Mapping> peers_;  // [R], none for this rank
};

// What a rank passes to the others about its file. Device and inode distinguish it from the file of
// another process, where process ids have another meaning.
struct Offer {
  int64_t bytes = 0;  // bytes of the file
  int64_t process = 0, descriptor = -1;
  uint64_t device = 0, inode = 0;
  int64_t error = 0;  // an errno: there is no file
};

// Allocates `bytes` for the file: 0, or an errno. A file that was only made longer has no memory,
// and an access to a page that the system cannot provide raises SIGBUS. More than the machine's
// memory is not tried: the system would end processes to find it.
int Fill(const Descriptor& file, int64_t bytes) {
  const int64_t pages = ::sysconf(_SC_PHYS_PAGES), page_bytes = ::sysconf(_SC_PAGESIZE);
  if (bytes / page_bytes >= pages) return ENOMEM;
  int error = 0;
  do {
    error = ::posix_fallocate(file.number(), 0, bytes);
  } while (error == EINTR);
  return error;
}

// The file of this rank, at least a byte long, zeros until they are written; its errno in
// `offer.error`.
Mapping Make(const Descriptor& file, Offer& offer) {
  struct stat about = {};
  Mapping own;
  if (file.number() >= 0) errno = Fill(file, offer.bytes);
  if (errno == 0 && ::fstat(file.number(), &about) == 0) {
    // Zeroed now, and not page by page in the first step.
    own = Mapping(file, static_cast<size_t>(offer.bytes), PROT_READ | PROT_WRITE, MAP_POPULATE);
  }
  offer.error = own.data() == nullptr ? errno : 0;
  offer.process = ::getpid();
  offer.descriptor = file.number();
  offer.device = about.st_dev;
  offer.inode = about.st_ino;
  return own;
}

// A peer's file; nothing, with errno set, if this process cannot see it.
Mapping Open(const Offer& offer) {
  const std::string path = absl::StrCat("/proc/", offer.process, "/fd/", offer.descriptor);
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat about = {};
  if (file.number() < 0 || ::fstat(file.number(), &about) != 0) return {};
  if (about.st_dev != offer.device || about.st_ino != offer.inode) {
    errno = ESRCH;
    return {};
  }
  return {file, static_cast<size_t>(offer.bytes), PROT_READ, 0};
}

}  // namespace

absl::StatusOr<std::shared_ptr<PeerBuffer>> AllocateMpiPeerBuffer(MpiLane& host, int64_t bytes,
                                                                  const Site& site) {
  const std::vector<int>& world_ranks = host.world_ranks();
  errno = 0;
  const Descriptor file(::memfd_create("moe-peer-memory", MFD_CLOEXEC));
  Offer mine = {.bytes = std::max<int64_t>(bytes, 1)};
  Mapping own = Make(file, mine);
  std::vector<Offer> offers(host.size());
  const MpiCall call = {kName, kPeerMemory, site};
  MOE_RETURN_IF_ERROR(host.Gather(call, &mine, offers.data(), sizeof(Offer)));
  for (int r = 0; r < host.size(); ++r) {
    if (offers[r].error == 0) continue;
    return absl::ResourceExhaustedError(absl::StrCat(
        kName, ": rank ", world_ranks[r], " has no ", offers[r].bytes,
        " bytes: ", absl::ErrnoToStatus(static_cast<int>(offers[r].error), "").ToString()));
  }

  struct Result {
    int64_t peer = -1, error = 0;  // whose memory this rank cannot map
  };
  Result result;
  std::vector<Mapping> peers(host.size());
  for (int r = 0; r < host.size() && result.peer < 0; ++r) {
    if (r == host.rank()) continue;
    peers[r] = Open(offers[r]);
    if (peers[r].data() == nullptr) result = {.peer = r, .error = errno};
  }
  // Also keeps every file open until all have it.
  std::vector<Result> results(host.size());
  MOE_RETURN_IF_ERROR(host.Gather(call, &result, results.data(), sizeof(Result)));
  for (int r = 0; r < host.size(); ++r) {
    if (results[r].peer < 0) continue;
    return absl::UnimplementedError(
        absl::StrCat(kName, ": rank ", world_ranks[r], " cannot map the memory of rank ",
                     world_ranks[results[r].peer], ": ",
                     absl::ErrnoToStatus(static_cast<int>(results[r].error), "").ToString()));
  }
  return std::make_shared<MpiPeerBuffer>(std::move(own), bytes, std::move(peers));
}

}  // namespace moe
