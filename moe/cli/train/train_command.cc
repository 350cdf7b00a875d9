// moe train: trains the reference model on text files.
#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/time/clock.h>

#include "comm/hosts.h"
#include "kernels/base/printable.h"
#include "kernels/base/status_macros.h"
#include "moe/checkpoint/step_folders.h"
#include "moe/checkpoint/stop_signal.h"
#include "moe/cli/base/agreed_ranks.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/launch.h"
#include "moe/cli/base/line_file.h"
#include "moe/cli/base/metrics_file.h"
#include "moe/cli/base/program.h"
#include "moe/cli/base/provenance.h"
#include "moe/cli/base/run_status.h"
#include "moe/cli/base/stored_run.h"
#include "moe/cli/base/terminal.h"
#include "moe/cli/base/trace_file.h"
#include "moe/cli/base/train_options.h"
#include "moe/cli/measure/machine_memory.h"
#include "moe/cli/train/live_curves.h"
#include "moe/cli/train/mesh_choice.h"
#include "moe/cli/train/placement.h"
#include "moe/cli/train/progress.h"
#include "moe/cli/train/reproducing_command.h"
#include "moe/cli/train/train_report.h"
#include "moe/hf/hf_model.h"
#include "moe/io/file.h"
#include "moe/io/routing_trace.h"
#include "moe/io/tokenizer_file.h"
#include "moe/plan/memory.h"

namespace moe::cli {
namespace {

constexpr char kCommand[] = "train";

// Reads the data and checks that they hold one step.
absl::StatusOr<lm::Corpus> ReadText(const TrainOptions& options) {
  const lm::TrainConfig& train = options.train;
  MOE_ASSIGN_OR_RETURN(lm::Corpus corpus,
                       ReadData(options.data, train.model.vocab_size, train.sequence_length));
  const int64_t sequences = lm::SequenceCount(corpus.train, train.sequence_length);
  const int64_t batch = train.trainer.micro_batches * train.micro_batch_size;
  if (sequences >= batch) return corpus;
  return absl::InvalidArgumentError(
      absl::StrCat(options.data.flag(), ": the text to train on has ", sequences, " sequences of ",
                   train.sequence_length, " ", corpus.unit, "s, expected at least the ", batch,
                   " of one step: give more text, or at most ",
                   std::max<int64_t>(1, sequences / train.micro_batch_size), " --micro-batches"));
}

// A run whose settings are known.
class TrainRun {
 public:
  TrainRun(const Invocation& invocation, const Settings& settings, const Launch& launch)
      : invocation_(invocation), settings_(settings), launch_(launch) {}

  // The signal that ended the run if nothing was saved; 0: none.
  int lost_to() const { return lost_to_; }

  // Prints the memory of a rank, in MiB or as an object; starts no rank and writes no file. Errors
  // are those with which Run refuses the settings, or the memory.
  absl::Status DryRun() {
    MOE_ASSIGN_OR_RETURN(options_, MakeTrainOptions(settings_, launch_.world));
    if (!speaks()) return absl::OkStatus();
    const plan::MemoryEstimate estimate = Estimate();
    MOE_RETURN_IF_ERROR(Print(AsJson() ? MemoryJson(estimate, launch_.world.local_ranks)
                                       : MemoryText(estimate, launch_.world.local_ranks)));
    return CheckMemory();
  }

  absl::Status Run() {
    MOE_RETURN_IF_ERROR(Prepare());
    absl::Status status = Train();
    if (status_ != nullptr) status_->End(status);
    return status;
  }

