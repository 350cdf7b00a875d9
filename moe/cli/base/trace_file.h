// --trace FILE: the setting, and the file that a time line is written to.
#ifndef MOE_MOE_CLI_BASE_TRACE_FILE_H_
#define MOE_MOE_CLI_BASE_TRACE_FILE_H_

#include <memory>
#include <optional>
#include <string>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

#include "comm/communicator.h"
#include "kernels/base/trace.h"
#include "moe/cli/base/settings.h"
#include "moe/io/file.h"
#include "moe/run/trace_export.h"

namespace moe::cli {

// `what` is what is traced, for the help.
void AddTraceSetting(const char* what, Table& table);

// Called before ranks start, by the process that reports. Errors: those of CheckWritable.
absl::Status CheckTraceWritable(const Settings& settings);

// The file appears when the trace is complete. Errors: those of WriteError, for --trace. `deadline`
// is that of the ranks that wait meanwhile: a pipe's reader must come within half of it.
class TraceFile final : public TraceSink {
 public:
  TraceFile(std::string path, absl::Duration deadline)
      : path_(std::move(path)), deadline_(deadline) {}

  absl::Status Append(absl::string_view text) override;
  absl::Status Commit() override;

 private:
  const std::string path_;
  const absl::Duration deadline_;
  std::optional<WholeFile> file_;
};

// The time line of one rank of a benchmark, from before it runs to the file. Without --trace there
// is no recorder, and no memory for events.
class RankTrace {
 public:
  // Collective: splits a communicator of its own off `world`, which may then be given away.
  // kInvalidArgument, on every rank, if some have a path and some have none.
  static absl::StatusOr<std::unique_ptr<RankTrace>> Create(const std::string& path,
                                                           Communicator& world);
  TraceRecorder* recorder() { return file_ == nullptr ? nullptr : &recorder_; }
  // Collective: writes the file. Rank 0 reports on standard error how much did not fit.
  absl::Status Write();

 private:
  explicit RankTrace(int64_t capacity) : recorder_(capacity) {}

  TraceRecorder recorder_;
  std::unique_ptr<TraceFile> file_;  // null without --trace
  std::unique_ptr<Communicator> world_;
};

// Warning that `left_out` events did not fit; empty if all did.
std::string TraceWarning(int64_t left_out);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_TRACE_FILE_H_
