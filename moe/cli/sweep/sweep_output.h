// Output of a sweep: its rows, in a file and on the screen, its progress, and its reaction to
// Ctrl-C.
#ifndef MOE_MOE_CLI_SWEEP_SWEEP_OUTPUT_H_
#define MOE_MOE_CLI_SWEEP_SWEEP_OUTPUT_H_

#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include "moe/cli/base/settings.h"
#include "moe/cli/base/terminal.h"
#include "moe/cli/measure/sweep_row.h"
#include "moe/cli/sweep/result_file.h"

namespace moe::cli {

// Used on the rank that prints. Thread-safe: an interrupt prints the rows so far.
class SweepOutput {
 public:
  // points: number of the sweep's points.
  SweepOutput(const Settings& settings, size_t points) : settings_(settings), rows_(points) {}

  // Opens the file of -J or --resume, if any. Errors have the documented exit codes and name the
  // flag.
  absl::Status Open();
  // Passes the identities of the points, in order: rows of the file with one of them become the
  // rows of those points (with --retry, only rows without error). Returns a note on rows without a
  // point, or "". kInvalidArgument for a row of another build than `build` (sweep::BuildOf).
  absl::StatusOr<std::string> Adopt(const std::vector<std::string>& identities,
                                    const std::string& build);

  bool has(size_t index) const;
  std::vector<sweep::SweepRow> rows() const;         // so far, in order of the points
  const std::string& path() const { return path_; }  // empty: no file

  // Appends a row to the file, and keeps it.
  absl::Status Add(size_t index, sweep::SweepRow row);
  // Keeps a row that is not measured: it is printed, and not in the file.
  void Keep(size_t index, sweep::SweepRow row);
  // The row of a point that has one.
  std::optional<sweep::SweepRow> row(size_t index) const;
  // The rows so far in the forms of -o and -oe.
  absl::Status Print() const;

 private:
  const Settings& settings_;
  std::string path_;
  std::optional<sweep::ResultFile> file_;
  mutable std::mutex mu_;
  std::vector<std::optional<sweep::SweepRow>> rows_;  // guarded by mu_
};

// Progress as one refreshed line on a terminal, else a line for every point. Not thread-safe.
class SweepProgress {
 public:
  struct Options {
    int64_t points = 0;  // number of the sweep's points
    int64_t to_run = 0;  // number of points to measure now
    bool quiet = false;
  };
  SweepProgress(const Options& options, const Terminal& terminal, std::FILE* out)
      : options_(options), line_(terminal, out), out_(out) {}

  // Reports that point `number`, from 1, starts.
  void Start(int64_t number, const std::string& label);
  // Reports `done` of `total` steps, on a terminal alone.
  void Step(int64_t done, int64_t total);
  // Reports that the point has ended after `seconds`.
  void Finish(double seconds);
  // Reports why a point, started or not, has no figures.
  void Error(int64_t number, const std::string& label, const std::string& error);
  void End() { line_.End(); }

 private:
  void Show(const std::string& suffix);

  const Options options_;
  StatusLine line_;
  std::FILE* const out_;
  int64_t number_ = 0, finished_ = 0;
  std::string label_;
  double seconds_ = 0;  // time of the points that have ended
};

// While an object lives, SIGINT and SIGTERM call `say` on another thread and then end the process
// as usual (a shell sees 130 and 143). Create it on the main thread before other threads start:
// they inherit the mask that blocks both signals.
class InterruptWatch {
 public:
  explicit InterruptWatch(std::function<void()> say);
  ~InterruptWatch();
  InterruptWatch(const InterruptWatch&) = delete;
  InterruptWatch& operator=(const InterruptWatch&) = delete;

 private:
  void Wait();

  const std::function<void()> say_;
  sigset_t signals_ = {}, before_ = {};
  std::atomic<bool> over_ = false;
  std::thread thread_;  // last: starts after the state above exists
};

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_SWEEP_SWEEP_OUTPUT_H_