 private:
  absl::Status Train() {
    PrintStart();
    Progress progress({.steps = options_.train.steps,
                       .log_interval = settings_.on("verbose") ? 1 : options_.log_interval,
                       .quiet = settings_.on("quiet"),
                       .unit = options_.data.unit()},
                      StderrTerminal(), stderr);
    lm::TrainHooks hooks = {.on_step = {}, .trace = trace_.get()};
    hooks.on_step = [&](const lm::StepMetrics& metrics) {
      progress.Show(metrics);
      if (status_ != nullptr) status_->Show(metrics);
      MOE_RETURN_IF_ERROR(KeepTokenizer());
      MOE_RETURN_IF_ERROR(AppendStep(metrics));
      return curves_->Show(metrics, absl::Now());
    };
    hooks.on_routing = [&](absl::Span<const RoutingTraceRecord> records) {
      return AppendRouting(records);
    };
    if (start_.has_value()) {
      hooks.load_weights = [&](ParameterStore& parameters, const Context& context) {
        return start_->Load(parameters, context);
      };
    }
    if (status_ != nullptr) {
      hooks.on_begin = [&](int64_t first_step, const Context& context) {
        status_->Begin(first_step, hosts_, context.mesh->world().rank());
      };
    }
    const StopSignal stop;
    hooks.stop = &stop;
    const auto body = [&](std::unique_ptr<Communicator> world) -> absl::Status {
      const bool first = world->rank() == 0;
      world->Mark({.name = "start"});
      if (launch_.plan.processes()) MOE_RETURN_IF_ERROR(PrintPlacement(*world));
      // Training takes the world; what follows has a communicator of its own.
      MOE_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> after, world->Split(0, world->rank()));
      MOE_ASSIGN_OR_RETURN(lm::TrainReport mine,
                           lm::Train(options_.train, corpus_, std::move(world), hooks));
      after->Mark({.name = "finalize", .step = mine.steps});
      if (mine.stopped) stopped_step_ = mine.steps;
      if (!first) return MeasurePeak(options_.train, mine, std::move(after)).status();
      // The measurement may fail: the run is complete, and reported, before it.
      progress.End();
      MOE_RETURN_IF_ERROR(OrAbort(*after, End(mine)));
      const auto peak = MeasurePeak(options_.train, mine, std::move(after));
      if (AsJson()) {
        const auto rates = peak.ok() ? *peak : std::vector<CommRate>();
        MOE_RETURN_IF_ERROR(Print(ReportJson(mine, FactsOf(mine), rates)));
        return peak.status();
      }
      MOE_RETURN_IF_ERROR(peak.status());
      return Print(PeakText(*peak));
    };
    const auto inputs = [this] {
      return Inputs();
    };
    const auto on_failure = [this](const absl::Status& status) {
      if (status_ != nullptr) status_->End(status);
    };
    ProcessWatch watch(WatchOptions());
    MOE_RETURN_IF_ERROR(RunAgreedRanks({.launch = launch_,
                                        .settings = settings_,
                                        .command = kCommand,
                                        .inputs = inputs,
                                        .on_failure = on_failure,
                                        .watch = &watch},
                                       body));
    if (stopped_step_ < 0) return absl::OkStatus();
    if (!options_.train.checkpoints.folder.empty()) {
      return WithExitCode(
          absl::CancelledError("stopped on request; the same command with --resume auto "
                               "goes on"),
          ExitCode::kStopped);
    }
    lost_to_ = stop.received();
    return WithExitCode(
        absl::CancelledError(absl::StrCat("stopped on request after step ", stopped_step_.load(),
                                          " of ", options_.train.steps,
                                          ", and its weights are gone: --save DIR keeps them")),
        ExitCode::kStopped);
  }

  absl::StatusOr<ReadInputs> Inputs() const {
    ReadInputs inputs;
    options_.data.AddTo(corpus_, inputs);
    if (start_.has_value()) {
      MOE_RETURN_IF_ERROR(inputs.AddModel(*start_, "init-from"));
    }
    return inputs;
  }

  absl::Status CheckPaths() const {
    std::vector<FlagPath> inputs = {{"--config", settings_.text("config")}};
    for (const std::string& file : corpus_.files) inputs.push_back({options_.data.flag(), file});
    const std::string& out = options_.out;
    return CheckOutputPaths(inputs, {{"--out", out.empty() ? out : MetricsFile::PathIn(out)},
                                     {"--record-routing", options_.record_routing},
                                     {"--metrics-file", options_.metrics_file},
                                     {"--trace", options_.trace}});
  }

  // Every process makes it: it may be a folder of a host.
  absl::Status MakeFlightFolder() const {
    const std::string& folder = options_.flight_dir;
    if (folder.empty()) return absl::OkStatus();
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (!error) return absl::OkStatus();
    return WriteError("--flight-dir", folder,
                      FileError("make the folder", folder, error.value(), FileFault::kWrite));
  }
  ProcessWatchOptions WatchOptions() const {
    const bool given = !options_.flight_dir.empty();
    return {.fault = options_.fault,
            .folder = given ? options_.flight_dir : options_.train.checkpoints.folder,
            .at_end = given};
  }

