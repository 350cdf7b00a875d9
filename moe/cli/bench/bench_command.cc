// moe bench: times and checks collectives.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <absl/status/status.h>
#include <absl/strings/str_cat.h>
#include <absl/types/span.h>
#include <fmt/format.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/launch.h"
#include "moe/cli/base/program.h"
#include "moe/cli/base/provenance.h"
#include "moe/cli/base/terminal.h"
#include "moe/cli/base/trace_file.h"
#include "moe/cli/bench/bench_options.h"
#include "moe/cli/bench/bench_row.h"
#include "moe/cli/bench/collectives.h"
#include "moe/cli/bench/tables.h"
#include "moe/session.h"

namespace moe::cli {
namespace {

constexpr char kCommand[] = "bench";

bench::HeatMap HeatMapOf(absl::Span<const bench::BenchRow> rows) {
  bench::HeatMap map{.ranks = rows[0].ranks, .gbytes_per_s = {}, .title = {}};
  for (const bench::BenchRow& row : rows) map.gbytes_per_s.push_back(row.algbw());
  map.title = absl::StrCat("GB/s between ranks, ", rows[0].size_bytes, " bytes, ",
                           rows[0].transport, "; the diagonal copies inside the rank");
  return map;
}

// Prints rows as they come, in the forms that the options ask for. Of the rank that speaks.
class BenchOutput {
 public:
  explicit BenchOutput(const BenchOptions& options);

  // `about`: lines that say what is measured; part of the table, not of -o.
  absl::Status Begin(const std::string& about);
  // The rows of one size: one, for p2p all pairs.
  absl::Status Add(absl::Span<const bench::BenchRow> rows);
  // Footers and files.
  absl::Status End();
  const std::vector<bench::BenchRow>& rows() const { return rows_; }

 private:
  std::string Foot() const;
  bool pairs() const { return options_.spec.op == bench::Op::kPointToPoint; }

  const BenchOptions& options_;
  std::unique_ptr<bench::TableWriter> out_, err_;
  std::vector<bench::BenchRow> rows_;
  std::vector<bench::BenchRow> last_;  // of the last size
};

BenchOutput::BenchOutput(const BenchOptions& options) : options_(options) {
  const auto writer = [](std::optional<bench::TableForm> form) {
    return form.has_value()
               ? std::make_unique<bench::TableWriter>(*form, bench::KeysOf(bench::BenchFields({})))
               : nullptr;
  };
  out_ = writer(options.output.form);
  err_ = writer(options.output.form_err);
}

absl::Status BenchOutput::Begin(const std::string& about) {
  if (err_ != nullptr) PrintAside(err_->Begin());
  if (out_ != nullptr) return Print(out_->Begin());
  if (options_.format == BenchFormat::kNccl) return Print(absl::StrCat(about, bench::NcclHead()));
  return Print(absl::StrCat(about, pairs() ? "" : bench::BenchHead()));
}

absl::Status BenchOutput::Add(absl::Span<const bench::BenchRow> rows) {
  std::string text;
  for (const bench::BenchRow& row : rows) {
    const std::vector<bench::Cell> cells = bench::CellsOf(bench::BenchFields(row));
    if (err_ != nullptr) PrintAside(err_->Row(cells));
    if (out_ != nullptr) {
      text += out_->Row(cells);
    } else if (options_.format == BenchFormat::kNccl) {
      text += bench::NcclLine(row);
    } else if (!pairs()) {
      text += bench::BenchLine(row, options_.measure.max_noise_pct);
    }
  }
  if (out_ == nullptr && options_.format == BenchFormat::kTable && pairs()) {
    text = bench::HeatText(HeatMapOf(rows));
  }
  rows_.insert(rows_.end(), rows.begin(), rows.end());
  last_.assign(rows.begin(), rows.end());
  return Print(text);
}

std::string BenchOutput::Foot() const {
  std::vector<double> cvs_pct;
  for (const bench::BenchRow& row : rows_) cvs_pct.push_back(row.samples_us.cv_pct);
  const bool short_foot = options_.format == BenchFormat::kNccl || pairs();
  return (short_foot ? bench::NcclFoot(rows_) : bench::BenchFoot(rows_)) +
         bench::NoiseFoot(cvs_pct, options_.measure.max_noise_pct);
}

absl::Status BenchOutput::End() {
  if (err_ != nullptr) PrintAside(err_->End());
  MOE_RETURN_IF_ERROR(Print(out_ != nullptr ? out_->End() : Foot()));
  std::vector<std::vector<bench::Cell>> cells;
  for (const bench::BenchRow& row : rows_) {
    cells.push_back(bench::CellsOf(bench::BenchFields(row)));
  }
  if (!options_.output.json_path.empty()) {
    MOE_RETURN_IF_ERROR(WriteFile(
        "-J", options_.output.json_path,
        bench::WriteTable(bench::TableForm::kJson, bench::KeysOf(bench::BenchFields({})), cells)));
  }
  if (options_.svg_path.empty()) return absl::OkStatus();
  return WriteFile("--svg", options_.svg_path, bench::HeatSvg(HeatMapOf(last_)));
}

class BenchRun {
 public:
  BenchRun(const BenchCall& call, const Launch& launch) : call_(call), launch_(launch) {}

