// Reads results that nobody vouches for.
#ifndef MOE_MOE_CLI_REPORT_INPUTS_H_
#define MOE_MOE_CLI_REPORT_INPUTS_H_

#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "moe/cli/report/rows.h"

namespace moe::report {

// `document` is one JSON list of rows, one row, or a row a line; keys say of which command they
// are. Keys that the report has no use for are ignored; null is a key that is not there. kDataLoss
// "<file>: <reason> (line L, column C)" for malformed JSON, a row of no known command or of another
// one than the rows before, a key of the wrong type, numbers out of their range, steps not in
// order, expert loads that change shape, no rows at all, and more than 256 MiB.
absl::StatusOr<Run> ParseRun(absl::string_view file, absl::string_view document);

// The file at `path`, or metrics.jsonl in the folder at `path`. Errors of MappedFile::Open (moe/io/
// file.h) and of ParseRun.
absl::StatusOr<Run> ReadRun(const std::string& path);

// Short names that differ: as many last parts of each path as that takes, without ".json", ".jsonl"
// and "metrics.jsonl". Paths that are equal get a number.
std::vector<std::string> ShortNames(absl::Span<const std::string> paths);

}  // namespace moe::report

#endif  // MOE_MOE_CLI_REPORT_INPUTS_H_
