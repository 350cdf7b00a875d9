#include "moe/cli/train/live_curves.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/strip.h>
#include <absl/time/clock.h>

#include "kernels/base/status_macros.h"
#include "moe/checkpoint/run_lock.h"
#include "moe/cli/base/live_file.h"
#include "moe/cli/base/program.h"
#include "moe/cli/base/settings.h"
#include "moe/io/event_file.h"
#include "moe/io/file.h"
#include "moe/lm/step_totals.h"

namespace moe::cli {
namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kBegin = "events.out.tfevents.";

// Seconds in the name of the last event file of a folder; -1: it has none.
int64_t LastSeconds(const std::string& folder) {
  int64_t last = -1;
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    absl::string_view rest = name;
    if (!absl::ConsumePrefix(&rest, kBegin)) continue;
    int64_t seconds = 0;
    (void)absl::SimpleAtoi(rest.substr(0, rest.find('.')), &seconds);
    last = std::max(last, seconds);
  }
  return last;
}

// "moe_train_loss 3.5", with what it is. Prometheus writes NaN and infinities so.
void AppendGauge(const char* key, const char* help, double value, std::string& text) {
  absl::StrAppend(&text, "# HELP moe_train_", key, " ", help, "\n# TYPE moe_train_", key,
                  " gauge\n", "moe_train_", key, absl::StrFormat(" %.12g\n", value));
}

}  // namespace

std::vector<StepNumber> NumbersOf(const lm::StepMetrics& m) {
  const auto ms = [&](Phase phase) {
    return m.phase_seconds[static_cast<int>(phase)] * 1e3;
  };
  std::vector<StepNumber> numbers = {
      {"train", "loss", "Mean loss of a token, nats.", m.loss},
      {"train", "lr", "Learning rate.", m.learning_rate},
      {"train", "grad_norm", "2-norm of the gradient before clipping.", m.grad_norm},
      {"moe", "aux_loss", "Balance loss with its coefficient, summed over layers.", m.aux_loss},
      {"moe", "max_vio", "(largest expert load - mean load) / mean load, of the worst layer.",
       m.max_violation},
      {"moe", "dead_experts", "Experts without a token in the step, over all layers.",
       static_cast<double>(m.dead_experts)},
      {"moe", "drop_fraction", "Slots over capacity / slots.", m.drop_fraction},
      {"moe", "router_entropy", "Entropy of a token's router probabilities, nats.",
       m.router_entropy},
      {"speed", "tokens_per_s", "Tokens of the step / time of its slowest rank.",
       m.tokens_per_second},
      {"speed", "step_ms", "Time of the step, slowest rank, ms.", m.step_seconds * 1e3},
      {"speed", "a2a_ms", "Time in dispatch and combine, mean over ranks, ms.",
       ms(Phase::kDispatch) + ms(Phase::kCombine)},
      {"speed", "expert_ms", "Time in experts, mean over ranks, ms.", ms(Phase::kExpert)},
      {"speed", "all_reduce_ms", "Time of the gradient all-reduce, mean over ranks, ms.",
       ms(Phase::kAllReduce)},
      {"speed", "peak_bytes", "Largest memory of a rank, bytes.",
       static_cast<double>(m.peak_bytes)}};
  if (m.has_validation) {
    numbers.push_back(
        {"train", "val_loss", "Mean loss of a held-out token, nats.", m.validation_loss});
  }
  if (m.loss_scale > 0) {
    numbers.push_back({"train", "loss_scale", "Loss scale of the step.", m.loss_scale});
  }
  return numbers;
}

std::vector<double> LayerMaxVio(const lm::StepMetrics& metrics, int32_t experts) {
  std::vector<double> violations;
  for (const auto& load : metrics.expert_load) {
    violations.push_back(lm::MaxViolation({load}, experts));
  }
  return violations;
}

absl::StatusOr<std::unique_ptr<EventFile>> EventFile::Create(const std::string& folder,
                                                             EarlierRun earlier) {
  std::vector<std::string> made;
  MOE_RETURN_IF_ERROR(MakeFolder("--tensorboard-dir", folder, made));
  const int64_t last = LastSeconds(folder);
  if (last >= 0 && earlier == EarlierRun::kRefused) {
    return absl::InvalidArgumentError(
        absl::StrCat("--tensorboard-dir is '", folder,
                     "', which holds an earlier run, expected a new folder: one for each run"));
  }
  const LockHolder process = ThisRun();
  const int64_t seconds = std::max(absl::ToUnixSeconds(absl::Now()), last + 1);
  const std::string name =
      absl::StrFormat("%s%010d.%s.%d", kBegin, seconds, process.host, process.pid);
  MOE_ASSIGN_OR_RETURN(auto file,
                       LineFile::Create((fs::path(folder) / name).string(), std::move(made)));
  return std::unique_ptr<EventFile>(new EventFile(std::move(file)));
}