  absl::Status Run();

 private:
  absl::Status Prepare();
  absl::Status OnRank(Communicator& world, BenchOutput& output);
  std::string About(const bench::WorldFacts& facts) const;
  void Note(const bench::BenchRow& row) const;
  absl::Status Verdict(absl::Span<const bench::BenchRow> rows) const;
  bool speaks() const { return launch_.rank() == 0; }

  const BenchCall& call_;
  const Launch& launch_;
  BenchOptions options_;
};

// Everything that can be refused, before a rank starts.
absl::Status BenchRun::Prepare() {
  MOE_ASSIGN_OR_RETURN(options_, MakeBenchOptions(call_, launch_));
  return speaks() ? CheckOutputs(call_.settings, options_.spec.routing) : absl::OkStatus();
}

std::string BenchRun::About(const bench::WorldFacts& facts) const {
  const bool skewed = options_.spec.op == bench::Op::kAllToAllV;
  std::string text = fmt::format("# moe bench {}: {} rank{} on {} host{}, {}", call_.operation,
                                 launch_.world.ranks, launch_.world.ranks == 1 ? "" : "s",
                                 facts.hosts, facts.hosts == 1 ? "" : "s", facts.transport);
  if (skewed)
    absl::StrAppend(&text, ", routing ", options_.spec.routing.text, ", seed ", options_.spec.seed);
  if (options_.spec.node_size > 0) {
    absl::StrAppend(&text, ", every ", options_.spec.node_size, " ranks stand for a host");
  }
  return absl::StrCat(text, "\n", TimeText(call_, "max over ranks of the mean", options_.measure));
}

// What was measured in place of what was asked for.
void BenchRun::Note(const bench::BenchRow& row) const {
  if (options_.run.quiet || options_.spec.dispatch != DispatchAlgorithm::kDirect) return;
  if (row.algorithm == "direct") return;
  Say(stderr, "moe bench: --dispatch direct needs peer memory, which {} has not: {}\n", row.backend,
      row.algorithm);
}

absl::Status BenchRun::OnRank(Communicator& world, BenchOutput& output) {
  const bool first = world.rank() == 0;
  if (options_.run.pin) MOE_RETURN_IF_ERROR(PinRank(launch_, world, /*threads=*/1));
  MOE_ASSIGN_OR_RETURN(const Device device, DeviceOfRank(launch_.device.kind, world));
  MOE_ASSIGN_OR_RETURN(const auto stream, bench::StreamOfCalls(device));
  MOE_ASSIGN_OR_RETURN(const auto trace, RankTrace::Create(call_.settings.text("trace"), world));
  bench::MeasureOptions measure = options_.measure;
  measure.trace = trace->recorder();
  if (measure.trace != nullptr) measure.trace->AddLane("collective", stream.get());
  MOE_ASSIGN_OR_RETURN(const auto facts, bench::FindWorldFacts(LinkedMpi(), world));
  if (first) MOE_RETURN_IF_ERROR(output.Begin(About(facts)));
  for (const int64_t size : options_.sizes) {
    bench::CaseSpec spec = options_.spec;
    spec.size_bytes = size;
    MOE_ASSIGN_OR_RETURN(auto rows, bench::MeasureRows(spec, measure, facts, world, *stream));
    if (options_.format == BenchFormat::kNccl && !options_.output.form.has_value()) {
      spec.form = bench::Form::kOther;
      MOE_ASSIGN_OR_RETURN(const auto others,
                           bench::MeasureRows(spec, measure, facts, world, *stream));
      for (size_t i = 0; i < rows.size(); ++i) {
        rows[i].other_time_us = others[i].time_us;
        rows[i].other_wrong = others[i].wrong;
      }
    }
    if (first && size == options_.sizes.front()) Note(rows.front());
    if (!first) continue;
    for (bench::BenchRow& row : rows) {
      row.provenance = call_.provenance;
      row.settings = BenchIdentity(call_.settings, call_.operation);
    }
    MOE_RETURN_IF_ERROR(output.Add(rows));
  }
  return trace->Write();
}

// Of the process that speaks alone: a launcher ends the others as soon as one fails, perhaps before
// the table is out.
absl::Status BenchRun::Verdict(absl::Span<const bench::BenchRow> rows) const {
  int64_t wrong = 0;
  for (const bench::BenchRow& row : rows) {
    wrong += std::max<int64_t>(0, row.wrong) + std::max<int64_t>(0, row.other_wrong);
  }
  if (wrong > 0) {
    return WithExitCode(absl::InternalError(absl::StrCat(
                            wrong, " wrong elements, expected none; see the column #wrong")),
                        ExitCode::kCheckFailed);
  }
  if (!options_.output.fail_if.has_value()) return absl::OkStatus();
  for (const bench::BenchRow& row : rows) {
    const auto lookup = [&](absl::string_view column) {
      return bench::NumberOf(bench::BenchFields(row), column);
    };
    if (!options_.output.fail_if->Holds(lookup)) continue;
    const std::string pair =
        row.source < 0 ? "" : fmt::format(" from {} to {}", row.source, row.destination);
    return WithExitCode(
        absl::InternalError(fmt::format(
            "--fail-if '{}' holds at size {}{}: time {:.2f} us, algbw {:.2f}, busbw {:.2f} GB/s",
            options_.output.fail_if->text(), row.size_bytes, pair, row.time_us, row.algbw(),
            row.busbw())),
        ExitCode::kCheckFailed);
  }
  return absl::OkStatus();
}

absl::Status BenchRun::Run() {
  MOE_RETURN_IF_ERROR(Prepare());
  BenchOutput output(options_);
  const auto body = [&](std::unique_ptr<Communicator> world) -> absl::Status {
    MOE_RETURN_IF_ERROR(CheckWorldSize(launch_, *world));
    return OrAbort(*world, OnRank(*world, output));
  };
  MOE_RETURN_IF_ERROR(RunRanks(RankOptions(launch_, options_.run.comm_timeout, kCommand), body));
  if (!speaks()) return absl::OkStatus();
  MOE_RETURN_IF_ERROR(output.End());
  return Verdict(output.rows());
}

// Other backends move memory of the host alone: a time would be that of copies to and from it.
absl::Status CheckExchange(const Launch& launch, const Settings& settings) {
  if (launch.device.kind == DeviceKind::kCuda && launch.plan.backend != Backend::kNccl) {
    return absl::UnimplementedError(
        "--device is cuda, expected cpu, or --backend nccl, which moves memory of GPUs");
  }
  MOE_RETURN_IF_ERROR(CheckTwoHops(settings, launch.device));
  return CheckDevices(launch, settings);
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
  if (launch.rank() == 0 && !call.settings.on("quiet")) PrintWarnings(kCommand, warnings);
  const bool collective = bench::OpOf(call.operation).has_value();
  const int ranks = launch.world.ranks;
  const int threads = collective ? 1 : call.settings.integer("threads");
  if (launch.rank() == 0) {
    call.provenance = Provenance(launch.device);
    call.busy = BusyText(LookAtLoad(), launch.plan.processes() ? ranks : 1, ranks * threads);
    if (!call.busy.empty() && !call.settings.is("output", "table") && !call.settings.on("quiet")) {
      Say(stderr, "moe bench: busy: {}\n", call.busy);
    }
  }
  if (call.operation == "layer") {
    MOE_RETURN_IF_ERROR(CheckDevices(launch, call.settings));
    return RunLayerBench(call, launch);
  }
  if (!collective) return RunKernelBench(call, launch);
  MOE_RETURN_IF_ERROR(CheckExchange(launch, call.settings));
  return BenchRun(call, launch).Run();
}

}  // namespace

ExitCode BenchCommand(const Invocation& invocation) {
  return EndCommand(invocation, kCommand, Run(invocation));
}

}  // namespace moe::cli