  plan::MemoryEstimate Estimate() const {
    return plan::EstimateMemory(plan::ShapeOfTraining(options_.train, launch_.world.ranks));
  }

  // Checks memory on the CPU alone: on a GPU the allocations fail by themselves.
  absl::Status CheckMemory() const {
    if (launch_.device.kind != DeviceKind::kCpu) return absl::OkStatus();
    const std::string too_big =
        measure::TooBig(Estimate(), launch_.world.local_ranks, measure::AvailableMemoryBytes());
    return too_big.empty() ? absl::OkStatus()
                           : absl::ResourceExhaustedError(absl::StrCat("the model ", too_big));
  }

  // Checks the tokenizer, and takes the text that the folder of --save is to have.
  absl::Status PrepareTokenizer() {
    std::string path = options_.tokenizer;
    const bool kept = !options_.train.checkpoints.folder.empty();
    if (!path.empty()) {
      if (!kept) return WrongFlag("--tokenizer", path, "--save DIR with it, where it is kept");
      MOE_RETURN_IF_ERROR(OpenTokenizer(path, options_.train.model.vocab_size).status());
    } else if (!options_.init_from.empty()) {
      path = TokenizerPathOf(options_.init_from);
    }
    if (path.empty() || !kept) return absl::OkStatus();
    auto file = MappedFile::Open(path);
    if (!file.ok()) return InputError("--tokenizer", file.status());
    tokenizer_ = *std::move(file);
    return absl::OkStatus();
  }

  // Does everything that can be refused, before a rank starts. An existing file keeps its content
  // until there is something to write into it; one created here and not written is removed with its
  // owner.
  absl::Status Prepare() {
    MOE_ASSIGN_OR_RETURN(options_, MakeTrainOptions(settings_, launch_.world));
    MOE_RETURN_IF_ERROR(CheckMemory());
    MOE_ASSIGN_OR_RETURN(corpus_, ReadText(options_));
    if (!options_.init_from.empty()) {
      auto model = hf::HfModel::Open(options_.init_from, options_.upcycling);
      if (!model.ok()) return InputError("--init-from", model.status());
      start_ = *std::move(model);
    }
    if (speaks()) MOE_RETURN_IF_ERROR(CheckPaths());
    MOE_RETURN_IF_ERROR(MakeFlightFolder());
    if (!options_.trace.empty()) {
      if (speaks()) MOE_RETURN_IF_ERROR(CheckTraceWritable(settings_));
      trace_ = std::make_unique<TraceFile>(options_.trace, CommTimeout(settings_));
    }
    if (speaks() && !options_.record_routing.empty()) {
      const lm::TrainConfig& train = options_.train;
      MOE_RETURN_IF_ERROR(InputError(
          "--record-routing",
          CheckRoutingTraceFits(
              RoutingHeader(), train.steps,
              train.trainer.micro_batches * train.micro_batch_size * train.sequence_length)));
      MOE_RETURN_IF_ERROR(CheckWritable("--record-routing", options_.record_routing));
    }
    const EarlierRun earlier =
        options_.train.checkpoints.resume == lm::TrainCheckpoints::Resume::kNone
            ? EarlierRun::kRefused
            : EarlierRun::kContinued;
    if (speaks()) MOE_RETURN_IF_ERROR(PrepareTokenizer());
    if (speaks()) {
      MOE_ASSIGN_OR_RETURN(
          curves_, LiveCurves::Create({.tensorboard_dir = options_.tensorboard_dir,
                                       .metrics_file = options_.metrics_file,
                                       .experts = options_.train.model.moe.router.num_experts,
                                       .steps = options_.train.steps},
                                      earlier));
    }
    if (speaks() && !options_.out.empty()) {
      MOE_ASSIGN_OR_RETURN(metrics_, MetricsFile::Create(options_.out, earlier));
      start_line_ = StartLine(Provenance(launch_.device), launch_.world, settings_);
    }
    const std::string& save = options_.train.checkpoints.folder;
    if (!options_.out.empty() || !save.empty()) {
      status_ = std::make_unique<StatusFile>(StatusAtStart(),
                                             std::vector<std::string>{options_.out, save});
    }
    return absl::OkStatus();
  }

