// moe plan: layouts of a training step by predicted time and memory.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/strip.h>
#include <fmt/format.h>

#include "kernels/base/machine_limits.h"
#include "kernels/base/status_macros.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/config_file.h"
#include "moe/cli/base/launch.h"
#include "moe/cli/base/layout_settings.h"
#include "moe/cli/base/program.h"
#include "moe/cli/base/terminal.h"
#include "moe/cli/measure/machine_memory.h"
#include "moe/cli/measure/tables.h"
#include "moe/cli/plan/calibration_file.h"
#include "moe/cli/plan/plan_check.h"
#include "moe/cli/plan/plan_options.h"
#include "moe/cli/plan/plan_output.h"
#include "moe/hf/model_rule.h"
#include "moe/io/bounded_json.h"
#include "moe/io/file.h"
#include "moe/plan/checkpoint_interval.h"
#include "moe/plan/model_cost.h"
#include "moe/plan/routing_sim.h"

namespace moe::cli {
namespace {

constexpr char kCommand[] = "plan";

// Passes through a layer that are drawn: a step of 8 layers and 4 micro-batches.
constexpr int kDrawnPasses = 32;

class PlanRun {
 public:
  PlanRun(const Settings& settings, absl::Span<const std::string> environment)
      : settings_(settings), environment_(environment) {}

  absl::Status Run() {
    MOE_RETURN_IF_ERROR(Fill(settings_, PlanSettings(options_)));
    MOE_RETURN_IF_ERROR(FindLaunch());
    MOE_ASSIGN_OR_RETURN(const lm::TransformerConfig model, ReadModel());
    MOE_RETURN_IF_ERROR(MakeMachine());
    const DeviceKind device = calibrated_on_cpu_ ? DeviceKind::kCpu : DeviceKind::kCuda;
    MOE_ASSIGN_OR_RETURN(train_, TrainSettingsOf(model, settings_, options_, device));
    MOE_RETURN_IF_ERROR(MakeSearch());
    MOE_RETURN_IF_ERROR(ReadRouting());
    MOE_ASSIGN_OR_RETURN(result_, plan::SearchMeshes(search_));
    MOE_RETURN_IF_ERROR(MakeRows());
    MOE_RETURN_IF_ERROR(Check());
    if (!speaks()) return absl::OkStatus();
    MOE_RETURN_IF_ERROR(Print(TextIn(settings_.text("output"))));
    if (!settings_.empty("output-stderr")) PrintAside(TextIn(settings_.text("output-stderr")));
    if (!result_.fitting.empty()) return absl::OkStatus();
    return absl::ResourceExhaustedError(absl::StrCat("no layout fits: ", Remedy()));
  }

 private:
  absl::StatusOr<lm::TransformerConfig> ReadModel() const {
    const std::string& path = options_.model;
    if (path.empty()) {
      return absl::InvalidArgumentError(
          "no --model, expected --model DIR or --model config.json of a public model");
    }
    std::error_code ignored;
    const std::string file =
        std::filesystem::is_directory(path, ignored) ? absl::StrCat(path, "/config.json") : path;
    const auto mapped = MappedFile::Open(file);
    if (!mapped.ok()) return InputError("--model", mapped.status());
    auto config = hf::ParseModelConfig(file, mapped->text());
    if (!config.ok()) return InputError("--model", config.status());
    if (!config->unread.empty()) {
      std::vector<std::string> shown;
      for (const std::string& key : config->unread) shown.push_back(Shown(key));
      Warn(absl::StrCat(file, ": keys that the plan does not know: ", absl::StrJoin(shown, ", ")));
    }
    return std::move(config->model);
  }

  void Warn(const std::string& text) const {
    if (speaks()) PrintWarnings(kCommand, {text});
  }

  bool speaks() const { return launch_.rank() == 0; }

