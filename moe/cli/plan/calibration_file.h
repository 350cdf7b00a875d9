// Rows of moe bench as samples of a machine.
#ifndef MOE_MOE_CLI_PLAN_CALIBRATION_FILE_H_
#define MOE_MOE_CLI_PLAN_CALIBRATION_FILE_H_

#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "moe/plan/calibration.h"

namespace moe::cli {

struct CalibrationFile {
  plan::Calibration samples;
  bool on_cpu = true;  // the rows name no GPU
  // Where and by what the rows were measured: the same of all rows.
  std::string host, cpu, gpu, version, commit;
};

// Reads rows of moe bench layer, alltoall, alltoallv, allreduce and memcpy in files that -J or
// -o json|jsonl wrote; others are not read. Rows of ranks that share the cores of a CPU count where
// there are `ranks` of them, of `dtype` where they are a layer's. Errors name the file: those of
// MappedFile::Open and ReadJsonRows; kDataLoss for a row without a value, or of another machine or
// build than those before it; kInvalidArgument where rows of `ranks` ranks are missing, with the
// commands that measure them.
absl::StatusOr<CalibrationFile> ReadCalibration(absl::Span<const std::string> paths, int ranks,
                                                const std::string& dtype);

// How the rows' machine and build differ from this one; empty: in nothing.
std::string OtherOrigin(const CalibrationFile& file);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_PLAN_CALIBRATION_FILE_H_
