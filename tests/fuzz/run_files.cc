// What runs leave for other commands, and files that describe machines and traffic.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <absl/status/status.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>

#include "moe/checkpoint/run_lock.h"
#include "moe/cli/base/run_status.h"
#include "moe/cli/debug/flight.h"
#include "moe/cli/launch/hosts.h"
#include "moe/cli/measure/routing_spec.h"
#include "moe/cli/measure/sweep_row.h"
#include "moe/cli/plan/calibration_file.h"
#include "moe/cli/report/rows.h"
#include "moe/io/routing_trace.h"
#include "moe/plan/calibration.h"
#include "tests/fuzz/targets.h"

namespace moe::fuzz {
namespace {

// Several dumps, one after another, between zero bytes: what they have in common can be analysed.
void Flight(Bytes bytes) {
  std::vector<flight::Dump> dumps;
  std::set<int> ranks;
  for (const absl::string_view text : absl::StrSplit(TextOf(bytes), '\0')) {
    auto dump = flight::ParseDump("f", text);
    if (!Accepted(dump, "f")) continue;
    MOE_CHECK(0 <= dump->rank && dump->rank < dump->ranks);
    // As ReadDumps has them: ascending, of one world. Analyse names each rank without a dump.
    constexpr int kMostRanks = 1000;
    if (dump->ranks > kMostRanks || (!dumps.empty() && dump->ranks != dumps[0].ranks)) continue;
    if (!dumps.empty() && dump->rank <= dumps.back().rank) continue;
    ranks.insert(dump->rank);
    dumps.push_back(*std::move(dump));
  }
  if (dumps.empty()) return;
  const flight::Analysis analysis = flight::Analyse(dumps);
  MOE_CHECK(analysis.ranks.size() == ranks.size());
  MOE_CHECK(analysis.ranks.size() + analysis.without_dump.size() ==
            static_cast<size_t>(dumps[0].ranks));
  const flight::Difference& difference = analysis.difference;
  MOE_CHECK(difference.where.size() == difference.ranks.size());
  if (analysis.straggler.rank >= 0) MOE_CHECK(ranks.contains(analysis.straggler.rank));
}

// Hosts of `moe launch`: names that ssh takes for nothing else, each once.
void Hosts(Bytes bytes) {
  const auto hosts = launch::ParseHosts(TextOf(bytes));
  if (!Accepted(hosts, "", absl::StatusCode::kInvalidArgument)) return;
  std::string written;
  std::set<std::string> names;
  for (const launch::Host& host : *hosts) {
    MOE_CHECK(!host.name.empty() && host.name[0] != '-' && names.insert(host.name).second);
    MOE_CHECK(host.name.find_first_of(" \t\r\n;&|$`'\"\\/") == host.name.npos);
    absl::StrAppend(&written, host.name, host.slots > 0 ? absl::StrCat(":", host.slots) : "", "\n");
  }
  MOE_CHECK(launch::ParseHosts(written).value() == *hosts);
}

// The lock of a run's folder.
void Lock(Bytes bytes) {
  const auto holder = ParseLock(std::string(TextOf(bytes)));
  if (!Accepted(holder, "")) return;
  MOE_CHECK(holder->pid >= 0);
  const std::string written = LockText(*holder);
  MOE_CHECK(LockText(ParseLock(written).value()) == written);
}

// Rows of bench, sweep and training, for the report.
void Rows(Bytes bytes) {
  const auto run = report::ParseRun("f", TextOf(bytes));
  if (!Accepted(run, "f")) return;
  MOE_CHECK(run->bench.size() + run->sweep.size() + run->plan.size() + run->steps.size() > 0 ||
            run->totals);
  for (const report::TrainStep& step : run->steps) {
    MOE_CHECK(step.expert_load.size() ==
              static_cast<size_t>(run->num_layers) * static_cast<size_t>(run->num_experts));
  }
}

std::string LinesOf(const RoutingTrace& trace) {
  std::string text = HeaderLine(trace.header);
  for (const RoutingTraceRecord& record : trace.records) text += RecordLine(record);
  return text;
}

// Rows of a machine's calibration, on 4 ranks: what is accepted has constants that steps can be
// predicted with.
void Calibration(Bytes bytes) {
  const auto file = cli::ParseCalibration({{"f", TextOf(bytes)}}, 4, "bf16");
  if (absl::IsInvalidArgument(file.status())) return;  // no rows
  if (!Accepted(file, "f: ")) return;
  const auto machine = plan::Calibrate(file->samples, {});
  if (!Accepted(machine, "", absl::StatusCode::kInvalidArgument)) return;
  MOE_CHECK(machine->flops > 0 && machine->half_rows >= 0 && machine->layer_s >= 0);
  MOE_CHECK(machine->memory_bytes_per_s > 0 && machine->node.latency_s >= 0);
}

// Recorded routing: written and read again it gives the same bytes, and it is within the limits
// that its header promises, also as fewer ranks replay it.
void Routing(Bytes bytes) {
  const auto trace = ParseRoutingTrace("f", TextOf(bytes));
  if (!Accepted(trace, "f:")) return;
  const RoutingTraceHeader& header = trace->header;
  int64_t slots_of_all = 0, replayed = 0;
  for (const RoutingTraceRecord& record : trace->records) {
    MOE_CHECK(record.tokens.size() == static_cast<size_t>(header.ranks));
    MOE_CHECK(record.slots.size() == record.tokens.size() * header.num_experts);
    for (int r = 0; r < header.ranks; ++r) {
      for (const int64_t slots : record.of_rank(r, header.num_experts)) {
        MOE_CHECK(slots >= 0 && slots <= record.tokens[r]);
        slots_of_all += slots;
      }
    }
  }
  const std::string written = LinesOf(*trace);
  const auto again = ParseRoutingTrace("f", written);
  MOE_CHECK(again.ok() && LinesOf(*again) == written);
  const auto replay = measure::Replay::Create(*trace, 1);
  MOE_CHECK(replay.ok());
  for (int64_t call = 0; call < replay->records(); ++call) {
    for (const int64_t slots : replay->traffic_of(call)) replayed += slots;
  }
  MOE_CHECK(replayed == slots_of_all);
}

// status.json.
void Status(Bytes bytes) {
  const auto status = cli::ParseStatus(TextOf(bytes));
  if (!Accepted(status, "")) return;
  const std::string written = cli::StatusText(*status);
  MOE_CHECK(cli::StatusText(cli::ParseStatus(written).value()) == written);
}

// A line of a sweep's file.
void SweepLine(Bytes bytes) {
  const auto row = sweep::ParseSweepRow(TextOf(bytes));
  if (!Accepted(row, "")) return;
  const std::string written = sweep::JsonLine(*row);
  const auto again = sweep::ParseSweepRow(written);
  MOE_CHECK(again.ok() && sweep::JsonLine(*again) == written);
  MOE_CHECK(sweep::IdentityOf(*again) == sweep::IdentityOf(*row));
  MOE_CHECK(!sweep::SweepTable({&*row, 1}).empty());
}

// The matrix of --routing matrix:FILE, for the ranks in the first byte.
void Traffic(Bytes bytes) {
  if (bytes.empty()) return;
  const int ranks = 1 + bytes[0] % 8;
  const auto weights = measure::ParseTrafficMatrix(TextOf(bytes.subspan(1)), ranks);
  if (!Accepted(weights, "", absl::StatusCode::kInvalidArgument)) return;
  MOE_CHECK(weights->size() == static_cast<size_t>(ranks * ranks));
  for (const double weight : *weights) MOE_CHECK(std::isfinite(weight) && weight >= 0);
}

}  // namespace

absl::Span<const Target> RunFiles() {
  static constexpr Target kTargets[] = {{"calibration", Calibration},
                                        {"flight", Flight},
                                        {"hosts", Hosts},
                                        {"lock", Lock},
                                        {"report_rows", Rows},
                                        {"routing", Routing},
                                        {"status", Status},
                                        {"sweep_line", SweepLine},
                                        {"traffic", Traffic}};
  return kTargets;
}

}  // namespace moe::fuzz
