// The line that shows the progress of training.
#ifndef MOE_MOE_CLI_TRAIN_PROGRESS_H_
#define MOE_MOE_CLI_TRAIN_PROGRESS_H_

#include <cstdint>
#include <cstdio>
#include <string>

#include "moe/cli/base/terminal.h"
#include "moe/lm/training_loop.h"

namespace moe::cli {

// "step   120/1000 | loss 3.4215 | lr 2.95e-04 | gnorm 0.873 | 41.2 ms | 198,312 tok/s | moe: a2a
// 12.1 ms 29% expert 9.8 ms drop 0.42% maxvio 0.31 dead 0 aux 1.02e-02 | ar 3.2 ms 8% | 812 MiB |
// eta 00:00:36", one line. If that is longer than `columns`, as many of its fields as fit; the
// step, the eta, tok/s and the loss before the others.
std::string ProgressText(const lm::StepMetrics& metrics, int64_t steps, double eta_seconds,
                         size_t columns = std::string::npos);

struct ProgressOptions {
  int64_t steps = 0;
  int64_t log_interval = 1;
  bool quiet = false;
  const char* unit = "byte";  // what a token is
};

// On a terminal one refreshed line, with a bar from 80 columns on; else a line for the first step,
// every log_interval-th and the last. Validation results get a line of their own. Not thread-safe.
class Progress {
 public:
  Progress(const ProgressOptions& options, const Terminal& terminal, std::FILE* out)
      : options_(options), line_(terminal, out), out_(out) {}

  void Show(const lm::StepMetrics& metrics);
  void End() { line_.End(); }

 private:
  const ProgressOptions options_;
  StatusLine line_;
  std::FILE* const out_;
  double seconds_ = 0;  // all steps so far
};

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_TRAIN_PROGRESS_H_