  // Of --check; else all ranks are taken to be here.
  absl::Status FindLaunch() {
    launch_.world = {.ranks = options_.ranks, .local_ranks = options_.ranks, .cores = UsableCpus()};
    if (options_.check == 0) return absl::OkStatus();
    Settings train(TrainSettings());
    MOE_RETURN_IF_ERROR(
        train.Set(*train.Find("ranks"), {absl::StrCat(options_.ranks)}, Origin::kFlag, "--ranks"));
    MOE_ASSIGN_OR_RETURN(launch_, PlanLaunch(train, environment_));
    return absl::OkStatus();
  }

  absl::Status MakeMachine() {
    plan::Machine& machine = search_.machine;
    machine = plan::MachineOf(*plan::FindGpu(options_.gpu));
    if (!options_.calibration.empty()) {
      MOE_RETURN_IF_ERROR(ApplyCalibration());
    } else if (settings_.is("dtype", "f32")) {
      return WrongFlag("--dtype", "f32", "bf16 or f16: --gpu has figures of 16-bit products");
    }
    if (options_.node > 0) machine.node_ranks = options_.node;
    if (!options_.memory.empty()) {
      MOE_ASSIGN_OR_RETURN(machine.memory_bytes, SizeInBytes("--hbm", options_.memory));
    }
    if (options_.check > 0 && !calibrated_on_cpu_) {
      return WrongFlag("--check", absl::StrCat(options_.check),
                       "--calibrate with rows of this machine's CPU, where layouts are run");
    }
    return absl::OkStatus();
  }

  absl::Status ApplyCalibration() {
    MOE_ASSIGN_OR_RETURN(
        const CalibrationFile file,
        ReadCalibration(options_.calibration, options_.ranks, settings_.text("dtype")));
    plan::Machine& machine = search_.machine;
    if (file.on_cpu) {
      // Ranks share the cores, so that nothing runs beside their passes, and the memory.
      const World& world = launch_.world;
      machine.overlap = 0;
      machine.sharers = std::max(1.0, 1.0 * world.local_ranks / world.cores);
      machine.node_ranks = world.local_ranks;
      machine.memory_bytes =
          static_cast<double>(measure::AvailableMemoryBytes()) / world.local_ranks;
    }
    auto calibrated = plan::Calibrate(file.samples, machine);
    if (!calibrated.ok()) return InputError("--calibrate", calibrated.status());
    machine = *std::move(calibrated);
    machine.name = file.on_cpu ? file.cpu : file.gpu;
    calibrated_on_cpu_ = file.on_cpu;
    const std::string other = OtherOrigin(file);
    if (other.empty()) return absl::OkStatus();
    if (options_.check > 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("--calibrate is of another machine or build: ", other,
                       ", expected rows of this one with --check"));
    }
    Warn(absl::StrCat("--calibrate is of another machine or build: ", other));
    return absl::OkStatus();
  }

  absl::Status MakeSearch() {
    search_.goal = options_.goal;
    search_.ranks = options_.ranks;
    search_.sequences = options_.sequences > 0 ? options_.sequences
                                               : PlanOptions::kSequencesOfRank * options_.ranks;
    MOE_ASSIGN_OR_RETURN(const TrainOptions base, CheckTrainSettings(*train_, options_.ranks));
    search_.base = base.train;
    return absl::OkStatus();
  }

  absl::Status ReadRouting() {
    if (options_.routing.empty()) return absl::OkStatus();
    const int experts = search_.base.model.moe.router.num_experts;
    absl::string_view number = options_.routing;
    if (absl::ConsumePrefix(&number, "dirichlet:")) {
      double concentration = 0;
      if (!absl::SimpleAtod(number, &concentration) || !(concentration >= 0.01) ||
          concentration > 1e9) {
        return WrongFlag("--routing-trace", options_.routing, "dirichlet:A with 0.01 <= A <= 1e9");
      }
      shares_ = plan::DirichletShares(experts, concentration, kDrawnPasses, 0);
    } else {
      const auto file = MappedFile::Open(options_.routing);
      if (!file.ok()) return InputError("--routing-trace", file.status());
      const auto trace = ParseRoutingTrace(options_.routing, file->text());
      if (!trace.ok()) return InputError("--routing-trace", trace.status());
      if (trace->header.num_experts != experts) {
        return WrongFlag("--routing-trace", options_.routing,
                         absl::StrCat("a trace of ", experts, " experts as --model has, not of ",
                                      trace->header.num_experts));
      }
      shares_ = plan::TraceShares(*trace);
    }
    if (shares_.empty()) {
      return WrongFlag("--routing-trace", options_.routing, "a trace with slots");
    }
    search_.row_skew = [this](int expert) {
      return ImbalanceOf(expert).slowest_group;
    };
    return absl::OkStatus();
  }

