#include "comm/nccl/nccl_join.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/time/clock.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "comm/descriptor.h"
#include "comm/nccl/nccl_announcement.h"
#include "comm/patience.h"
#include "comm/wait_report.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

constexpr absl::Duration kNap = absl::Milliseconds(5);
constexpr absl::string_view kMagic = "moe-nccl-id-1\n";
constexpr size_t kLongestToken = 256;

absl::Status SystemError(absl::string_view what, const std::string& path) {
  return absl::UnavailableError(
      absl::StrCat("JoinNcclByFile: ", what, " ", path, ": ", std::strerror(errno)));
}

std::string ContentOf(const NcclId& id, const std::string& token) {
  return absl::StrCat(kMagic, absl::string_view(id.data(), id.size()), token);
}

// The id in the file; nullopt while there is none of this run. *other: there is one of another run.
absl::StatusOr<std::optional<NcclId>> Read(const NcclIdFile& file, bool* other) {
  // Not blocked by a pipe, nor led elsewhere by a link.
  const Descriptor in(open(file.path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (in.number() < 0 && errno == ENOENT) return std::nullopt;
  const auto refused = [&](absl::string_view why) {
    return absl::PermissionDeniedError(
        absl::StrCat("JoinNcclByFile: ", file.path, " ", why,
                     ", expected a plain file of this user, mode 0600"));
  };
  if (in.number() < 0 && errno == ELOOP) return refused("is a symbolic link");
  if (in.number() < 0) return SystemError("cannot open", file.path);
  struct stat about = {};
  if (fstat(in.number(), &about) != 0) return SystemError("cannot examine", file.path);
  if (!S_ISREG(about.st_mode)) return refused("is no plain file");
  if (about.st_uid != geteuid()) return refused("belongs to another user");
  if ((about.st_mode & 077) != 0) return refused("may be used by others");
  NcclId id;
  char content[kMagic.size() + sizeof(id) + kLongestToken + 1];
  const ssize_t bytes = read(in.number(), content, sizeof(content));
  if (bytes < 0) return SystemError("cannot read", file.path);
  const absl::string_view text(content, static_cast<size_t>(bytes));
  *other = text.size() < kMagic.size() + id.size() || text.substr(0, kMagic.size()) != kMagic ||
           text.substr(kMagic.size() + id.size()) != file.run_token;
  if (*other) return std::nullopt;
  std::copy_n(content + kMagic.size(), id.size(), id.data());
  return id;
}

absl::Status TakenError(const NcclIdFile& file) {
  return absl::AlreadyExistsError(absl::StrCat("JoinNcclByFile: ", file.path,
                                               " is there already with this run's token: give "
                                               "every run a token of its own"));
}

// In one step for readers: they see no file, or all of it.
absl::Status Write(const NcclIdFile& file, const NcclId& id) {
  const std::string draft = absl::StrCat(file.path, ".", getpid());
  {
    const Descriptor out(
        open(draft.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (out.number() < 0) return SystemError("cannot create", draft);
    const std::string content = ContentOf(id, file.run_token);
    if (write(out.number(), content.data(), content.size()) !=
        static_cast<ssize_t>(content.size())) {
      const absl::Status status = SystemError("cannot write", draft);
      unlink(draft.c_str());
      return status;
    }
  }
  absl::Status status;  // unlike a renaming, a link replaces nothing
  if (link(draft.c_str(), file.path.c_str()) != 0) {
    status = errno == EEXIST ? TakenError(file) : SystemError("cannot link to", file.path);
  }
  unlink(draft.c_str());
  return status;
}

absl::StatusOr<NcclId> WaitForId(const NcclRankOptions& options, const NcclIdFile& file) {
  const absl::Duration timeout = options.join_timeout.value_or(options.timeout);
  Patience patience(timeout);
  bool other = false;
  while (true) {
    MOE_ASSIGN_OR_RETURN(const std::optional<NcclId> id, Read(file, &other));
    if (id.has_value()) return *id;
    if (!patience.IsOver(false)) {
      absl::SleepFor(kNap);
      continue;
    }
    const absl::Status late =
        LateError(DescribePlace(options.rank, "joining NCCL", {}), {0}, patience.waited(), timeout);
    return absl::DeadlineExceededError(
        absl::StrCat(late.message(), ": ", file.path,
                     other ? " is of another run: remove it, or give all ranks the same run token"
                           : " did not appear"));
  }
}

absl::StatusOr<NcclId> WriteId(const NcclIdFile& file) {
  bool other = false;
  MOE_ASSIGN_OR_RETURN(const std::optional<NcclId> present, Read(file, &other));
  if (present.has_value()) return TakenError(file);
  MOE_ASSIGN_OR_RETURN(const NcclId id, MakeNcclId());
  if (other) unlink(file.path.c_str());  // what another run has left
  MOE_RETURN_IF_ERROR(Write(file, id));
  return id;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> JoinNcclOver(Communicator& meeting,
                                                           NcclRankOptions options) {
  NcclAnnouncement said;
  if (meeting.rank() == 0) said = Announce(MakeNcclId());
  const auto stream = MakeInlineStream();
  MOE_RETURN_IF_ERROR(
      meeting.Broadcast<uint8_t>({reinterpret_cast<uint8_t*>(&said), sizeof(said)}, 0, *stream));
  MOE_RETURN_IF_ERROR(stream->Synchronize());
  MOE_ASSIGN_OR_RETURN(options.id, IdOf(said));
  options.rank = meeting.rank();
  options.size = meeting.size();
  return MakeNcclCommunicator(options);
}

absl::StatusOr<std::unique_ptr<Communicator>> JoinNcclByFile(NcclRankOptions options,
                                                             const NcclIdFile& file) {
  if (file.path.empty() || file.run_token.empty() || file.run_token.size() > kLongestToken) {
    return absl::InvalidArgumentError(absl::StrCat("JoinNcclByFile: path '", file.path,
                                                   "' and a run token of ", file.run_token.size(),
                                                   " bytes, expected a path and 1 to 256 bytes"));
  }
  // Before anybody waits for a file that nobody can write.
  MOE_RETURN_IF_ERROR(NcclVersion().status());
  if (options.rank < 0 || options.rank >= options.size) return MakeNcclCommunicator(options);
  MOE_ASSIGN_OR_RETURN(options.id, options.rank == 0 ? WriteId(file) : WaitForId(options, file));
  auto joined = MakeNcclCommunicator(options);
  if (options.rank == 0) {
    // All have read it, or it is of no use any more; unless a later run has put its own there.
    bool other = false;
    const auto present = Read(file, &other);
    if (present.ok() && present->has_value() && **present == options.id) {
      unlink(file.path.c_str());
    }
  }
  return joined;
}

}  // namespace moe