absl::Status EventFile::Append(const lm::StepMetrics& metrics, int32_t experts, absl::Time now) {
  std::vector<EventScalar> scalars;
  for (const StepNumber& number : NumbersOf(metrics)) {
    scalars.push_back({absl::StrCat(number.group, "/", number.key), number.value});
  }
  std::vector<EventHistogram> histograms;
  const std::vector<double> violations = LayerMaxVio(metrics, experts);
  for (size_t layer = 0; layer < violations.size(); ++layer) {
    scalars.push_back({absl::StrCat("layer_max_vio/", layer), violations[layer]});
    histograms.push_back({absl::StrCat("expert_load/", layer), metrics.expert_load[layer]});
  }
  std::string records;
  if (!begun_) records = VersionRecord(now) + RestartRecord(now, metrics.step);
  records += StepRecord(now, metrics.step, scalars, histograms);
  MOE_RETURN_IF_ERROR(file_->Append(records));
  begun_ = true;
  return absl::OkStatus();
}

std::string PrometheusText(const lm::StepMetrics& metrics, int32_t experts, int64_t steps,
                           absl::Time now) {
  std::string text;
  AppendGauge("step", "The step that was taken last, from 1.", static_cast<double>(metrics.step),
              text);
  AppendGauge("steps", "Steps of the run.", static_cast<double>(steps), text);
  AppendGauge("step_time_seconds", "When the step ended, in seconds since 1970.",
              absl::ToDoubleSeconds(now - absl::UnixEpoch()), text);
  for (const StepNumber& number : NumbersOf(metrics)) {
    AppendGauge(number.key, number.help, number.value, text);
  }
  absl::StrAppend(&text,
                  "# HELP moe_train_layer_max_vio (largest expert load - mean load) / mean load.\n"
                  "# TYPE moe_train_layer_max_vio gauge\n");
  const std::vector<double> violations = LayerMaxVio(metrics, experts);
  for (size_t layer = 0; layer < violations.size(); ++layer) {
    absl::StrAppendFormat(&text, "moe_train_layer_max_vio{layer=\"%d\"} %.12g\n", layer,
                          violations[layer]);
  }
  return text;
}

PrometheusFile::PrometheusFile(std::string path, std::string run, FileSystem& files)
    : path_(std::move(path)), run_(std::move(run)), files_(files) {
  RemoveUnfinished(path_, files_);
}

void PrometheusFile::Show(lm::StepMetrics metrics, int32_t experts, int64_t steps, absl::Time now) {
  if (!metrics.has_validation && last_.has_validation) {  // a gauge stays until it changes
    metrics.has_validation = true;
    metrics.validation_loss = last_.validation_loss;
  }
  last_ = std::move(metrics);
  unwritten_ = PrometheusText(last_, experts, steps, now);
  if (now - written_ < kInterval) return;
  written_ = now;
  Write();
}

void PrometheusFile::End() {
  if (!unwritten_.empty()) Write();
}

void PrometheusFile::Write() {
  const std::error_code error = ReplaceLiveFile(path_, run_, unwritten_, files_);
  unwritten_.clear();
  if (!error || warned_) return;
  warned_ = true;
  PrintWarnings(
      "train",
      {std::string(Prefixed("--metrics-file", StatusOf(error, "write", path_)).message())});
}

absl::StatusOr<std::unique_ptr<LiveCurves>> LiveCurves::Create(const LiveCurvesOptions& options,
                                                               EarlierRun earlier) {
  auto curves = std::unique_ptr<LiveCurves>(new LiveCurves(options));
  if (const std::string& file = options.metrics_file; !file.empty()) {
    std::error_code ignored;
    const auto there = fs::status(file, ignored);
    if (fs::exists(there) && !fs::is_regular_file(there)) {
      return WrongFlag("--metrics-file", file, "a file, or nothing there: it is replaced");
    }
    MOE_RETURN_IF_ERROR(CheckWritable("--metrics-file", file));
    curves->prometheus_ = std::make_unique<PrometheusFile>(file, ThisRun().run);
  }
  if (options.tensorboard_dir.empty()) return curves;
  MOE_ASSIGN_OR_RETURN(curves->events_, EventFile::Create(options.tensorboard_dir, earlier));
  return curves;
}

absl::Status LiveCurves::Show(const lm::StepMetrics& metrics, absl::Time now) {
  if (prometheus_ != nullptr) prometheus_->Show(metrics, options_.experts, options_.steps, now);
  return events_ == nullptr ? absl::OkStatus() : events_->Append(metrics, options_.experts, now);
}

void LiveCurves::End() {
  if (prometheus_ != nullptr) prometheus_->End();
}

std::vector<std::string> LiveCurves::paths() const {
  std::vector<std::string> paths;
  if (events_ != nullptr) paths.push_back(events_->path());
  if (prometheus_ != nullptr) paths.push_back(options_.metrics_file);
  return paths;
}

}  // namespace moe::cli
