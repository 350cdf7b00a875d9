// The line that says how far a sweep is.
#ifndef MOE_MOE_CLI_SWEEP_PROGRESS_H_
#define MOE_MOE_CLI_SWEEP_PROGRESS_H_

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>

#include "moe/cli/terminal.h"

namespace moe::cli {

// "[ 7/36] E=16 k=2 cf=1.25 eta 00:12:40": point 7 of 36 runs. Without an eta: "eta --:--:--".
std::string SweepProgressText(int64_t number, int64_t points, const std::string& label,
                              std::optional<double> eta_seconds);

// On a terminal one refreshed line, else a line for every point. Not thread-safe.
class SweepProgress {
 public:
  struct Options {
    int64_t points = 0;  // of the sweep
    int64_t to_run = 0;  // of them, those that are measured now
    bool quiet = false;
  };
  SweepProgress(const Options& options, const Terminal& terminal, std::FILE* out)
      : options_(options), terminal_(terminal), out_(out) {}
  ~SweepProgress() { End(); }
  SweepProgress(const SweepProgress&) = delete;
  SweepProgress& operator=(const SweepProgress&) = delete;

  // Point `number`, from 1, starts.
  void Start(int64_t number, const std::string& label);
  // It is at `done` of `total` steps: on a terminal alone.
  void Step(int64_t done, int64_t total);
  // It has ended after `seconds`.
  void Finish(double seconds);
  // Why a point, started or not, has no figures.
  void Error(int64_t number, const std::string& label, const std::string& error);
  // Ends the refreshed line, so that other output starts on a line of its own.
  void End();

 private:
  void Show(const std::string& suffix);

  const Options options_;
  const Terminal terminal_;
  std::FILE* const out_;
  int64_t number_ = 0, finished_ = 0;
  std::string label_;
  double seconds_ = 0;  // of the points that have ended
  bool line_is_open_ = false;
};

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_SWEEP_PROGRESS_H_
