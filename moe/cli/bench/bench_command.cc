// moe bench: times and checks collectives and a layer; prints and judges the results.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/strings/str_cat.h>
#include <absl/types/span.h>
#include <fmt/format.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/base/agreed_ranks.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/exit_code.h"
#include "moe/cli/base/launch.h"
#include "moe/cli/base/program.h"
#include "moe/cli/base/provenance.h"
#include "moe/cli/base/terminal.h"
#include "moe/cli/base/trace_file.h"
#include "moe/cli/bench/bench_options.h"
#include "moe/cli/measure/bench_row.h"
#include "moe/cli/measure/collectives.h"
#include "moe/cli/measure/machine_memory.h"
#include "moe/cli/measure/tables.h"
#include "moe/run/session.h"

namespace moe::cli {
namespace {

constexpr char kCommand[] = "bench";

// Prints the rows of a benchmark in the forms that its flags choose: a table for people, unless -o
// selects another form; -oe and -J beside it. Used on the rank that prints.
class BenchOutput {
 public:
  // `model`: any row, from which the keys are taken.
  BenchOutput(const BenchCall& call, const measure::Fields& model);

  // `text`: the table's version of the same content.
  absl::Status Begin(const std::string& text) {
    if (err_.has_value()) PrintAside(err_->Begin());
    return Print(out_.has_value() ? out_->Begin() : text);
  }

  absl::Status Add(const measure::Fields& row, const std::string& text) {
    rows_.push_back(Whole(row));
    if (err_.has_value()) PrintAside(err_->Row(rows_.back()));
    return Print(out_.has_value() ? out_->Row(rows_.back()) : text);
  }

  absl::Status End(const std::string& text) {
    if (err_.has_value()) PrintAside(err_->End());
    MOE_RETURN_IF_ERROR(Print(out_.has_value() ? out_->End() : text));
    if (call_.options.json_path.empty()) return absl::OkStatus();
    return WriteFile("-J", call_.options.json_path,
                     measure::WriteTable(measure::TableForm::kJson, keys_, rows_));
  }

  // Exit code 1 if --fail-if holds for a row; `where` ends the message: "at size 4096".
  absl::Status CheckBound(absl::FunctionRef<std::string(size_t row)> where) const {
    for (size_t i = 0; i < rows_.size() && call_.fail_if.has_value(); ++i) {
      const auto lookup = [&](absl::string_view column) {
        return measure::NumberOf(rows_[i], column);
      };
      if (!call_.fail_if->Holds(lookup)) continue;
      return CheckFailed(absl::StrCat("--fail-if '", call_.fail_if->text(), "' holds ", where(i)));
    }
    return absl::OkStatus();
  }

 private:
  // Adds the origin, and the flags that no other key holds.
  measure::Fields Whole(measure::Fields row) const {
    measure::AddOrigin(call_.provenance, row);
    row.push_back({"settings", BenchIdentity(call_.settings, call_.operation)});
    return row;
  }

  const BenchCall& call_;
  const std::vector<std::string> keys_;
  std::optional<measure::TableWriter> out_, err_;
  std::vector<measure::Fields> rows_;
};

BenchOutput::BenchOutput(const BenchCall& call, const measure::Fields& model)
    : call_(call), keys_(measure::KeysOf(Whole(model))) {
  const auto start = [&](const char* flag, std::optional<measure::TableWriter>& writer) {
    const auto form = measure::TableFormOf(call.settings.text(flag));  // nullopt for "table"
    if (form.has_value()) writer.emplace(*form, keys_);
  };
  start("output", out_);
  start("output-stderr", err_);
}

const char* Plural(int count) {
  return count == 1 ? "" : "s";
}

measure::HeatMap HeatMapOf(absl::Span<const measure::BenchRow> rows) {
  measure::HeatMap map{.ranks = rows[0].ranks, .gbytes_per_s = {}, .title = {}};
  for (const measure::BenchRow& row : rows) map.gbytes_per_s.push_back(row.algbw());
  map.title = absl::StrCat("GB/s between ranks, ", rows[0].size_bytes, " bytes, ",
                           rows[0].transport, "; the diagonal copies inside the rank");
  return map;
}

// `routing`: the file of --routing; empty without one.
AgreedRun AgreedRunOf(const BenchCall& call, const Launch& launch, const std::string& routing) {
  return {.launch = launch,
          .settings = call.settings,
          .command = kCommand,
          .operation = call.operation,
          .inputs = [routing]() -> absl::StatusOr<ReadInputs> {
            ReadInputs inputs;
            if (!routing.empty()) MOE_RETURN_IF_ERROR(inputs.AddFile("file", "routing", routing));
            return inputs;
          }};
}

class BenchRun {
 public:
  BenchRun(BenchCall& call, const Launch& launch) : call_(call), launch_(launch) {}

