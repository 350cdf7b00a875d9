// moe sweep: the cross product of axes, each point measured.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/time/clock.h>

#include "kernels/base/caught.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/stream.h"
#include "moe/cli/base/agreed_ranks.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/config_file.h"
#include "moe/cli/base/data_files.h"
#include "moe/cli/base/program.h"
#include "moe/cli/base/provenance.h"
#include "moe/cli/base/terminal.h"
#include "moe/cli/measure/machine_memory.h"
#include "moe/cli/sweep/prediction.h"
#include "moe/cli/sweep/sweep_output.h"
#include "moe/cli/sweep/sweep_plan.h"

namespace moe::cli {
namespace {

constexpr char kCommand[] = "sweep";
constexpr int kLeastMeasured = 3;  // points, with --predict
constexpr absl::Duration kTimeToWriteARow = absl::Seconds(5);

// The state of a point before the sweep, equal on all processes: the largest of theirs.
enum State : int64_t { kRun, kRefused, kThere, kPredicted };

class SweepRun {
 public:
  SweepRun(const Invocation& invocation, const Settings& settings, const SweepPlan& plan)
      : invocation_(invocation), settings_(settings), plan_(plan), output_(settings, plan.size()) {}

  absl::Status Run() {
    MOE_RETURN_IF_ERROR(Prepare());
    std::optional<InterruptWatch> watch;
    if (speaks()) watch.emplace([this] { Interrupted(); });
    if (!plan_.launch().plan.processes()) {
      MOE_RETURN_IF_ERROR(RunPoints(nullptr));
    } else {
      const auto body = [&](std::unique_ptr<Communicator> world) {
        return OrAbort(*world, RunPoints(world.get()));
      };
      const auto inputs = [this] {
        ReadInputs read;
        data_.AddTo(text_, read);
        return read;
      };
      MOE_RETURN_IF_ERROR(RunAgreedRanks(
          {.launch = plan_.launch(), .settings = settings_, .command = kCommand, .inputs = inputs},
          body));
    }
    return speaks() ? Verdict() : absl::OkStatus();
  }

 private:
  // Refuses everything that can be refused before a rank starts or a file is touched.
  absl::Status Prepare() {
    if (plan_.measure() == Measure::kTrain) MOE_RETURN_IF_ERROR(ReadText());
    if (!settings_.empty("max-memory") && settings_.real("max-memory") <= 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--max-memory is ", settings_.text("max-memory"), ", expected more than 0 MiB"));
    }
    MOE_RETURN_IF_ERROR(CheckPredict());
    available_bytes_ = measure::AvailableMemoryBytes();
    std::vector<std::string> identities;
    absl::Status first_refusal;
    bool possible = false;
    for (size_t i = 0; i < plan_.size(); ++i) {
      const PlannedPoint planned = plan_.At(i, text_);
      possible |= planned.refused.ok();
      if (first_refusal.ok()) first_refusal = planned.refused;
      state_.push_back(Refusal(planned).ok() ? kRun : kRefused);
      identities.push_back(sweep::IdentityOf(sweep::ErrorRow(planned.point, "")));
    }
    if (!possible) return first_refusal;
    if (!speaks()) return absl::OkStatus();
    MOE_RETURN_IF_ERROR(output_.Open());
    sweep::Point mine;
    mine.provenance = Provenance(plan_.launch().device);
    MOE_ASSIGN_OR_RETURN(const std::string note,
                         output_.Adopt(identities, sweep::BuildOf(sweep::ErrorRow(mine, ""))));
    if (!note.empty() && !settings_.on("quiet")) Say(stderr, "moe sweep: {}\n", note);
    for (size_t i = 0; i < plan_.size(); ++i) {
      if (output_.has(i)) state_[i] = kThere;
    }
    return absl::OkStatus();
  }

  absl::Status CheckPredict() const {
    const int measured = settings_.integer("predict");
    if (measured > 0 && plan_.measure() != Measure::kTrain) {
      return WrongFlag("--predict", absl::StrCat(measured), "--measure train with it");
    }
    if (measured == 0 || measured >= kLeastMeasured) return absl::OkStatus();
    return WrongFlag("--predict", absl::StrCat(measured),
                     absl::StrCat("0, or at least ", kLeastMeasured,
                                  " points to measure: each is also predicted from the others"));
  }