  const plan::Imbalance& ImbalanceOf(int expert) {
    const auto [found, missing] = imbalances_.try_emplace(expert);
    if (missing) {
      found->second = plan::SimulateRouting(shares_, {.ranks = options_.ranks,
                                                      .expert = expert,
                                                      .top_k = search_.base.model.moe.router.top_k,
                                                      .tokens = search_.base.sequence_length});
    }
    return found->second;
  }

  // Layouts that moe train takes, the best first, then meshes that are too big.
  absl::Status MakeRows() {
    const auto shown = static_cast<size_t>(std::max(options_.shown, options_.check));
    for (const plan::Candidate& candidate : result_.fitting) {
      if (rows_.size() == shown) break;
      const Settings settings = WithLayout(*train_, candidate);
      MOE_RETURN_IF_ERROR(CheckTrainSettings(settings, options_.ranks).status());
      rows_.push_back({.candidate = candidate, .reason = "", .command = TrainLine(settings)});
    }
    for (const plan::Candidate& candidate : result_.too_big) {
      if (too_big_.size() == shown) break;
      too_big_.push_back({.candidate = candidate,
                          .fits = false,
                          .reason = TooBigText(candidate.memory, Limit()),
                          .command = TrainLine(WithLayout(*train_, candidate))});
    }
    return absl::OkStatus();
  }

  absl::Status Check() {
    const size_t most = std::min(rows_.size(), static_cast<size_t>(options_.check));
    return MeasureRows(*train_, launch_, options_, absl::MakeSpan(rows_).subspan(0, most));
  }

  std::string TextIn(const std::string& form) {
    if (const auto table_form = measure::TableFormOf(form)) {
      std::vector<measure::Fields> rows;
      for (const PlanRow& row : rows_) rows.push_back(PlanFields(row, Limit()));
      for (const PlanRow& row : too_big_) rows.push_back(PlanFields(row, Limit()));
      return measure::WriteTable(*table_form, measure::KeysOf(PlanFields({}, 0)), rows);
    }
    const double total = static_cast<double>(plan::SizeOf(search_.base.model).total);
    const double flops = plan::TokenFlops(plan::CostOf(search_.base.model),
                                          static_cast<double>(search_.base.sequence_length));
    std::string text = fmt::format(
        "{:.2f} G parameters, {:.2f} GFLOP a token; {}, {}, {:.1f} GiB each; {} layouts\n",
        total / 1e9, flops / 1e9, Counted(options_.ranks, "rank"), search_.machine.name,
        Limit() / 0x1p30, WithCommas(result_.candidates));
    if (!rows_.empty()) text += "\n" + PlanTable(rows_);
    text += RefusedText() + RoutingText() + IntervalText();
    if (options_.check > 0 && !rows_.empty()) text += "\n" + CheckText(rows_);
    if (!rows_.empty()) text += "\n" + rows_.front().command + "\n";
    return text;
  }

  // Meshes that are too big, and layouts that moe train does not have.
  std::string RefusedText() const {
    std::string text;
    for (const PlanRow& row : too_big_) {
      text += fmt::format("too big      {} {}\n", MeshText(row.candidate.layout.mesh), row.reason);
    }
    if (result_.too_big.size() > too_big_.size()) {
      text += fmt::format("             and {} more meshes\n",
                          result_.too_big.size() - too_big_.size());
    }
    for (const auto& [flag, refused] : result_.refused) {
      text +=
          fmt::format("not planned  {} layouts: {}\n", WithCommas(refused.layouts), refused.first);
    }
    return text.empty() ? text : "\n" + text;
  }