  absl::Status Run() {
    MOE_RETURN_IF_ERROR(Prepare());
    BenchOutput output(call_, measure::BenchFields({}));
    const auto body = [&](std::unique_ptr<Communicator> world) -> absl::Status {
      return OrAbort(*world, OnRank(*world, output));
    };
    MOE_RETURN_IF_ERROR(
        RunAgreedRanks(AgreedRunOf(call_, launch_, options_.spec.routing.path), body));
    if (!speaks()) return absl::OkStatus();
    MOE_RETURN_IF_ERROR(End(output));
    return Verdict(output);
  }

 private:
  // Refuses everything that can be refused before a rank starts.
  absl::Status Prepare() {
    MOE_ASSIGN_OR_RETURN(options_, MakeCollectiveOptions(call_, launch_));
    MOE_RETURN_IF_ERROR(SetFailIf(measure::BenchFields({}), call_));
    MOE_RETURN_IF_ERROR(CheckMemory());
    return speaks() ? CheckOutputs(call_.settings, options_.spec.routing) : absl::OkStatus();
  }

  // On the CPU alone: on a GPU allocations fail by themselves.
  absl::Status CheckMemory() const {
    if (launch_.device.kind != DeviceKind::kCpu) return absl::OkStatus();
    measure::CaseSpec spec = options_.spec;
    spec.size_bytes = *std::max_element(options_.sizes.begin(), options_.sizes.end());
    const int ranks = launch_.world.local_ranks;
    const double needed = measure::MemoryOf(spec, ranks);
    const auto available = static_cast<double>(measure::AvailableMemoryBytes());
    if (available == 0 || needed <= available) return absl::OkStatus();
    const double fits = available / needed * static_cast<double>(spec.size_bytes);
    return absl::ResourceExhaustedError(
        fmt::format("size {} needs {:.0f} MiB for {} rank{} of this machine, expected at most the "
                    "{:.0f} MiB that are available: -e {:.0f}M and less fit",
                    spec.size_bytes, needed / 0x1p20, ranks, Plural(ranks), available / 0x1p20,
                    std::floor(fits / 0x1p20)));
  }

  absl::Status OnRank(Communicator& world, BenchOutput& output) {
    const bool first = world.rank() == 0;
    if (call_.options.pin) MOE_RETURN_IF_ERROR(PinRank(launch_, world, /*threads=*/1));
    MOE_ASSIGN_OR_RETURN(const Device device, DeviceOfRank(launch_.device.kind, world));
    MOE_ASSIGN_OR_RETURN(const auto stream, measure::StreamOfCalls(device));
    MOE_ASSIGN_OR_RETURN(const auto trace, RankTrace::Create(call_.settings.text("trace"), world));
    measure::MeasureOptions measure = call_.options.measure;
    measure.trace = trace->recorder();
    if (measure.trace != nullptr) measure.trace->AddLane("collective", stream.get());
    MOE_ASSIGN_OR_RETURN(const auto facts, measure::FindWorldFacts(world));
    const std::string head = nccl() ? measure::NcclHead() : pairs() ? "" : measure::BenchHead();
    if (first) MOE_RETURN_IF_ERROR(output.Begin(About(facts) + head));
    for (const int64_t size : options_.sizes) {
      measure::CaseSpec spec = options_.spec;
      spec.size_bytes = size;
      MOE_ASSIGN_OR_RETURN(auto rows, measure::MeasureRows(spec, measure, facts, world, *stream));
      if (nccl() && call_.settings.is("output", "table")) {
        spec.form = measure::Form::kOther;
        MOE_ASSIGN_OR_RETURN(const auto others,
                             measure::MeasureRows(spec, measure, facts, world, *stream));
        for (size_t i = 0; i < rows.size(); ++i) {
          rows[i].other_time_us = others[i].time_us;
          rows[i].other_wrong = others[i].wrong;
        }
      }
      if (first && size == options_.sizes.front()) Note(rows.front());
      if (first) MOE_RETURN_IF_ERROR(Add(rows, output));
    }
    return trace->Write();
  }

