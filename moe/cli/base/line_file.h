// Files of lines or records that grow while a command runs.
#ifndef MOE_MOE_CLI_BASE_LINE_FILE_H_
#define MOE_MOE_CLI_BASE_LINE_FILE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

namespace moe::cli {

// What to do with files of an earlier run in a folder.
enum class EarlierRun : uint8_t { kRefused, kContinued };

// Creates the folder of `flag` and those above it; `made` lists those created, innermost first.
// kInvalidArgument: it is a file. Else errors of FileError (moe/io/file.h), kWrite.
absl::Status MakeFolder(absl::string_view flag, const std::string& folder,
                        std::vector<std::string>& made);

// Appends `text` behind the first `size_bytes` of an open file, which then count it, too; what a
// write that fails halfway leaves is cut off. A device or pipe has no length to cut. Errors of
// FileError (moe/io/file.h), kWrite.
absl::Status AppendWhole(int file, const std::string& path, absl::string_view text,
                         int64_t& size_bytes);

// Appended lines are in the file whole or not at all: they are one write, cut back if it fails
// halfway. So a reader, also after a crash, sees whole lines.
class LineFile {
 public:
  // Creates the file if needed; content of an earlier run stays until the first Append. `made`:
  // folders that were created for the file, innermost first. The file is locked while this object
  // lives: kInvalidArgument if another run holds the lock. Other errors are those of FileError
  // (moe/io/file.h), kWrite, also for a pipe that nobody reads.
  static absl::StatusOr<std::unique_ptr<LineFile>> Create(const std::string& path,
                                                          std::vector<std::string> made = {});
  // Removes the file and the folders that were created for it if nothing was written.
  ~LineFile();
  LineFile(const LineFile&) = delete;
  LineFile& operator=(const LineFile&) = delete;

  // Whole lines, each with its end, or records. Errors of FileError, kWrite; a file that was
  // deleted is one.
  absl::Status Append(absl::string_view lines);
  const std::string& path() const { return path_; }
  bool replaces() const { return replaces_; }  // the file was not empty

 private:
  LineFile(std::string path, std::vector<std::string> made, int file)
      : path_(std::move(path)), made_(std::move(made)), file_(file) {}
  absl::Status Lock();

  const std::string path_;
  std::vector<std::string> made_;  // innermost first
  const int file_;
  bool replaces_ = false;
  int64_t size_bytes_ = 0;
};

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_LINE_FILE_H_