  absl::Status ReadText() {
    Table rows;
    AddDataSettings(data_, rows);
    MOE_RETURN_IF_ERROR(Fill(settings_, rows));
    const int64_t ids = settings_.integer("vocab-size");
    MOE_RETURN_IF_ERROR(CheckDataFiles(data_, ids));
    MOE_ASSIGN_OR_RETURN(text_, ReadData(data_, ids, settings_.integer("seq-length")));
    return absl::OkStatus();
  }

  absl::Status RunPoints(Communicator* world) {
    if (world != nullptr) {
      MOE_RETURN_IF_ERROR(AgreeAmongProcesses(*world));
    }
    LeaveToPrediction();
    const bool interleave = settings_.on("interleave");
    const int passes = interleave ? plan_.repetitions() : 1;
    progress_ = std::make_unique<SweepProgress>(
        SweepProgress::Options{.points = static_cast<int64_t>(plan_.size()),
                               .to_run = passes * std::count(state_.begin(), state_.end(), kRun),
                               .quiet = settings_.on("quiet") || !speaks()},
        StderrTerminal(), stderr);
    measured_.resize(plan_.size());
    absl::Status status;
    for (int pass = 0; pass < passes; ++pass) {
      for (size_t i = 0; i < plan_.size() && status.ok(); ++i) {
        if (state_[i] == kThere || state_[i] == kPredicted) continue;
        const int first = interleave ? pass : 0;
        status = RunPoint(i, plan_.At(i, text_),
                          {first, interleave ? first + 1 : plan_.repetitions()}, world);
      }
    }
    progress_->End();
    if (speaks() && status.ok()) Predict();
    // Also prints the rows before a failure: processes do not return from one.
    if (speaks()) {
      const absl::Status printed = output_.Print();
      if (status.ok()) status = printed;
    }
    return status;
  }

  // Rank 0 alone has read the file, and machines differ in memory: all must skip and refuse the
  // same points.
  absl::Status AgreeAmongProcesses(Communicator& world) {
    const auto stream = MakeInlineStream();
    MOE_RETURN_IF_ERROR(world.AllReduce<int64_t>(absl::MakeSpan(state_), ReduceOp::kMax, *stream));
    return stream->Synchronize();
  }

  // Of the points that would run, --predict leaves so many, spread over the sweep, that with those
  // of the file they are as many as it says.
  void LeaveToPrediction() {
    const int64_t measured = settings_.integer("predict");
    if (measured == 0) return;
    std::vector<size_t> open;
    for (size_t i = 0; i < state_.size(); ++i) {
      if (state_[i] == kRun) open.push_back(i);
    }
    const int64_t there = std::count(state_.begin(), state_.end(), kThere);
    const auto runs = static_cast<size_t>(
        std::clamp<int64_t>(measured - there, 0, static_cast<int64_t>(open.size())));
    for (const size_t i : open) state_[i] = kPredicted;
    for (size_t k = 0; k < runs; ++k) {
      state_[open[runs == 1 ? 0 : k * (open.size() - 1) / (runs - 1)]] = kRun;
    }
  }

  // Keeps a row for each point that is left to it, and says how good they are.
  void Predict() {
    std::vector<MeasuredPoint> measured;
    for (size_t i = 0; i < plan_.size(); ++i) {
      const std::optional<sweep::SweepRow> row = output_.row(i);
      if (!row.has_value() || row->failed()) continue;
      const PlannedPoint planned = plan_.At(i, text_);
      if (!planned.refused.ok()) continue;
      if (auto point = MeasuredPointOf(planned, *row)) measured.push_back(*std::move(point));
    }
    int predicted = 0;
    for (size_t i = 0; i < plan_.size(); ++i) {
      if (state_[i] != kPredicted) continue;
      const PlannedPoint planned = plan_.At(i, text_);
      const auto figures = PredictPoint(planned, measured);
      if (figures.ok()) ++predicted;
      output_.Keep(i, figures.ok() ? sweep::PredictedRow(planned.point, *figures)
                                   : sweep::ErrorRow(planned.point, figures.status().message()));
    }
    if (predicted == 0 || settings_.on("quiet")) return;
    Say(stderr, "moe sweep: {} predicted from {} measured; ", Counted(predicted, "point"),
        measured.size());
    const PredictionError error = ErrorOfPrediction(measured);
    if (error.points == 0) {
      Say(stderr, "how well is not known, since none of these follows from the others\n");
      return;
    }
    Say(stderr,
        "step times of {} of these, each predicted from the others: median error {:.1f} %, "
        "largest {:.1f} %\n",
        error.points, error.median_pct, error.most_pct);
  }

