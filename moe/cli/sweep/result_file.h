// The file of a sweep: JSON lines, a row a line, appended as points end.
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

// Rows are in the file whole or, after a crash, as a last line without its end, which the next
// opening cuts off: at most the point in flight is lost. Held by one sweep at a time. Move-only.
class ResultFile {
 public:
  struct Line {
    int64_t number = 0;  // from 1
    SweepRow row;
  };

  // A new file, or an empty one that is there. A device or pipe is written to. kAlreadyExists: it
  // holds something. Others as Continue.
  static absl::StatusOr<ResultFile> Create(const std::string& path);
  // A file that is there. kNotFound: it is not. kInvalidArgument: a folder. kDataLoss "<path>: line
  // N: <reason>". kFailedPrecondition: another sweep writes it. kUnavailable: the system failed.
  static absl::StatusOr<ResultFile> Continue(const std::string& path);

  // What the file held when it was opened, in its order.
  const std::vector<Line>& lines() const { return lines_; }
  // One write; what fails halfway is cut back. kUnavailable.
  absl::Status Append(const SweepRow& row);
  const std::string& path() const { return path_; }

 private:
  ResultFile() = default;
  static absl::StatusOr<ResultFile> Open(const std::string& path, int flags);
  absl::Status ReadLines();
  absl::Status Write(const std::string& text);

  std::string path_;
  Descriptor file_;
  bool regular_ = true;
  int64_t size_bytes_ = 0;  // of whole lines
  std::vector<Line> lines_;
};

}  // namespace moe::sweep

#endif  // MOE_MOE_CLI_SWEEP_RESULT_FILE_H_