  RunStatus StatusAtStart() const {
    RunStatus status;
    status.steps = options_.train.steps;
    status.process = ThisRun();
    status.user = UserName();
    status.ranks = options_.ranks;
    status.backend = backend();
    const std::string& save = options_.train.checkpoints.folder;
    if (!save.empty()) status.save = std::filesystem::absolute(save).string();
    status.command = absl::StrCat(LauncherText(launch_), ShellQuote(invocation_.program), " train");
    for (const std::string& word : invocation_.args) {
      absl::StrAppend(&status.command, " ", ShellQuote(word));
    }
    for (const auto& [key, value] : BuildFacts()) {
      if (key == "version") status.version = value;
      if (key == "commit") status.commit = value;
    }
    return status;
  }

  void PrintStart() const {
    if (settings_.on("quiet") || !speaks()) return;
    if (settings_.on("verbose")) {
      for (const std::string& file : corpus_.files) Say(stderr, "read   {}\n", Printable(file));
    }
    Say(stderr, "{}", StartText(options_, corpus_, backend()));
  }

  // Collective.
  absl::Status PrintPlacement(Communicator& world) {
    const auto stream = MakeInlineStream();
    MOE_ASSIGN_OR_RETURN(const auto hosts, HostsOf(HostId(), world, *stream));
    hosts_ = static_cast<int>(std::set<uint64_t>(hosts.begin(), hosts.end()).size());
    MOE_ASSIGN_OR_RETURN(const std::string text, PlacementText(options_.train, hosts));
    if (!settings_.on("quiet") && speaks()) Say(stderr, "{}", text);
    return absl::OkStatus();
  }

  RoutingTraceHeader RoutingHeader() const {
    const lm::TransformerConfig& model = options_.train.model;
    return {.ranks = options_.ranks / options_.train.trainer.session.mesh.pipeline,
            .expert_parallel_size = options_.train.trainer.session.mesh.expert,
            .num_experts = model.moe.router.num_experts,
            .top_k = model.moe.router.top_k,
            .hidden_size = model.hidden_size,
            .dtype = options_.train.trainer.dtype,
            .moe_layers = model.num_layers / model.moe_layer_freq};
  }

  // The lines before it are written with the first step: a run that ends before leaves the file as
  // it is.
  absl::Status AppendStep(const lm::StepMetrics& metrics) {
    if (metrics_ == nullptr) return absl::OkStatus();
    std::string before;
    if (!appended_) {
      MOE_ASSIGN_OR_RETURN(MetricsFile::EarlierLines earlier, metrics_->LinesBefore(metrics.step));
      if (!earlier.damage.empty()) PrintWarnings(kCommand, {earlier.damage});
      before = std::move(earlier.text);
      if (before.empty()) before = absl::StrCat(start_line_, "\n");
      appended_ = true;
    }
    return metrics_->Append(absl::StrCat(before, StepLine(metrics)));
  }

  // With the first step, before the first checkpoint: the folder is this run's now.
  absl::Status KeepTokenizer() {
    const MappedFile tokenizer = std::exchange(tokenizer_, MappedFile());
    if (tokenizer.bytes().empty()) return absl::OkStatus();
    const std::string& folder = options_.train.checkpoints.folder;
    const std::string path = (std::filesystem::path(folder) / kTokenizerName).string();
    return WriteFile("--save", path, tokenizer.text());
  }

  // The file and its header are written with the first step: a run that ends before leaves none.
  absl::Status AppendRouting(absl::Span<const RoutingTraceRecord> records) {
    std::string lines;
    if (routing_ == nullptr) {
      MOE_ASSIGN_OR_RETURN(routing_, LineFile::Create(options_.record_routing));
      lines = HeaderLine(RoutingHeader());
    }
    for (const RoutingTraceRecord& record : records) lines += RecordLine(record);
    return routing_->Append(lines);
  }

  // Writes the last line of the metrics and the end report. As JSON the report is printed with the
  // measurement.
  absl::Status End(const lm::TrainReport& report) {
    if (metrics_ != nullptr && appended_) MOE_RETURN_IF_ERROR(metrics_->Append(FinalLine(report)));
    curves_->End();
    if (const std::string warning = TraceWarning(report.trace_left_out); !warning.empty()) {
      PrintWarnings(kCommand, {warning});
    }
    return AsJson() ? absl::OkStatus() : Print(ReportText(options_, report, FactsOf(report)));
  }