  std::string About(const measure::WorldFacts& facts) const {
    const bool skewed = options_.spec.op == measure::Op::kAllToAllV;
    std::string text = fmt::format("# moe bench {}: {} rank{} on {} host{}, {}", call_.operation,
                                   launch_.world.ranks, Plural(launch_.world.ranks), facts.hosts,
                                   Plural(facts.hosts), facts.transport);
    if (skewed)
      absl::StrAppend(&text, ", routing ", options_.spec.routing.text, ", seed ",
                      options_.spec.seed);
    if (options_.spec.node_size > 0) {
      absl::StrAppend(&text, ", every ", options_.spec.node_size, " ranks stand for a host");
    }
    return absl::StrCat(text, "\n", TimeText(call_, "max over ranks of the mean"));
  }

  // Reports which algorithm was measured in place of the requested one.
  void Note(const measure::BenchRow& row) const {
    if (call_.settings.on("quiet") || options_.spec.dispatch != DispatchAlgorithm::kDirect) return;
    if (row.algorithm == "direct") return;
    Say(stderr, "moe bench: --dispatch direct needs peer memory, which {} has not: {}\n",
        row.backend, row.algorithm);
  }

  // Adds the rows of one size: one row, or for p2p all pairs.
  absl::Status Add(absl::Span<const measure::BenchRow> rows, BenchOutput& output) {
    for (const measure::BenchRow& row : rows) {
      std::string text;
      if (nccl()) {
        text = measure::NcclLine(row);
      } else if (!pairs()) {
        text = measure::BenchLine(row, call_.options.measure.max_noise_pct);
      } else if (&row == &rows.back()) {
        text = measure::HeatText(HeatMapOf(rows));
      }
      MOE_RETURN_IF_ERROR(output.Add(measure::BenchFields(row), text));
      rows_.push_back(row);
    }
    return absl::OkStatus();
  }

  absl::Status End(BenchOutput& output) const {
    std::vector<double> cvs_pct;
    for (const measure::BenchRow& row : rows_) cvs_pct.push_back(row.samples_us.cv_pct);
    const std::string foot =
        nccl() || pairs() ? measure::NcclFoot(rows_) : measure::BenchFoot(rows_);
    return output.End(foot + measure::NoiseFoot(cvs_pct, call_.options.measure.max_noise_pct));
  }

  // Called by the process that prints alone: a launcher ends the others as soon as one fails,
  // perhaps before the table is printed.
  absl::Status Verdict(const BenchOutput& output) const {
    int64_t wrong = 0;
    for (const measure::BenchRow& row : rows_) {
      wrong += std::max<int64_t>(0, row.wrong) + std::max<int64_t>(0, row.other_wrong);
    }
    if (wrong > 0) {
      return CheckFailed(
          absl::StrCat(wrong, " wrong elements, expected none; see the column #wrong"));
    }
    return output.CheckBound([&](size_t i) {
      const measure::BenchRow& row = rows_[i];
      const std::string pair =
          row.source < 0 ? "" : fmt::format(" from {} to {}", row.source, row.destination);
      return fmt::format("at size {}{}: time {:.2f} us, algbw {:.2f}, busbw {:.2f} GB/s",
                         row.size_bytes, pair, row.time_us, row.algbw(), row.busbw());
    });
  }

