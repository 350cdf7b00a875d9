#include "moe/io/file_work.h"

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <new>
#include <system_error>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/caught.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

// The process may be exiting, so the wait is no longer than a call to a working disk takes.
constexpr absl::Duration kLeaveTime = absl::Milliseconds(500);

absl::Duration BetweenLines(absl::Duration deadline) {
  return std::min(absl::Minutes(1), deadline / 2);
}

}  // namespace

struct FileWork::State {
  mutable std::mutex mu;
  mutable std::condition_variable changed;
  bool ended = false;     // guarded by mu, like all that follows
  bool left = false;      // the owner no longer waits
  bool in_call = false;   // a call has begun and not returned
  const char* call = "";  // the latest call
  std::string path;       // its path
  int64_t notes = 0;      // number of calls that began or returned
  absl::Status status;    // status of work that has ended

  // "fsync of 'a' has not returned".
  std::string Doing() const {
    if (in_call) return absl::StrCat(call, " of '", path, "' has not returned");
    if (notes == 0) return "no call to the file system";
    return absl::StrCat("no call to the file system after ", call, " of '", path, "'");
  }
};

// The calls of another file system, each recorded before and after.
class FileWork::NotedFiles final : public FileSystem {
 public:
  NotedFiles(FileSystem& files, State& state) : files_(files), state_(state) {}

  std::error_code Create(const std::string& path, int& file) override {
    const std::error_code error = Noted("open", path, [&] { return files_.Create(path, file); });
    if (!error) IfMemory([&] { paths_[file] = path; });
    return error;
  }
  std::error_code Write(int file, absl::Span<const uint8_t> bytes, size_t& written) override {
    written = 0;
    return Noted("write", PathOf(file), [&] { return files_.Write(file, bytes, written); });
  }
  std::error_code Flush(int file, PageCache cache) override {
    return Noted("fsync", PathOf(file), [&] { return files_.Flush(file, cache); });
  }
  std::error_code Close(int file) override {
    Note("close", PathOf(file), true);  // also for abandoned work, to release the descriptor
    const std::error_code error = files_.Close(file);
    Note("close", PathOf(file), false);
    paths_.erase(file);
    return error;
  }
  std::error_code Touch(int file) override {
    return Noted("futimens", PathOf(file), [&] { return files_.Touch(file); });
  }
  std::error_code Rename(const std::string& from, const std::string& to) override {
    return Noted("rename", from, [&] { return files_.Rename(from, to); });
  }
  std::error_code Unlink(const std::string& path) override {
    return Noted("unlink", path, [&] { return files_.Unlink(path); });
  }
  std::error_code MakeFolder(const std::string& path) override {
    return Noted("mkdir", path, [&] { return files_.MakeFolder(path); });
  }
  std::error_code RemoveFolder(const std::string& path) override {
    return Noted("rmdir", path, [&] { return files_.RemoveFolder(path); });
  }
  std::error_code FlushFolder(const std::string& path) override {
    return Noted("fsync", path, [&] { return files_.FlushFolder(path); });
  }
  std::error_code Look(const std::string& path, FileKind& kind) override {
    return Noted("lstat", path, [&] { return files_.Look(path, kind); });
  }
  std::error_code List(const std::string& path, std::vector<std::string>& names) override {
    return Noted("readdir", path, [&] { return files_.List(path, names); });
  }
  std::error_code ReadSmall(const std::string& path, SmallFile& file) override {
    return Noted("read", path, [&] { return files_.ReadSmall(path, file); });
  }
  std::error_code FreeBytes(const std::string& path, int64_t& bytes) override {
    return Noted("statvfs", path, [&] { return files_.FreeBytes(path, bytes); });
  }

 private:
  // Paths are for messages alone, and destructors close files: a path is left out if there is no
  // memory for it.
  template <typename Run>
  static void IfMemory(const Run& run) noexcept {
    try {
      run();
    } catch (const std::bad_alloc&) {
    }
  }

  const std::string& PathOf(int file) const {
    static const auto* const unknown = new std::string("?");
    const auto found = paths_.find(file);
    return found == paths_.end() ? *unknown : found->second;
  }

  // Records a call. Returns whether the owner still waits.
  bool Note(const char* call, const std::string& path, bool begins) {
    const std::lock_guard lock(state_.mu);
    state_.call = call;
    state_.path.clear();
    IfMemory([&] { state_.path = path; });
    state_.in_call = begins;
    ++state_.notes;
    return !state_.left;
  }

  template <typename Call>
  std::error_code Noted(const char* name, const std::string& path, const Call& call) {
    if (!Note(name, path, true)) return {ECANCELED, std::generic_category()};
    const std::error_code error = call();
    Note(name, path, false);
    return error;
  }

  FileSystem& files_;
  State& state_;
  std::map<int, std::string> paths_;  // paths of descriptors
};

FileWork::FileWork(Options options)
    : options_(std::move(options)),
      state_(std::make_shared<State>()),
      patience_(options_.deadline),
      next_line_(BetweenLines(options_.deadline)) {}

absl::StatusOr<std::unique_ptr<FileWork>> FileWork::Start(Options options, Work work) {
  return Caught([&]() -> absl::StatusOr<std::unique_ptr<FileWork>> {
    auto started = std::unique_ptr<FileWork>(new FileWork(std::move(options)));
    started->thread_ = std::thread(
        [state = started->state_, files = started->options_.files, work = std::move(work)]() {
          absl::Status status = Caught([&] {
            NotedFiles noted(*files, *state);
            return work(noted);
          });
          const std::lock_guard lock(state->mu);
          state->status = std::move(status);
          state->ended = true;
          state->changed.notify_all();
        });
    return started;
  });
}

absl::Status FileWork::Run(Options options, Work work) {
  MOE_ASSIGN_OR_RETURN(const auto started, Start(std::move(options), std::move(work)));
  while (!started->AwaitFor(started->patience_.step())) {
    MOE_RETURN_IF_ERROR(started->Check());
  }
  return started->status();
}

FileWork::~FileWork() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(state_->mu);
    state_->left = true;
  }
  if (AwaitFor(kLeaveTime)) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

bool FileWork::AwaitFor(absl::Duration longest) const {
  std::unique_lock lock(state_->mu);
  return state_->changed.wait_until(lock, SteadyIn(longest), [this] { return state_->ended; });
}

absl::Status FileWork::status() const {
  const std::lock_guard lock(state_->mu);
  return state_->status;
}

absl::Status FileWork::Check() {
  const std::lock_guard lock(state_->mu);
  if (state_->ended) return absl::OkStatus();
  const bool progressed = std::exchange(seen_, state_->notes) != state_->notes;
  const bool over = patience_.IsOver(progressed);
  const absl::Duration waited = patience_.waited();
  const auto line = [&](absl::string_view end) {
    return absl::StrCat(options_.who, ": ", state_->Doing(), " for ",
                        absl::FormatDuration(absl::Trunc(waited, absl::Milliseconds(100))), end);
  };
  if (over) {
    return absl::DeadlineExceededError(
        line(absl::StrCat(", deadline ", absl::FormatDuration(options_.deadline))));
  }
  const absl::Duration between = BetweenLines(options_.deadline);
  if (waited < between) next_line_ = between;
  if (waited < next_line_) return absl::OkStatus();
  next_line_ += between;
  Log(LogLevel::kWarning, line(""));
  return absl::OkStatus();
}

}  // namespace moe
