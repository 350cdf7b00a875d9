// What programs that watch a run of `moe train` read while it goes on: TensorBoard's event files
// and Prometheus' text (docs/curves.md).
#ifndef MOE_MOE_CLI_TRAIN_LIVE_CURVES_H_
#define MOE_MOE_CLI_TRAIN_LIVE_CURVES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/time/time.h>

#include "moe/cli/base/line_file.h"
#include "moe/io/file_system.h"
#include "moe/lm/training_loop.h"

namespace moe::cli {

// A number of a step, under its key of metrics.jsonl.
struct StepNumber {
  const char* group;  // of curves that are looked at together
  const char* key;
  const char* help;
  double value;
};
// Those that the step has: val_loss and loss_scale are not in every one.
std::vector<StepNumber> NumbersOf(const lm::StepMetrics& metrics);

// MaxVio of each MoE layer, over its first `experts` experts (identity experts come after them).
std::vector<double> LayerMaxVio(const lm::StepMetrics& metrics, int32_t experts);

// DIR/events.out.tfevents.<seconds>.<host>.<process>: scalars "<group>/<key>" and
// "layer_max_vio/<layer>", histograms of the expert ids of a layer's slots "expert_load/<layer>".
class EventFile {
 public:
  // Creates the folder and the file if needed; if no step is written, they are removed. The file
  // sorts behind those that are there, whatever the clock says, since TensorBoard reads them in
  // that order. kInvalidArgument: `folder` is a file, or it holds the events of a run that is not
  // continued. Else errors of FileError (moe/io/file.h), kWrite.
  static absl::StatusOr<std::unique_ptr<EventFile>> Create(const std::string& folder,
                                                           EarlierRun earlier);

  // The first step replaces what earlier files have of it and of later steps. A step is in the file
  // whole or not at all. Errors of LineFile.
  absl::Status Append(const lm::StepMetrics& metrics, int32_t experts, absl::Time now);
  const std::string& path() const { return file_->path(); }

 private:
  explicit EventFile(std::unique_ptr<LineFile> file) : file_(std::move(file)) {}

  const std::unique_ptr<LineFile> file_;
  bool begun_ = false;
};

// Prometheus' text: a gauge moe_train_<key> for each number, moe_train_layer_max_vio for each
// layer, and the time of the step.
std::string PrometheusText(const lm::StepMetrics& metrics, int32_t experts, int64_t steps,
                           absl::Time now);

// The text of the newest step in a file, which is replaced at most once a second. A text that
// cannot be written is no reason to fail: the first time is a warning.
class PrometheusFile {
 public:
  static constexpr absl::Duration kInterval = absl::Seconds(1);

  // `run`: of this process (LockHolder).
  PrometheusFile(std::string path, std::string run, FileSystem& files = RealFileSystem());

  void Show(lm::StepMetrics metrics, int32_t experts, int64_t steps, absl::Time now);
  // Writes a step that came too soon.
  void End();

 private:
  void Write();

  const std::string path_, run_;
  FileSystem& files_;
  lm::StepMetrics last_;
  std::string unwritten_;
  absl::Time written_ = absl::InfinitePast();
  bool warned_ = false;
};

struct LiveCurvesOptions {
  std::string tensorboard_dir = {};  // empty: no event file
  std::string metrics_file = {};     // empty: no text for Prometheus
  int32_t experts = 0;               // without identity experts
  int64_t steps = 0;                 // of the run
};

// The two of a run, each if it has a path.
class LiveCurves {
 public:
  // Errors of EventFile::Create and CheckWritable; kInvalidArgument: --metrics-file is no file.
  static absl::StatusOr<std::unique_ptr<LiveCurves>> Create(const LiveCurvesOptions& options,
                                                            EarlierRun earlier);
  absl::Status Show(const lm::StepMetrics& metrics, absl::Time now);  // errors of EventFile
  void End();
  std::vector<std::string> paths() const;

 private:
  explicit LiveCurves(const LiveCurvesOptions& options) : options_(options) {}

  const LiveCurvesOptions options_;
  std::unique_ptr<EventFile> events_;
  std::unique_ptr<PrometheusFile> prometheus_;
};

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_TRAIN_LIVE_CURVES_H_