  RunFacts FactsOf(const lm::TrainReport& report) const {
    RunFacts facts = {
        .backend = backend(),
        .command = ReproducingCommand(invocation_, settings_, launch_, report.bfloat16_order),
        .files = {}};
    if (metrics_ != nullptr) facts.files.push_back(metrics_->path());
    for (std::string& path : curves_->paths()) facts.files.push_back(std::move(path));
    if (!options_.record_routing.empty()) facts.files.push_back(options_.record_routing);
    if (!options_.trace.empty()) facts.files.push_back(options_.trace);
    if (report.saved_step >= 0) {
      facts.files.push_back(
          absl::StrCat(options_.train.checkpoints.folder, "/", StepFolderName(report.saved_step)));
    }
    return facts;
  }

  bool AsJson() const { return settings_.is("output", "json"); }
  bool speaks() const { return launch_.rank() == 0; }
  const char* backend() const { return NameOf(launch_.plan.backend); }

  const Invocation& invocation_;
  const Settings& settings_;
  const Launch& launch_;
  TrainOptions options_;
  lm::Corpus corpus_;
  std::optional<hf::HfModel> start_;  // --init-from
  std::unique_ptr<MetricsFile> metrics_;
  // The first line of the metrics.
  std::string start_line_;
  bool appended_ = false;                   // whether the metrics have a line of this run
  std::atomic<int64_t> stopped_step_ = -1;  // -1: the run took all its steps
  int lost_to_ = 0;
  MappedFile tokenizer_;                // to be kept in --save; empty: none
  std::unique_ptr<LiveCurves> curves_;  // of rank 0
  std::unique_ptr<TraceFile> trace_;
  std::unique_ptr<LineFile> routing_;
  std::unique_ptr<StatusFile> status_;  // nullptr: neither --out nor --save
  int hosts_ = 1;
};

// `lost_to` is set to the signal that ended a run of which nothing is kept.
absl::Status Run(const Invocation& invocation, int& lost_to) {
  std::vector<std::string> warnings;
  MOE_ASSIGN_OR_RETURN(Settings settings,
                       LoadTrainSettings(invocation.args, invocation.environment, warnings));
  if (settings.on("help")) return PrintOnce(invocation, HelpText(TrainHelp()));
  if (settings.on("print-config")) return PrintOnce(invocation, PrintSettings(settings));
  MOE_ASSIGN_OR_RETURN(const Launch launch,
                       PlanLaunch(settings, invocation.environment, ComputesOn::kAnyDevice));
  MOE_RETURN_IF_ERROR(CheckDevices(launch, settings));
  if (const Setting& ep = *settings.Find("ep");
      settings.is(ep.name, "auto") && !settings.is("mesh", "auto")) {
    const MeshShape mesh = {.tensor = settings.integer("tensor-model-parallel-size"),
                            .pipeline = settings.integer("pipeline-model-parallel-size"),
                            .expert_tensor = settings.integer("expert-tensor-parallel-size")};
    const int most = MostExpertRanks(launch.world.ranks, mesh, settings.integer("num-experts"));
    MOE_RETURN_IF_ERROR(settings.Set(ep, {absl::StrCat(most)}, Origin::kFlag, "--ep"));
  }
  if (settings.is("mesh", "auto")) {
    MOE_ASSIGN_OR_RETURN(const std::string chosen, ChooseMesh(launch, settings));
    if (launch.rank() == 0 && !settings.on("quiet")) Say(stderr, "{}", chosen);
  }
  return RunLaunch(kCommand, settings, launch, warnings, [&] {
    TrainRun run(invocation, settings, launch);
    if (settings.on("dry-run")) return run.DryRun();
    absl::Status status = run.Run();
    lost_to = run.lost_to();
    return status;
  });
}

}  // namespace

ExitCode TrainCommand(const Invocation& invocation) {
  int lost_to = 0;
  const ExitCode code = EndCommand(invocation, kCommand, Run(invocation, lost_to));
  // Whoever waits for this process sees the signal that ended it, as with any program that keeps
  // nothing.
  if (lost_to != 0) std::raise(lost_to);
  return code;
}

}  // namespace moe::cli
