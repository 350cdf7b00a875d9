#include "tests/moe/checkpoint/faulty_files.h"

#include <cerrno>
#include <filesystem>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

namespace moe::testing {
namespace {

namespace fs = std::filesystem;

std::error_code Errno(int error) {
  return {error, std::generic_category()};
}

std::string FolderOf(const std::string& path) {
  return fs::path(path).parent_path().string();
}

// "a/b/" and "a/b" are one folder.
std::string Plain(const std::string& path) {
  return absl::EndsWith(path, "/") ? path.substr(0, path.size() - 1) : path;
}

// `path` after `from` was renamed to `to`.
std::string Renamed(const std::string& path, const std::string& from, const std::string& to) {
  if (path == from) return to;
  return absl::StartsWith(path, from + "/") ? to + path.substr(from.size()) : path;
}

}  // namespace

FaultyFiles::FaultyFiles(std::string graveyard, Fault fault, int64_t at_call, int error)
    : graveyard_(std::move(graveyard)), fault_(fault), at_call_(at_call), error_(error) {
  if (!graveyard_.empty()) fs::create_directories(graveyard_);
}

FaultyFiles::~FaultyFiles() {
  for (const auto& [file, written] : open_) {
    ::close(written.file);
    ::close(file);
  }
  for (const Written& written : closed_) ::close(written.file);
}

std::error_code FaultyFiles::Next(bool room) {
  ++calls_;
  if (fault_ == Fault::kError && calls_ == at_call_) return Errno(error_);
  if (fault_ == Fault::kStop && calls_ >= at_call_) return Errno(EIO);
  if (fault_ == Fault::kDiskFull && calls_ >= at_call_ && room) return Errno(ENOSPC);
  return {};
}

std::string FaultyFiles::Keep(const std::string& path) {
  if (graveyard_.empty() || !fs::is_regular_file(path)) return "";
  std::string kept = absl::StrCat(graveyard_, "/", kept_++);
  fs::create_hard_link(path, kept);
  return kept;
}

std::error_code FaultyFiles::Create(const std::string& path, int& file) {
  const std::lock_guard lock(mu_);
  file = -1;
  if (const auto error = Next(true)) return error;
  const auto error = RealFileSystem().Create(path, file);
  if (error) return error;
  changes_.push_back({.kind = Kind::kCreate, .path = path, .to = {}, .saved = {}});
  open_[file] = {.file = ::dup(file)};
  return {};
}

std::error_code FaultyFiles::Write(int file, absl::Span<const uint8_t> bytes, size_t& written) {
  const std::lock_guard lock(mu_);
  const auto error = Next(true);
  written = 0;
  if (fault_ == Fault::kShortWrite && calls_ == at_call_ + 1) return Errno(EINTR);
  const bool half = calls_ == at_call_ && fault_ != Fault::kNone && fault_ != Fault::kError;
  if (error && !half) return error;
  if (half && bytes.size() > 1) bytes = bytes.first(bytes.size() / 2);
  const auto done = RealFileSystem().Write(file, bytes, written);
  return error ? error : done;
}

std::error_code FaultyFiles::Flush(int file, PageCache) {
  const std::lock_guard lock(mu_);
  if (const auto error = Next(true)) return error;
  struct stat info = {};
  ::fstat(file, &info);
  open_.at(file).flushed_bytes = info.st_size;
  return {};
}

// A descriptor is gone also when close fails.
std::error_code FaultyFiles::Close(int file) {
  const std::lock_guard lock(mu_);
  const auto error = Next(false);
  closed_.push_back(open_.at(file));
  open_.erase(file);
  const auto closed = RealFileSystem().Close(file);
  return error ? error : closed;
}

std::error_code FaultyFiles::Rename(const std::string& from, const std::string& to) {
  const std::lock_guard lock(mu_);
  if (const auto error = Next(true)) return error;
  EXPECT_EQ(FolderOf(from), FolderOf(to)) << "a rename across folders needs two flushes";
  std::string saved = Keep(to);
  if (const auto error = RealFileSystem().Rename(from, to)) return error;
  changes_.push_back({.kind = Kind::kRename, .path = from, .to = to, .saved = std::move(saved)});
  return {};
}

std::error_code FaultyFiles::Unlink(const std::string& path) {
  const std::lock_guard lock(mu_);
  if (const auto error = Next(false)) return error;
  std::string saved = Keep(path);
  if (const auto error = RealFileSystem().Unlink(path)) return error;
  changes_.push_back({.kind = Kind::kUnlink, .path = path, .to = {}, .saved = std::move(saved)});
  return {};
}

std::error_code FaultyFiles::MakeFolder(const std::string& path) {
  const std::lock_guard lock(mu_);
  if (const auto error = Next(true)) return error;
  if (const auto error = RealFileSystem().MakeFolder(path)) return error;
  changes_.push_back({.kind = Kind::kMakeFolder, .path = Plain(path), .to = {}, .saved = {}});
  return {};
}

std::error_code FaultyFiles::RemoveFolder(const std::string& path) {
  const std::lock_guard lock(mu_);
  if (const auto error = Next(false)) return error;
  if (const auto error = RealFileSystem().RemoveFolder(path)) return error;
  changes_.push_back({.kind = Kind::kRemoveFolder, .path = Plain(path), .to = {}, .saved = {}});
  return {};
}

std::error_code FaultyFiles::FlushFolder(const std::string& path) {
  const std::lock_guard lock(mu_);
  if (const auto error = Next(true)) return error;
  for (Change& change : changes_) {
    if (FolderOf(change.path) == Plain(path)) change.flushed = true;
  }
  return {};
}

std::error_code FaultyFiles::List(const std::string& path, std::vector<std::string>& names) {
  const std::lock_guard lock(mu_);
  if (const auto error = Next(false)) return error;
  return RealFileSystem().List(path, names);
}

// What cannot be undone is in a folder that is gone for good.
void FaultyFiles::Undo(const Change& change) {
  std::error_code ignored;
  switch (change.kind) {
    case Kind::kCreate:
      fs::remove(change.path, ignored);
      break;
    case Kind::kRename:
      fs::rename(change.to, change.path, ignored);
      if (!change.saved.empty()) fs::create_hard_link(change.saved, change.to, ignored);
      break;
    case Kind::kUnlink:
      if (!change.saved.empty()) fs::create_hard_link(change.saved, change.path, ignored);
      break;
    case Kind::kMakeFolder:
      fs::remove_all(change.path, ignored);
      break;
    case Kind::kRemoveFolder:
      fs::create_directory(change.path, ignored);
      break;
  }
}

void FaultyFiles::PowerCut(Loss loss) {
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

}  // namespace moe::testing
