// A file system that fails, or whose machine stops, at the call that a test names.
#ifndef MOE_TESTS_MOE_CHECKPOINT_FAULTY_FILES_H_
#define MOE_TESTS_MOE_CHECKPOINT_FAULTY_FILES_H_

#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "moe/io/file_system.h"

namespace moe::testing {

enum class Fault : uint8_t {
  kNone,
  kError,       // the call fails with `error` and does nothing
  kShortWrite,  // a Write takes half, the next one is interrupted, later ones succeed
  kDiskFull,    // a Write takes half; it and all that need room fail with ENOSPC from then on
  kStop,        // a Write takes half; from then on nothing happens any more
  kHang,        // the call does not return before Mend
};

// What a power cut takes with it, of what was not flushed.
enum class Loss : uint8_t { kNothing, kBytes, kBytesAndNames };

// Thread-safe. Flushes are noted, not done: with no fault it is a fast disk.
class FaultyFiles : public FileSystem {
 public:
  FaultyFiles() : FaultyFiles("", Fault::kNone, 0) {}
  // `graveyard` is a folder beside what is written, on the same disk: what PowerCut needs.
  FaultyFiles(std::string graveyard, Fault fault, int64_t at_call, int error = EIO)
      : graveyard_(std::move(graveyard)), fault_(fault), at_call_(at_call), error_(error) {
    if (!graveyard_.empty()) std::filesystem::create_directories(graveyard_);
  }
  ~FaultyFiles() override {
    for (const auto& [file, written] : open_) {
      ::close(written.file);
      ::close(file);
    }
    for (const Written& written : closed_) ::close(written.file);
  }

  int64_t calls() const {
    const std::lock_guard lock(mu_);
    return calls_;
  }
  bool reached() const { return calls() >= at_call_; }
  void Mend() {
    const std::lock_guard lock(mu_);
    fault_ = Fault::kNone;
    mended_.notify_all();
  }
  // The disk as a power cut leaves it; after the last call.
  void PowerCut(Loss loss) {
    const std::lock_guard lock(mu_);
    if (loss == Loss::kNothing) return;
    for (const auto& [file, written] : open_) {
      closed_.push_back({.file = ::dup(written.file), .flushed_bytes = written.flushed_bytes});
    }
    for (const Written& written : closed_) {
      EXPECT_EQ(::ftruncate(written.file, written.flushed_bytes), 0);
    }
    if (loss == Loss::kBytes) return;
    // Backwards. Folders that keep their later name hold what was written under the earlier one.
    std::vector<std::pair<std::string, std::string>> renamed;
    for (auto change = changes_.rbegin(); change != changes_.rend(); ++change) {
      Change now = *change;
      for (auto later = renamed.rbegin(); later != renamed.rend(); ++later) {
        now.path = Renamed(now.path, later->first, later->second);
        now.to = Renamed(now.to, later->first, later->second);
      }
      if (!change->flushed) {
        Undo(now);
      } else if (change->kind == Kind::kRename) {
        renamed.emplace_back(change->path, change->to);
      }
    }
  }

  std::error_code Create(const std::string& path, int& file) override {
    const std::lock_guard lock(mu_);
    file = -1;
    if (const auto error = Next(true)) return error;
    const auto error = RealFileSystem().Create(path, file);
    if (error) return error;
    changes_.push_back({.kind = Kind::kCreate, .path = path, .to = {}, .saved = {}});
    open_[file] = {.file = ::dup(file)};
    return {};
  }

  std::error_code Write(int file, absl::Span<const uint8_t> bytes, size_t& written) override {
    const std::lock_guard lock(mu_);
    const auto error = Next(true);
    written = 0;
    if (fault_ == Fault::kShortWrite && calls_ == at_call_ + 1) return Errno(EINTR);
    const bool half = calls_ == at_call_ && (fault_ == Fault::kShortWrite ||
                                             fault_ == Fault::kDiskFull || fault_ == Fault::kStop);
    if (error && !half) return error;
    if (half && bytes.size() > 1) bytes = bytes.first(bytes.size() / 2);
    const auto done = RealFileSystem().Write(file, bytes, written);
    return error ? error : done;
  }

  std::error_code Flush(int file, PageCache) override {
    const std::lock_guard lock(mu_);
    if (const auto error = Next(true)) return error;
    struct stat info = {};
    ::fstat(file, &info);
    open_.at(file).flushed_bytes = info.st_size;
    return {};
  }

  // A descriptor is gone also when close fails.
  std::error_code Close(int file) override {
    const std::lock_guard lock(mu_);
    const auto error = Next(false);
    closed_.push_back(open_.at(file));
    open_.erase(file);
    const auto closed = RealFileSystem().Close(file);
    return error ? error : closed;
  }

  std::error_code Touch(int file) override {
    const std::lock_guard lock(mu_);
    if (const auto error = Next(false)) return error;
    return RealFileSystem().Touch(file);
  }

  std::error_code Rename(const std::string& from, const std::string& to) override {
    const std::lock_guard lock(mu_);
    if (const auto error = Next(true)) return error;
    EXPECT_EQ(FolderOf(from), FolderOf(to)) << "a rename across folders needs two flushes";
    std::string saved = Keep(to);
    if (const auto error = RealFileSystem().Rename(from, to)) return error;
    changes_.push_back({.kind = Kind::kRename, .path = from, .to = to, .saved = std::move(saved)});
    return {};
  }