  // The reason why a point cannot run: its settings, or memory.
  absl::Status Refusal(const PlannedPoint& planned) const {
    MOE_RETURN_IF_ERROR(planned.refused);
    const auto max_mib =
        settings_.empty("max-memory") ? std::optional<double>() : settings_.real("max-memory");
    const std::string too_big =
        measure::TooBig(plan::EstimateMemory(planned.memory), planned.launch.world.local_ranks,
                        available_bytes_, max_mib);
    return too_big.empty() ? absl::OkStatus() : absl::ResourceExhaustedError(too_big);
  }

  // Repetitions [first, last) of a point.
  struct Repetitions {
    int first = 0, last = 0;
  };

  // Measures repetitions of a point and, with the last of them, stores its row. Returns errors of
  // processes, which have lost each other, or of the file; errors on threads are recorded in the
  // row, and end the point.
  absl::Status RunPoint(size_t index, const PlannedPoint& planned, Repetitions part,
                        Communicator* world) {
    const bool started = state_[index] == kRun;
    absl::Status failed = started ? absl::OkStatus() : Refusal(planned);
    if (!started && failed.ok()) {
      failed = absl::ResourceExhaustedError("it is refused on another machine of the job");
    }
    std::vector<sweep::Figures>& repetitions = measured_[index];
    if (started) {
      if (speaks()) progress_->Start(static_cast<int64_t>(index) + 1, planned.label);
      const absl::Time begin = absl::Now();
      for (int r = part.first; r < part.last && failed.ok(); ++r) {
        absl::StatusOr<sweep::Figures> figures = Repeat(planned, r, world);
        failed = figures.status();
        if (figures.ok()) repetitions.push_back(*figures);
      }
      progress_->Finish(absl::ToDoubleSeconds(absl::Now() - begin));
    }
    state_[index] = failed.ok() && part.last < plan_.repetitions() ? kRun : kThere;
    if (state_[index] == kRun) return absl::OkStatus();
    sweep::Point point = planned.point;
    point.provenance = Provenance(planned.launch.device);
    const absl::Status end = world != nullptr && started ? failed : absl::OkStatus();
    if (!speaks()) {
      // A process that exits ends the job: wait until rank 0 has noticed and written the row.
      if (!end.ok()) absl::SleepFor(kTimeToWriteARow);
      return end;
    }
    if (!failed.ok()) {
      const std::string error(failed.message());
      progress_->Error(static_cast<int64_t>(index) + 1, planned.label, error);
      MOE_RETURN_IF_ERROR(output_.Add(index, sweep::ErrorRow(point, error)));
      return end;
    }
    return output_.Add(index, sweep::MeasuredRow(point, sweep::Summarize(repetitions)));
  }

  absl::StatusOr<sweep::Figures> Repeat(const PlannedPoint& planned, int repetition,
                                        Communicator* world) {
    sweep::Figures figures;
    if (world != nullptr) {
      MOE_ASSIGN_OR_RETURN(auto part, world->Split(0, world->rank()));
      MOE_RETURN_IF_ERROR(
          Caught([&] { return OnRank(planned, repetition, std::move(part), figures); }));
      return figures;
    }
    const auto body = [&](std::unique_ptr<Communicator> threads) -> absl::Status {
      sweep::Figures mine;
      const bool first = threads->rank() == 0;
      MOE_RETURN_IF_ERROR(OnRank(planned, repetition, std::move(threads), mine));
      if (first) figures = mine;
      return absl::OkStatus();
    };
    MOE_RETURN_IF_ERROR(
        RunRanks(RankOptions(planned.launch, CommTimeout(settings_), kCommand), body));
    return figures;
  }

