// moe bench: times and checks collectives.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
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
#include "moe/cli/bench/bench_output.h"
#include "moe/cli/bench/bench_row.h"
#include "moe/cli/bench/collectives.h"
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

class BenchRun {
 public:
  BenchRun(BenchCall& call, const Launch& launch) : call_(call), launch_(launch) {}

  absl::Status Run();

 private:
  absl::Status Prepare();
  absl::Status OnRank(Communicator& world, BenchOutput& output);
  std::string About(const bench::WorldFacts& facts) const;
  void Note(const bench::BenchRow& row) const;
  // The rows of one size: one, for p2p all pairs.
  absl::Status Add(absl::Span<const bench::BenchRow> rows, BenchOutput& output);
  absl::Status End(BenchOutput& output) const;
  absl::Status Verdict(const BenchOutput& output) const;
  bool speaks() const { return launch_.rank() == 0; }
  bool pairs() const { return options_.spec.op == bench::Op::kPointToPoint; }
  bool nccl() const { return options_.format == BenchFormat::kNccl; }

  BenchCall& call_;
  const Launch& launch_;
  CollectiveOptions options_;
  std::vector<bench::BenchRow> rows_;  // of the rank that speaks
  size_t last_ = 0;                    // where those of the last size begin
};

// Everything that can be refused, before a rank starts.
absl::Status BenchRun::Prepare() {
  MOE_ASSIGN_OR_RETURN(options_, MakeCollectiveOptions(call_, launch_));
  MOE_RETURN_IF_ERROR(SetFailIf(bench::BenchFields({}), call_));
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
  return absl::StrCat(text, "\n", TimeText(call_, "max over ranks of the mean"));
}

// What was measured in place of what was asked for.
void BenchRun::Note(const bench::BenchRow& row) const {
  if (call_.options.quiet || options_.spec.dispatch != DispatchAlgorithm::kDirect) return;
  if (row.algorithm == "direct") return;
  Say(stderr, "moe bench: --dispatch direct needs peer memory, which {} has not: {}\n", row.backend,
      row.algorithm);
}

absl::Status BenchRun::OnRank(Communicator& world, BenchOutput& output) {
  const bool first = world.rank() == 0;
  if (call_.options.pin) MOE_RETURN_IF_ERROR(PinRank(launch_, world, /*threads=*/1));
  MOE_ASSIGN_OR_RETURN(const Device device, DeviceOfRank(launch_.device.kind, world));
  MOE_ASSIGN_OR_RETURN(const auto stream, bench::StreamOfCalls(device));
  MOE_ASSIGN_OR_RETURN(const auto trace, RankTrace::Create(call_.settings.text("trace"), world));
  bench::MeasureOptions measure = call_.options.measure;
  measure.trace = trace->recorder();
  if (measure.trace != nullptr) measure.trace->AddLane("collective", stream.get());
  MOE_ASSIGN_OR_RETURN(const auto facts, bench::FindWorldFacts(world));
  const std::string head = nccl() ? bench::NcclHead() : pairs() ? "" : bench::BenchHead();
  if (first) MOE_RETURN_IF_ERROR(output.Begin(About(facts) + head));
  for (const int64_t size : options_.sizes) {
    bench::CaseSpec spec = options_.spec;
    spec.size_bytes = size;
    MOE_ASSIGN_OR_RETURN(auto rows, bench::MeasureRows(spec, measure, facts, world, *stream));
    if (nccl() && call_.settings.is("output", "table")) {
      spec.form = bench::Form::kOther;
      MOE_ASSIGN_OR_RETURN(const auto others,
                           bench::MeasureRows(spec, measure, facts, world, *stream));
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

absl::Status BenchRun::Add(absl::Span<const bench::BenchRow> rows, BenchOutput& output) {
  last_ = rows_.size();
  for (const bench::BenchRow& row : rows) {
    std::string text;
    if (nccl()) {
      text = bench::NcclLine(row);
    } else if (!pairs()) {
      text = bench::BenchLine(row, call_.options.measure.max_noise_pct);
    } else if (&row == &rows.back()) {
      text = bench::HeatText(HeatMapOf(rows));
    }
    MOE_RETURN_IF_ERROR(output.Add(bench::BenchFields(row), text));
    rows_.push_back(row);
  }
  return absl::OkStatus();
}

absl::Status BenchRun::End(BenchOutput& output) const {
  std::vector<double> cvs_pct;
  for (const bench::BenchRow& row : rows_) cvs_pct.push_back(row.samples_us.cv_pct);
  const std::string foot = nccl() || pairs() ? bench::NcclFoot(rows_) : bench::BenchFoot(rows_);
  MOE_RETURN_IF_ERROR(
      output.End(foot + bench::NoiseFoot(cvs_pct, call_.options.measure.max_noise_pct)));
  if (call_.settings.empty("svg")) return absl::OkStatus();
  return WriteFile("--svg", call_.settings.text("svg"),
                   bench::HeatSvg(HeatMapOf(absl::MakeConstSpan(rows_).subspan(last_))));
}

// Of the process that speaks alone: a launcher ends the others as soon as one fails, perhaps before
// the table is out.
absl::Status BenchRun::Verdict(const BenchOutput& output) const {
  int64_t wrong = 0;
  for (const bench::BenchRow& row : rows_) {
    wrong += std::max<int64_t>(0, row.wrong) + std::max<int64_t>(0, row.other_wrong);
  }
  if (wrong > 0) {
    return CheckFailed(
        absl::StrCat(wrong, " wrong elements, expected none; see the column #wrong"));
  }
  return output.CheckBound([&](size_t i) {
    const bench::BenchRow& row = rows_[i];
    const std::string pair =
        row.source < 0 ? "" : fmt::format(" from {} to {}", row.source, row.destination);
    return fmt::format("at size {}{}: time {:.2f} us, algbw {:.2f}, busbw {:.2f} GB/s",
                       row.size_bytes, pair, row.time_us, row.algbw(), row.busbw());
  });
}

absl::Status BenchRun::Run() {
  MOE_RETURN_IF_ERROR(Prepare());
  BenchOutput output(call_, bench::BenchFields({}));
  const auto body = [&](std::unique_ptr<Communicator> world) -> absl::Status {
    MOE_RETURN_IF_ERROR(CheckWorldSize(launch_, *world));
    return OrAbort(*world, OnRank(*world, output));
  };
  MOE_RETURN_IF_ERROR(RunRanks(RankOptions(launch_, call_.options.comm_timeout, kCommand), body));
  if (!speaks()) return absl::OkStatus();
  MOE_RETURN_IF_ERROR(End(output));
  return Verdict(output);
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
  MOE_RETURN_IF_ERROR(FillBenchOptions(call));
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