  std::string RoutingText() {
    if (shares_.empty()) return "";
    std::string text = fmt::format(
        "\nrouting {} over {} passes: rows of the busiest rank over even "
        "rows, for which a step waits\n",
        options_.routing, shares_.size());
    for (const auto& [expert, imbalance] : imbalances_) {
      text += fmt::format(
          "EP {:<5} mean group {:.3f}, slowest of {} groups {:.3f}, worst pass "
          "{:.2f}{}\n",
          expert, imbalance.mean_group, options_.ranks / expert, imbalance.slowest_group,
          imbalance.worst_pass, NodesText(expert));
    }
    return text;
  }

  // What hierarchical dispatch and gates of groups change between nodes.
  std::string NodesText(int expert) const {
    const int node = search_.machine.node_ranks;
    if (expert <= node || expert % node != 0) return "";
    const RouterConfig& router = search_.base.model.moe.router;
    const int nodes = expert / node;
    const double reached = plan::NodesOfToken(shares_, nodes, router.top_k);
    return fmt::format(
        "; a token reaches {:.2f} of {} nodes, {:.2f} with a gate that keeps half of them; a rank "
        "sends {} messages between nodes a movement, hierarchical {} on the way to experts",
        reached, nodes, std::min(reached, nodes / 2.0), expert - node, nodes - 1);
  }

  std::string IntervalText() const {
    if (!options_.mtbf_hours.has_value()) return "";
    const plan::CheckpointInterval best =
        plan::BestInterval(options_.stall_s, *options_.mtbf_hours * 3600);
    std::string steps;
    if (!rows_.empty()) {
      const double step = rows_.front().candidate.time.total();
      steps = fmt::format(" (--save-interval {:.0f})",
                          std::max(1.0, std::round(best.interval_s / step)));
    }
    return fmt::format(
        "\ncheckpoints every {:.0f} s{} lose {:.2f} % of the time: {:.2f} % stalls, "
        "{:.2f} % done again after failures\n",
        best.interval_s, steps, 100 * best.lost(), 100 * best.stalled, 100 * best.done_again);
  }

  // Of the least that was found.
  std::string Remedy() const {
    if (result_.too_big.empty()) return "moe train takes none of them, the table says why";
    const plan::MemoryEstimate& least = result_.too_big.front().memory;
    std::string text = fmt::format("the nearest {}; --hbm {:.1f}GiB would do",
                                   TooBigText(least, Limit()), least.total_bytes() / 0x1p30 + 0.1);
    if (const auto ranks = plan::RanksThatFit(search_)) {
      absl::StrAppend(&text, ", or --gpus ", *ranks);
    }
    return text;
  }

  double Limit() const { return search_.machine.memory_bytes; }

  const Settings& settings_;
  const absl::Span<const std::string> environment_;
  PlanOptions options_;
  Launch launch_;  // of this machine
  bool calibrated_on_cpu_ = false;
  std::optional<Settings> train_;  // of every candidate, without layout
  plan::SearchOptions search_;
  plan::PassShares shares_;                    // empty: routing is taken as even
  std::map<int, plan::Imbalance> imbalances_;  // by EP
  plan::SearchResult result_;
  std::vector<PlanRow> rows_, too_big_;
};

absl::Status Run(const Invocation& invocation) {
  PlanOptions defaults;
  Settings settings(PlanSettings(defaults));
  std::vector<std::string> warnings;
  MOE_RETURN_IF_ERROR(LoadSettings(invocation.args, invocation.environment, settings, warnings));
  if (settings.on("help")) return PrintOnce(invocation, HelpText(PlanHelp()));
  if (settings.on("print-config")) return PrintOnce(invocation, PrintSettings(settings));
  if (!invocation.first() && settings.integer("check") == 0) return absl::OkStatus();
  if (invocation.first()) PrintWarnings(kCommand, warnings);
  return PlanRun(settings, invocation.environment).Run();
}

}  // namespace

ExitCode PlanCommand(const Invocation& invocation) {
  return EndCommand(invocation, kCommand, Run(invocation));
}

}  // namespace moe::cli
