// Work on files that may hang, on a thread which whoever waits for it can leave.
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

// A disk or mount that does not answer holds a system call for ever, and nothing ends the thread
// that is in it. Each call of the work is noted, and progress is a call that begins or returns: so
// large files take their time, and one call that hangs is named. For one thread.
class FileWork {
 public:
  struct Options {
    std::string who;  // begins every message: "rank 1 on host a in Save (step 20)"
    absl::Duration deadline = absl::InfiniteDuration();  // without progress
    FileSystem* files = &RealFileSystem();               // lives on while a call may hang in it
  };
  // What is done with the calls of `files`. It owns what it refers to, since it may outlive the
  // FileWork; its exceptions become statuses (kernels/base/caught.h).
  using Work = std::function<absl::Status(FileSystem& files)>;

  // kResourceExhausted: there is no thread.
  static absl::StatusOr<std::unique_ptr<FileWork>> Start(Options options, Work work);
  // Start, and the status of the work or of Check, whichever comes first. Blocks.
  static absl::Status Run(Options options, Work work);
  // Gives the work up: all its further calls fail with ECANCELED. Waits half a second for the
  // one that is under way, then leaves the thread.
  ~FileWork();
  FileWork(const FileWork&) = delete;
  FileWork& operator=(const FileWork&) = delete;

  // Waits for the end of the work, `longest` at most; whether it has come.
  bool AwaitFor(absl::Duration longest) const;
  bool ended() const { return AwaitFor(absl::ZeroDuration()); }
  absl::Status status() const;  // of the work, once it has ended

  // kDeadlineExceeded "<who>: fsync of 'a' has not returned for 10m0s, deadline 10m0s" once nothing
  // has progressed for the deadline; looks that are rarer than half of it find nothing. Logs such a
  // line every minute before, and at half of a shorter deadline.
  absl::Status Check();

 private:
  struct State;  // what both threads see
  class NotedFiles;
  explicit FileWork(Options options);

  const Options options_;
  const std::shared_ptr<State> state_;  // shared: the thread may stay after this object
  Patience patience_;
  int64_t seen_ = 0;  // notes, at the last look
  absl::Duration next_line_;
  std::thread thread_;
};

}  // namespace moe

#endif  // MOE_MOE_IO_FILE_WORK_H_
