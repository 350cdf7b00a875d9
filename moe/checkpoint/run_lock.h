// The lock of a run's folder: one run at a time, from any host, on any file system.
#ifndef MOE_MOE_CHECKPOINT_RUN_LOCK_H_
#define MOE_MOE_CHECKPOINT_RUN_LOCK_H_

#include <cstdint>
#include <memory>
#include <string>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/time/time.h>

#include "moe/io/file_system.h"
#include "moe/io/file_work.h"

namespace moe {

// Name of the lock in the folder: a line of JSON that identifies its holder.
inline constexpr char kLockName[] = "lock";

// A process, as others find out whether it still runs.
struct LockHolder {
  std::string run;            // 16 hexadecimal digits, of this run alone
  std::string host;           // its name, for people
  int64_t host_id = 0;        // HostId: the same boot of the same machine
  std::string pid_namespace;  // "pid:[4026531836]"; empty: the system does not say
  int64_t pid = 0;
  int64_t process_start = 0;  // clock ticks since boot, which no later process of this pid has
  std::string since;          // UTC, "2026-11-25T07:10:00Z"
};
// This process, as a run of its own.
LockHolder ThisRun();
std::string LockText(const LockHolder& holder);
// kDataLoss: it is no text of LockText.
absl::StatusOr<LockHolder> ParseLock(const std::string& text);
// Whether the process runs, as far as this host can tell; kNone: it is of another host, container
// or user, or /proc does not say.
enum class Sign : uint8_t { kNone, kRuns, kEnded };
Sign SignOf(const LockHolder& holder);

// Held by one process, in a file made with O_EXCL, since many network file systems have no other
// locks. A holder of this boot and this pid namespace is known to have ended when its process is
// gone; of any other one, on another host or in another container, when it has not touched the file
// for kStaleBeats beats, which is watched here and so depends on no clock of another host.
class RunLock {
 public:
  static constexpr int kStaleBeats = 3;
  // `folder` is there by the first TryTake. `beat`: the time between touches. `files` is what is
  // touched and given up by, and lives on while a call may hang in it; the other calls are those of
  // whoever waits for them.
  RunLock(std::string folder, absl::Duration beat, FileSystem& files);
  // Gives up the lock if this holds it; on a disk that hangs it stays, as that of a process that
  // was killed.
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

  // true: the lock is held, and touched in the background until this object is destroyed; taking
  // over a lock logs a warning. false: its holder may have ended and is watched: call again soon.
  // kInvalidArgument: a run that is still alive holds it (named). kUnavailable, kPermissionDenied:
  // the system refuses.
  absl::StatusOr<bool> TryTake(FileSystem& files);

  // Before the folder changes: whether it is still this run's. A lock that is gone is made anew,
  // with a warning. kUnavailable: another run has taken it, as it may from a process that was
  // stopped for kStaleBeats beats; or errors of the system.
  absl::Status CheckHeld(FileSystem& files);

  const std::string& run() const { return me_.run; }

 private:
  absl::StatusOr<bool> JudgeHolder(FileSystem& files);
  std::error_code Make(FileSystem& files);

  // What is shared with the thread that touches the lock, which may hang in it and be left.
  struct Beats;

  const std::string path_;
  const absl::Duration beat_;
  FileSystem& files_;
  const LockHolder me_;
  SmallFile seen_;  // the lock of another, as it was when watching began
  absl::Time watched_since_ = absl::InfiniteFuture();
  bool held_ = false;
  const std::shared_ptr<Beats> beats_;
  std::unique_ptr<FileWork> beating_;  // last: starts after the state above exists
};

}  // namespace moe

#endif  // MOE_MOE_CHECKPOINT_RUN_LOCK_H_
