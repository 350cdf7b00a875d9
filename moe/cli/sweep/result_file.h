// The file of a sweep: JSON lines, one for each row, appended as points end.
#ifndef MOE_MOE_CLI_SWEEP_RESULT_FILE_H_
#define MOE_MOE_CLI_SWEEP_RESULT_FILE_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include "comm/descriptor.h"
#include "moe/cli/measure/sweep_row.h"

namespace moe::sweep {

// Rows are complete in the file or, after a crash, the last line may lack its end; the next opening
// removes it. At most the current point is lost. One sweep at a time locks the file. Move-only.
class ResultFile {
 public:
  struct Line {
    int64_t number = 0;  // from 1
    SweepRow row;
  };

  // A new file, or an existing empty one. A device or pipe is written to. kAlreadyExists: the file
  // is not empty. Other errors as Continue.
  static absl::StatusOr<ResultFile> Create(const std::string& path);
  // An existing file. kNotFound: it does not exist. kInvalidArgument: a folder. kDataLoss "<path>:
  // line N: <reason>". kFailedPrecondition: another sweep writes it. kUnavailable: the system
  // failed.
  static absl::StatusOr<ResultFile> Continue(const std::string& path);

  // The lines of the file when it was opened, in order.
  const std::vector<Line>& lines() const { return lines_; }
  // Appends in one write; a partial write is undone. kUnavailable.
  absl::Status Append(const SweepRow& row);
  const std::string& path() const { return path_; }

 private:
  ResultFile() = default;
  static absl::StatusOr<ResultFile> Open(const std::string& path, int flags);
  absl::Status ReadLines();

  std::string path_;
  Descriptor file_;
  bool regular_ = true;
  int64_t size_bytes_ = 0;  // size of complete lines
  std::vector<Line> lines_;
};

}  // namespace moe::sweep

#endif  // MOE_MOE_CLI_SWEEP_RESULT_FILE_H_
