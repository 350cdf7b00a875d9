// The rows of a sweep: in their file as they come, on the screen at the end.
#ifndef MOE_MOE_CLI_SWEEP_OUTPUT_H_
#define MOE_MOE_CLI_SWEEP_OUTPUT_H_

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include "moe/cli/settings.h"
#include "moe/sweep/result_file.h"
#include "moe/sweep/sweep_row.h"

namespace moe::cli {

// Of the rank that speaks. Thread-safe: an interrupt prints what there is.
class SweepOutput {
 public:
  // points: of the sweep.
  SweepOutput(const Settings& settings, size_t points) : settings_(settings), rows_(points) {}

  // Opens the file of -J or --resume, if any. Errors carry the exit codes of INTERFACE and name the
  // flag.
  absl::Status Open();
  // The identities of the points, in order: rows of the file that are of one of them become theirs
  // (with --retry, those that are no errors). Returns a note on the rows that are of none, or "".
  std::string Adopt(const std::vector<std::string>& identities);

  bool has(size_t index) const;
  size_t count() const;   // of rows
  size_t errors() const;  // among them
  std::string first_error() const;
  const std::string& path() const { return path_; }  // empty: no file

  // Into the file, and kept.
  absl::Status Add(size_t index, sweep::SweepRow row);
  // The rows so far, in order of the points, in the forms of -o and -oe.
  absl::Status Print() const;

 private:
  const Settings& settings_;
  std::string path_;
  std::optional<sweep::ResultFile> file_;
  mutable std::mutex mu_;
  std::vector<std::optional<sweep::SweepRow>> rows_;  // guarded by mu_
};

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_SWEEP_OUTPUT_H_
