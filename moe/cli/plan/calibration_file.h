// Rows of moe bench and steps of moe train as samples of a machine.
#ifndef MOE_MOE_CLI_PLAN_CALIBRATION_FILE_H_
#define MOE_MOE_CLI_PLAN_CALIBRATION_FILE_H_

#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "moe/plan/calibration.h"

namespace moe::cli {

struct CalibrationFile {
  plan::Calibration samples;
  bool on_cpu = true;  // the rows name no GPU
  // Where and by what the rows were measured: the same of all rows.
  std::string host, cpu, gpu, version, commit;
};

// The text of a file of calibration, with its name for messages.
struct CalibrationText {
  std::string file;
  absl::string_view text;
};

// Reads rows of moe bench layer, alltoall, alltoallv, allreduce and memcpy in files that -J or
// -o json|jsonl wrote, and metrics.jsonl of moe train, of which the shortest step behind the first
// counts; others are not read. Rows and runs of ranks that share the cores of a CPU count where
// there are `ranks` of them, of `dtype` where they are a layer's or of a run. Errors name the file:
// those of ReadJsonRows; kDataLoss for a row without a value, or of another machine or build than
// those before it; kInvalidArgument where rows of `ranks` ranks are missing, with the commands that
// measure them.
absl::StatusOr<CalibrationFile> ParseCalibration(absl::Span<const CalibrationText> texts, int ranks,
                                                 const std::string& dtype);
// Of files, for --calibrate; errors of MappedFile::Open, too.
absl::StatusOr<CalibrationFile> ReadCalibration(absl::Span<const std::string> paths, int ranks,
                                                const std::string& dtype);

// How the rows' machine and build differ from this one; empty: in nothing.
std::string OtherOrigin(const CalibrationFile& file);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_PLAN_CALIBRATION_FILE_H_