  bool speaks() const { return launch_.rank() == 0; }
  bool pairs() const { return options_.spec.op == measure::Op::kPointToPoint; }
  bool nccl() const { return options_.format == BenchFormat::kNccl; }

  BenchCall& call_;
  const Launch& launch_;
  CollectiveOptions options_;
  std::vector<measure::BenchRow> rows_;  // on the rank that prints
};

// Prints and judges the rows of a layer.
absl::Status Show(const BenchCall& call, const std::string& about,
                  const std::vector<measure::Fields>& rows, const std::string& foot) {
  const double max_noise_pct = call.options.measure.max_noise_pct;
  const auto columns = measure::LayerColumns();
  BenchOutput output(call, rows.front());
  MOE_RETURN_IF_ERROR(
      output.Begin(absl::StrCat(about, TimeText(call, "median"), measure::TableHead(columns))));
  std::vector<double> cvs_pct;
  for (const measure::Fields& row : rows) {
    MOE_RETURN_IF_ERROR(output.Add(row, measure::TableLine(columns, row, max_noise_pct)));
    cvs_pct.push_back(*measure::NumberOf(row, "cv"));
  }
  MOE_RETURN_IF_ERROR(output.End(measure::NoiseFoot(cvs_pct, max_noise_pct) + foot));
  const auto which = [&](size_t i) {
    return absl::StrCat(measure::Find(rows[i], "pass")->text(), " ",
                        measure::Find(rows[i], "phase")->text(), " ");
  };
  for (size_t i = 0; i < rows.size(); ++i) {
    const measure::Cell& wrong = *measure::Find(rows[i], "nwrong");
    if (!(wrong.number() > 0)) continue;
    return CheckFailed(
        absl::StrCat(which(i), "has ", wrong.text(), " wrong elements, expected none"));
  }
  return output.CheckBound([&](size_t i) {
    return absl::StrCat("for ", which(i), "with a time of ",
                        measure::Find(rows[i], "time_us")->text(), " us");
  });
}

std::string RouterText(const measure::LayerSpec& spec) {
  const RouterConfig& router = spec.layer.router;
  const std::string capacity = router.capacity_factor.has_value()
                                   ? absl::StrCat(", capacity ", *router.capacity_factor)
                                   : "";
  const std::string chosen = spec.routing.has_value() ? absl::StrCat("routing ", spec.routing->text)
                                                      : absl::StrCat("router ", router.gate);
  return chosen + capacity;
}

absl::Status RunLayerBench(BenchCall& call, const Launch& launch) {
  MOE_ASSIGN_OR_RETURN(const measure::LayerSpec s, MakeLayerSpec(call, launch));
  MOE_RETURN_IF_ERROR(SetFailIf(measure::LayerFields({}, {}), call));
  if (launch.rank() == 0) {
    MOE_RETURN_IF_ERROR(CheckOutputs(call.settings, s.routing.value_or(measure::RoutingSpec{})));
  }
  const int threads = s.trainer.session.threads;
  measure::LayerResult result;
  const auto body = [&](std::unique_ptr<Communicator> world) -> absl::Status {
    const bool first = world->rank() == 0;
    if (call.options.pin) MOE_RETURN_IF_ERROR(PinRank(launch, *world, threads));
    MOE_ASSIGN_OR_RETURN(const auto trace, RankTrace::Create(call.settings.text("trace"), *world));
    measure::MeasureOptions measure = call.options.measure;
    measure.trace = trace->recorder();
    MOE_ASSIGN_OR_RETURN(auto mine, measure::MeasureLayer(s, measure, std::move(world)));
    MOE_RETURN_IF_ERROR(trace->Write());
    if (first) result = std::move(mine);
    return absl::OkStatus();
  };
  const std::string routing = s.routing.has_value() ? s.routing->path : "";
  MOE_RETURN_IF_ERROR(RunAgreedRanks(AgreedRunOf(call, launch, routing), body));
  if (launch.rank() != 0) return absl::OkStatus();
  std::vector<measure::Fields> rows;
  for (const measure::LayerRow& row : result.rows)
    rows.push_back(measure::LayerFields(result, row));
  const MeshShape& mesh = s.trainer.session.mesh;
  std::string shared;
  if (mesh.tensor > 1) absl::StrAppend(&shared, ", TP ", mesh.tensor);
  if (mesh.expert_tensor > 1) absl::StrAppend(&shared, ", ETP ", mesh.expert_tensor);
  const std::string about = fmt::format(
      "# moe bench layer: {} rank{} ({}{}) x {} tokens x top-{} on {} experts, H {}, F {}, {}, {} "
      "thread{} a rank, {}\n",
      launch.world.ranks, Plural(launch.world.ranks), result.backend, shared, s.tokens,
      s.layer.router.top_k, s.layer.router.num_experts, s.layer.router.hidden_size,
      s.layer.ffn_hidden_size, moe::NameOf(s.trainer.dtype), threads, Plural(threads),
      RouterText(s));
  const measure::LayerFigures& f = result.figures;
  const std::string foot = fmt::format(
      "# {:.0f} tokens/s, drop {:.2f}%, maxvio {:.2f}, dead {}, peak {:.1f} MiB a rank\n",
      f.tokens_per_s, 100 * f.drop_fraction, f.max_vio, f.dead_experts,
      static_cast<double>(f.peak_bytes) / (1 << 20));
  return Show(call, about, rows, foot);
}

// Other backends move host memory alone: times would include copies to and from it.
absl::Status CheckExchange(const Launch& launch, const Settings& settings) {
  if (launch.device.kind == DeviceKind::kCuda && launch.plan.backend != Backend::kNccl) {
    return absl::UnimplementedError(
        "--device is cuda, expected cpu, or --backend nccl, which moves memory of GPUs");
  }
  MOE_RETURN_IF_ERROR(CheckTwoHops(settings, launch.device));
  return CheckDevices(launch, settings);
}

absl::Status RunCall(BenchCall& call, const Launch& launch) {
  const bool collective = ValueOf(call.operation, measure::kOpWords).has_value();
  const int ranks = launch.world.ranks;
  const int threads = collective ? 1 : call.settings.integer("threads");
  if (launch.rank() == 0) {
    call.provenance = Provenance(launch.device);
    call.busy = BusyText(LookAtLoad(), launch.plan.processes() ? ranks : 1, ranks * threads);
    const bool may_meet = !launch.plan.processes() && ranks * threads <= launch.world.cores;
    if (!call.busy.empty() && may_meet && !call.settings.on("pin")) {
      absl::StrAppend(&call.busy, "; --pin keeps ranks off each other's cores");
    }
    if (!call.busy.empty() && !call.settings.is("output", "table") && !call.settings.on("quiet")) {
      Say(stderr, "moe bench: busy: {}\n", call.busy);
    }
  }
  MOE_RETURN_IF_ERROR(FillBenchOptions(call));
  if (!collective) {
    MOE_RETURN_IF_ERROR(CheckDevices(launch, call.settings));
    return RunLayerBench(call, launch);
  }
  MOE_RETURN_IF_ERROR(CheckExchange(launch, call.settings));
  return BenchRun(call, launch).Run();
}

absl::Status Run(const Invocation& invocation) {
  std::vector<std::string> warnings;
  MOE_ASSIGN_OR_RETURN(BenchCall call,
                       LoadBenchCall(invocation.args, invocation.environment, warnings));
  if (call.settings.on("help")) return PrintOnce(invocation, HelpText(BenchHelp(call.operation)));
  if (call.settings.on("print-config")) return PrintOnce(invocation, PrintSettings(call.settings));
  MOE_RETURN_IF_ERROR(RefuseUnread(call));
  MOE_ASSIGN_OR_RETURN(const Launch launch,
                       PlanLaunch(call.settings, invocation.environment, ComputesOn::kAnyDevice));
  return RunLaunch(kCommand, call.settings, launch, warnings,
                   [&] { return RunCall(call, launch); });
}

}  // namespace

ExitCode BenchCommand(const Invocation& invocation) {
  return EndCommand(invocation, kCommand, Run(invocation));
}

}  // namespace moe::cli