  std::error_code Unlink(const std::string& path) override {
    const std::lock_guard lock(mu_);
    if (const auto error = Next(false)) return error;
    std::string saved = Keep(path);
    if (const auto error = RealFileSystem().Unlink(path)) return error;
    changes_.push_back({.kind = Kind::kUnlink, .path = path, .to = {}, .saved = std::move(saved)});
    return {};
  }

  std::error_code MakeFolder(const std::string& path) override {
    const std::lock_guard lock(mu_);
    if (const auto error = Next(true)) return error;
    if (const auto error = RealFileSystem().MakeFolder(path)) return error;
    changes_.push_back({.kind = Kind::kMakeFolder, .path = Plain(path), .to = {}, .saved = {}});
    return {};
  }

  std::error_code RemoveFolder(const std::string& path) override {
    const std::lock_guard lock(mu_);
    if (const auto error = Next(false)) return error;
    if (const auto error = RealFileSystem().RemoveFolder(path)) return error;
    changes_.push_back({.kind = Kind::kRemoveFolder, .path = Plain(path), .to = {}, .saved = {}});
    return {};
  }

  std::error_code FlushFolder(const std::string& path) override {
    const std::lock_guard lock(mu_);
    if (const auto error = Next(true)) return error;
    for (Change& change : changes_) {
      if (FolderOf(change.path) == Plain(path)) change.flushed = true;
    }
    return {};
  }

  std::error_code Look(const std::string& path, FileKind& kind) override {
    const std::lock_guard lock(mu_);
    // A stop at a call that changes nothing is one at the next call.
    if (fault_ == Fault::kError) {
      if (const auto error = Next(false)) return error;
    }
    return RealFileSystem().Look(path, kind);
  }

  std::error_code List(const std::string& path, std::vector<std::string>& names) override {
    const std::lock_guard lock(mu_);
    if (const auto error = Next(false)) return error;
    return RealFileSystem().List(path, names);
  }

  // Reading is no call that changes something: it is not counted.
  std::error_code ReadSmall(const std::string& path, SmallFile& file) override {
    return RealFileSystem().ReadSmall(path, file);
  }
  std::error_code FreeBytes(const std::string&, int64_t& bytes) override {
    bytes = free_bytes;
    return {};
  }
  int64_t free_bytes = std::numeric_limits<int64_t>::max();

 private:
  enum class Kind : uint8_t { kCreate, kRename, kUnlink, kMakeFolder, kRemoveFolder };
  struct Change {
    Kind kind;
    std::string path;   // before the change
    std::string to;     // new path of a Rename
    std::string saved;  // link to the file that the change took away; empty: none
    bool flushed = false;
  };
  struct Written {
    int file;  // a descriptor of our own
    int64_t flushed_bytes = 0;
  };

  static std::error_code Errno(int error) { return {error, std::generic_category()}; }

  static std::string FolderOf(const std::string& path) {
    return std::filesystem::path(path).parent_path().string();
  }

  // "a/b/" and "a/b" are one folder.
  static std::string Plain(const std::string& path) {
    return absl::EndsWith(path, "/") ? path.substr(0, path.size() - 1) : path;
  }

  // `path` after `from` was renamed to `to`.
  static std::string Renamed(const std::string& path, const std::string& from,
                             const std::string& to) {
    if (path == from) return to;
    return absl::StartsWith(path, from + "/") ? to + path.substr(from.size()) : path;
  }

  // Counts a call, with mu_ held, and returns the error that it is to fail with. `room`: whether
  // the call needs room on the disk.
  std::error_code Next(bool room) {
    ++calls_;
    if (fault_ == Fault::kHang && calls_ == at_call_) {
      mended_.wait(mu_, [this] { return fault_ == Fault::kNone; });
    }
    if (fault_ == Fault::kError && calls_ == at_call_) return Errno(error_);
    if (fault_ == Fault::kStop && calls_ >= at_call_) return Errno(EIO);
    if (fault_ == Fault::kDiskFull && calls_ >= at_call_ && room) return Errno(ENOSPC);
    return {};
  }
  std::string Keep(const std::string& path) {
    if (graveyard_.empty() || !std::filesystem::is_regular_file(path)) return "";
    std::string kept = absl::StrCat(graveyard_, "/", kept_++);
    std::filesystem::create_hard_link(path, kept);
    return kept;
  }
  // What cannot be undone is in a folder that is gone for good.
  void Undo(const Change& change) {
    std::error_code ignored;
    switch (change.kind) {
      case Kind::kCreate:
        std::filesystem::remove(change.path, ignored);
        break;
      case Kind::kRename:
        std::filesystem::rename(change.to, change.path, ignored);
        if (!change.saved.empty())
          std::filesystem::create_hard_link(change.saved, change.to, ignored);
        break;
      case Kind::kUnlink:
        if (!change.saved.empty())
          std::filesystem::create_hard_link(change.saved, change.path, ignored);
        break;
      case Kind::kMakeFolder:
        std::filesystem::remove_all(change.path, ignored);
        break;
      case Kind::kRemoveFolder:
        std::filesystem::create_directory(change.path, ignored);
        break;
    }
  }

  mutable std::mutex mu_;
  std::condition_variable_any mended_;
  const std::string graveyard_;
  Fault fault_;
  const int64_t at_call_;
  const int error_;
  int64_t calls_ = 0;
  int64_t kept_ = 0;
  std::vector<Change> changes_;
  std::map<int, Written> open_;  // by descriptor
  std::vector<Written> closed_;
};

}  // namespace moe::testing

#endif  // MOE_TESTS_MOE_CHECKPOINT_FAULTY_FILES_H_
