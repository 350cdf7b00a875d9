// A folder whose mount is lost: from some call on its path is that of another folder.
#ifndef MOE_TESTS_MOE_CHECKPOINT_MOVED_FILES_H_
#define MOE_TESTS_MOE_CHECKPOINT_MOVED_FILES_H_

#include <atomic>
#include <cstdint>
#include <limits>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <absl/strings/match.h>

#include "moe/io/file_system.h"

namespace moe::testing {

// Thread-safe. Files that are open stay what they are, as with a mount that is detached.
class MovedFiles final : public FileSystem {
 public:
  // `folder` is `other` from call `at_call` on, counted from 1.
  MovedFiles(std::string folder, std::string other, int64_t at_call)
      : folder_(std::move(folder)), other_(std::move(other)), at_call_(at_call) {}
  bool reached() const { return calls_ >= at_call_; }
  void Return() { at_call_ = std::numeric_limits<int64_t>::max(); }

  std::error_code Create(const std::string& path, int& file) override {
    return real_.Create(Now(path), file);
  }
  std::error_code Write(int file, absl::Span<const uint8_t> bytes, size_t& written) override {
    return real_.Write(file, bytes, written);
  }
  std::error_code Flush(int, PageCache) override { return {}; }
  std::error_code Close(int file) override { return real_.Close(file); }
  std::error_code Touch(int file) override { return real_.Touch(file); }
  std::error_code Rename(const std::string& from, const std::string& to) override {
    const std::string now = Now(from);
    return real_.Rename(now, Mapped(to));
  }
  std::error_code Unlink(const std::string& path) override { return real_.Unlink(Now(path)); }
  std::error_code MakeFolder(const std::string& path) override {
    return real_.MakeFolder(Now(path));
  }
  std::error_code RemoveFolder(const std::string& path) override {
    return real_.RemoveFolder(Now(path));
  }
  std::error_code FlushFolder(const std::string& path) override {
    return real_.FlushFolder(Now(path));
  }
  std::error_code Look(const std::string& path, FileKind& kind) override {
    return real_.Look(Now(path), kind);
  }
  std::error_code List(const std::string& path, std::vector<std::string>& names) override {
    return real_.List(Now(path), names);
  }
  std::error_code ReadSmall(const std::string& path, SmallFile& file) override {
    return real_.ReadSmall(Now(path), file);
  }
  std::error_code FreeBytes(const std::string& path, int64_t& bytes) override {
    return real_.FreeBytes(Now(path), bytes);
  }

 private:
  std::string Now(const std::string& path) {
    ++calls_;
    return Mapped(path);
  }
  std::string Mapped(const std::string& path) const {
    if (!reached() || !absl::StartsWith(path, folder_)) return path;
    return other_ + path.substr(folder_.size());
  }

  FileSystem& real_ = RealFileSystem();
  const std::string folder_, other_;
  std::atomic<int64_t> at_call_;
  std::atomic<int64_t> calls_ = 0;
};

}  // namespace moe::testing

#endif  // MOE_TESTS_MOE_CHECKPOINT_MOVED_FILES_H_
