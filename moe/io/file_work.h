// File work that may hang, on a thread that its owner can abandon.
#ifndef MOE_MOE_IO_FILE_WORK_H_
#define MOE_MOE_IO_FILE_WORK_H_

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/time/time.h>

#include "comm/patience.h"
#include "moe/io/file_system.h"

namespace moe {

// A disk or mount that does not respond blocks a system call for ever, and nothing ends the thread
// that is in it. Each call of the work is recorded, and progress is a call that begins or returns:
// so large files may take their time, and a call that hangs is named. Used by one thread.
class FileWork {
 public:
  struct Options {
    std::string who;  // begins every message: "rank 1 on host a in Save (step 20)"
    absl::Duration deadline = absl::InfiniteDuration();  // without progress
    FileSystem* files = &RealFileSystem();  // must stay valid while a call may hang in it
  };
  // The work, which uses the calls of `files`. It owns everything it refers to, since it may
  // outlive the FileWork; its exceptions become statuses (kernels/base/caught.h).
  using Work = std::function<absl::Status(FileSystem& files)>;

  // kResourceExhausted: no thread could be started.
  static absl::StatusOr<std::unique_ptr<FileWork>> Start(Options options, Work work);
  // Start, then the status of the work or of Check, whichever comes first. Blocks.
  static absl::Status Run(Options options, Work work);
  // Abandons the work: all its further calls fail with ECANCELED. Waits half a second for the
  // current call, then detaches the thread.
  ~FileWork();
  FileWork(const FileWork&) = delete;
  FileWork& operator=(const FileWork&) = delete;

  // Waits at most `longest` for the end of the work; returns whether it has ended.
  bool AwaitFor(absl::Duration longest) const;
  bool ended() const { return AwaitFor(absl::ZeroDuration()); }
  absl::Status status() const;  // the work's result, once it has ended

  // kDeadlineExceeded "<who>: fsync of 'a' has not returned for 10m0s, deadline 10m0s" if there was
  // no progress for the deadline. Must be called at least twice in that time to detect it. Logs
  // such a line every minute before, and at half of a shorter deadline.
  absl::Status Check();

 private:
  struct State;  // shared by both threads
  class NotedFiles;
  explicit FileWork(Options options);

  const Options options_;
  const std::shared_ptr<State> state_;  // shared: the thread may outlive this object
  Patience patience_;
  int64_t seen_ = 0;  // value of `notes` at the last Check
  absl::Duration next_line_;
  std::thread thread_;
};

}  // namespace moe

#endif  // MOE_MOE_IO_FILE_WORK_H_