  // The work of one rank in one repetition. `figures` is complete on rank 0.
  absl::Status OnRank(const PlannedPoint& planned, int repetition,
                      std::unique_ptr<Communicator> world, sweep::Figures& figures) {
    const bool first = world->rank() == 0;
    if (plan_.measure() == Measure::kTrain) {
      lm::TrainConfig config = planned.train;
      config.trainer.seed += static_cast<uint64_t>(repetition);
      sweep::TrainFigures steps;
      const auto on_step = [&](const lm::StepMetrics& metrics) {
        steps.Add(metrics);
        progress_->Step(config.steps * repetition + metrics.step,
                        config.steps * plan_.repetitions());
        return absl::OkStatus();
      };
      MOE_ASSIGN_OR_RETURN(const lm::TrainReport report,
                           lm::Train(config, text_, std::move(world), {on_step}));
      if (first) figures = steps.Finish(report);
      return absl::OkStatus();
    }
    measure::LayerSpec spec = planned.layer;
    spec.trainer.seed += static_cast<uint64_t>(repetition);
    MOE_ASSIGN_OR_RETURN(const measure::LayerResult result,
                         measure::MeasureLayer(spec, planned.measure, std::move(world)));
    for (const measure::LayerRow& row : result.rows) {
      if (row.wrong == 0) continue;
      return absl::InternalError(absl::StrCat(row.wrong, " elements of the ", row.pass,
                                              " pass differ from the first call's, expected none"));
    }
    if (!first) return absl::OkStatus();
    figures = sweep::LayerFigures(result);
    figures.params_total = static_cast<double>(planned.layer_size.total);
    figures.params_active = static_cast<double>(planned.layer_size.active);
    return absl::OkStatus();
  }

  void Interrupted() {
    Say(stderr, "\nmoe sweep: interrupted with {} of {} points done", output_.rows().size(),
        plan_.size());
    if (!output_.path().empty()) Say(stderr, "; go on with:\n  {}", ResumeCommand());
    Say(stderr, "\n");
    std::fflush(stderr);
    (void)output_.Print();
  }

  std::string ResumeCommand() const {
    // Values from the environment or a file for the other measure would be refused as flags.
    const auto skip = [&](const Setting& s) {
      return s.name == "out" || s.name == "resume" || IsOfOther(plan_.measure(), s);
    };
    return absl::StrCat(LauncherText(plan_.launch()), ShellQuote(invocation_.program), " sweep",
                        FlagsOf(settings_, skip), " --resume ", ShellQuote(output_.path()));
  }

  absl::Status Verdict() const {
    std::vector<sweep::SweepRow> failed = output_.rows();
    std::erase_if(failed, [](const sweep::SweepRow& row) { return !row.failed(); });
    if (failed.empty()) return absl::OkStatus();
    return CheckFailed(absl::StrCat(failed.size(), " of ", plan_.size(),
                                    " points failed, the first: ", failed[0].text("error")));
  }

  bool speaks() const { return plan_.launch().rank() == 0; }

  const Invocation& invocation_;
  const Settings& settings_;
  const SweepPlan& plan_;
  DataFiles data_;
  lm::Corpus text_;  // the text of data_
  SweepOutput output_;
  std::vector<int64_t> state_;                         // [points]
  std::vector<std::vector<sweep::Figures>> measured_;  // [points] repetitions so far
  int64_t available_bytes_ = 0;
  std::unique_ptr<SweepProgress> progress_;
};

absl::Status Run(const Invocation& invocation) {
  std::vector<std::string> warnings;
  Settings settings(SweepSettings());
  MOE_ASSIGN_OR_RETURN(const std::vector<std::string> args, NameCoupled(invocation.args));
  MOE_RETURN_IF_ERROR(LoadSettings(args, invocation.environment, settings, warnings));
  if (settings.on("help")) return PrintOnce(invocation, HelpText(SweepHelp()));
  MOE_RETURN_IF_ERROR(TakeTokensOfLayer(settings));
  if (settings.on("print-config")) return PrintOnce(invocation, PrintSettings(settings));
  MOE_ASSIGN_OR_RETURN(const SweepPlan plan, SweepPlan::Make(settings, invocation.environment));
  return RunLaunch(kCommand, settings, plan.launch(), warnings,
                   [&] { return SweepRun(invocation, settings, plan).Run(); });
}

}  // namespace

ExitCode SweepCommand(const Invocation& invocation) {
  return EndCommand(invocation, kCommand, Run(invocation));
}

}  // namespace moe::cli
