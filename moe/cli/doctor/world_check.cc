#include "moe/cli/doctor/world_check.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include <absl/strings/str_cat.h>
#include <fmt/format.h>

#include "comm/hosts.h"
#include "kernels/base/machine_limits.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/trace.h"
#include "moe/cli/base/terminal.h"
#include "moe/cli/measure/collectives.h"

namespace moe::cli {
namespace {

// Shares of the time: of the loop, of the copies, of the two sizes of transfers.
constexpr double kOfLoop = 0.1, kOfCopies = 0.1, kOfLatency = 0.3, kOfBandwidth = 0.5;

// What ranks tell each other of themselves; whole words of 8 bytes.
struct Told {
  int64_t host_id, cores;
  double gflop_per_s, gbytes_per_s;
  std::array<char, 64> host;  // ends with 0
};
static_assert(sizeof(Told) % sizeof(int64_t) == 0);

// Multiplications and additions per nanosecond, of as many sums as hide the time of one and stay in
// registers.
double MeasureLoop(absl::Duration time) {
  constexpr int kSums = 8, kRounds = 4000;
  volatile float source = 0.5f, sink = 0;  // no round may be left out
  std::array<float, kSums> sums = {};
  const int64_t begin = MonotonicNs(), end = begin + absl::ToInt64Nanoseconds(time);
  int64_t rounds = 0, now = begin;
  for (; now < end; now = MonotonicNs()) {
    const float factor = source;
    for (int i = 0; i < kRounds; ++i) {
      for (int s = 0; s < kSums; ++s) sums[s] = sums[s] * factor + 1.0f;
    }
    rounds += kRounds;
  }
  for (const float sum : sums) sink = sink + sum;
  return 2.0 * kSums * static_cast<double>(rounds) / static_cast<double>(now - begin);
}

// Bytes per nanosecond.
double MeasureCopies(absl::Duration time) {
  constexpr size_t kBytes = size_t{16} << 20;
  std::vector<char> from(kBytes, 1), to(kBytes, 2);
  const int64_t begin = MonotonicNs(), end = begin + absl::ToInt64Nanoseconds(time);
  int64_t copies = 0, now = begin;
  while (now < end) {
    std::memcpy(to.data(), from.data(), kBytes);
    asm volatile("" : : "r"(to.data()) : "memory");
    ++copies;
    now = MonotonicNs();
  }
  return static_cast<double>(kBytes) * static_cast<double>(copies) /
         static_cast<double>(now - begin);
}

absl::StatusOr<std::vector<RankSpeed>> MeasureRanks(absl::Duration time, Communicator& world) {
  Told mine = {.host_id = static_cast<int64_t>(HostId()),
               .cores = UsableCpus(),
               .gflop_per_s = 0,
               .gbytes_per_s = 0,
               .host = {}};
  const std::string host = HostName();
  std::copy_n(host.data(), std::min(host.size(), mine.host.size() - 1), mine.host.data());
  MOE_RETURN_IF_ERROR(world.Barrier());
  mine.gflop_per_s = MeasureLoop(kOfLoop * time);
  MOE_RETURN_IF_ERROR(world.Barrier());
  mine.gbytes_per_s = MeasureCopies(kOfCopies * time);
  std::vector<Told> all(world.size());
  constexpr size_t kWords = sizeof(Told) / sizeof(int64_t);
  const auto stream = MakeInlineStream();
  MOE_RETURN_IF_ERROR(
      world.AllGather<int64_t>({reinterpret_cast<const int64_t*>(&mine), kWords},
                               {reinterpret_cast<int64_t*>(all.data()), kWords * all.size()},
                               *stream, {.name = "speeds of ranks"}));
  MOE_RETURN_IF_ERROR(stream->Synchronize());
  std::vector<RankSpeed> ranks;
  for (const Told& told : all) {
    ranks.push_back({.host = told.host.data(),
                     .host_id = static_cast<uint64_t>(told.host_id),
                     .cores = told.cores,
                     .gflop_per_s = told.gflop_per_s,
                     .gbytes_per_s = told.gbytes_per_s});
  }
  return ranks;
}

absl::StatusOr<std::vector<measure::BenchRow>> MeasurePairs(int64_t bytes, absl::Duration time,
                                                            Communicator& world) {
  MOE_ASSIGN_OR_RETURN(const measure::WorldFacts facts, measure::FindWorldFacts(world));
  measure::CaseSpec spec;
  spec.op = measure::Op::kPointToPoint;
  spec.size_bytes = bytes;
  const auto stream = MakeInlineStream();
  return measure::MeasureRows(spec,
                              {.iterations = 10,
                               .warmup = 2,
                               .check = measure::Check::kNo,
                               .max_noise_pct = 0,
                               .budget = time},
                              facts, world, *stream);
}

double Median(std::vector<double> values) {
  return measure::Describe(values).p50;
}

constexpr size_t kMostNamed = 4;

// One figure of ranks or links.
struct Figure {
  const char* subject;
  const char* unit;
  double slow;        // by which factor it must be worse than the median
  bool higher;        // whether more is better
  const char* where;  // before a range, for people
  const char* remedy;
};

struct Measured {
  std::string who;
  double value = 0;
};

void Judge(const Figure& figure, std::vector<Measured> all, std::vector<Finding>& findings) {
  if (all.empty()) return;
  std::vector<double> values;
  for (const Measured& each : all) values.push_back(each.value);
  const double median = Median(values);
  const auto worse = [&](const Measured& a, const Measured& b) {
    return figure.higher ? a.value < b.value : a.value > b.value;
  };
  std::stable_sort(all.begin(), all.end(), worse);
  size_t slow = 0;
  for (const Measured& each : all) {
    const double factor = figure.higher ? median / each.value : each.value / median;
    if (!(factor > figure.slow)) break;
    if (++slow > kMostNamed) continue;
    findings.push_back(
        {.verdict = Verdict::kSlow,
         .subject = figure.subject,
         .what = fmt::format("{}: {:.3g} {}, {:.1f} times slower than the median of "
                             "{}, {:.3g}",
                             each.who, each.value, figure.unit, factor, all.size(), median),
         .remedy = figure.remedy});
  }
  if (slow > kMostNamed) {
    findings.push_back({.verdict = Verdict::kSlow,
                        .subject = figure.subject,
                        .what = absl::StrCat("and ", slow - kMostNamed, " more"),
                        .remedy = figure.remedy});
  }
  if (slow > 0) return;
  findings.push_back(
      {.subject = figure.subject,
       .what = fmt::format("{}{:.3g} to {:.3g} {}, median of {}: {:.3g}", figure.where,
                           std::min(all.front().value, all.back().value),
                           std::max(all.front().value, all.back().value), figure.unit, all.size(),
                           median)});
}

void JudgeLinks(const WorldCheck& check, bool between_hosts, std::vector<Finding>& findings) {
  std::vector<Measured> latencies, bandwidths;
  for (const Link& link : check.links) {
    const RankSpeed& from = check.ranks[link.source];
    const RankSpeed& to = check.ranks[link.destination];
    if ((from.host_id != to.host_id) != between_hosts) continue;
    const std::string who = absl::StrCat("rank ", link.source, " on ", from.host, " to rank ",
                                         link.destination, " on ", to.host);
    latencies.push_back({who, link.latency_us});
    bandwidths.push_back({who, link.gbytes_per_s});
  }
  const char* const remedy =
      between_hosts ? "moe bench p2p measures it longer; look at the cable, the port and the route"
                    : "moe bench p2p measures it longer; look at what else runs, and at binding";
  Judge({.subject = "latency",
         .unit = "us",
         .slow = kSlowLink,
         .higher = false,
         .where = between_hosts ? "between hosts " : "",
         .remedy = remedy},
        std::move(latencies), findings);
  Judge({.subject = "links",
         .unit = "GB/s",
         .slow = kSlowLink,
         .higher = true,
         .where = between_hosts ? "between hosts " : "",
         .remedy = remedy},
        std::move(bandwidths), findings);
}

void JudgeCores(const WorldCheck& check, std::vector<Finding>& findings) {
  const auto fewer = [](const RankSpeed& a, const RankSpeed& b) {
    return a.cores < b.cores;
  };
  const auto fewest = std::min_element(check.ranks.begin(), check.ranks.end(), fewer);
  const auto most = std::max_element(check.ranks.begin(), check.ranks.end(), fewer);
  if (fewest->cores == most->cores) return;
  findings.push_back(
      {.verdict = Verdict::kSlow,
       .subject = "rank cores",
       .what = absl::StrCat("rank ", fewest - check.ranks.begin(), " on ", fewest->host,
                            " may use ", Counted(fewest->cores, "core"), ", rank ",
                            most - check.ranks.begin(), " on ", most->host, " ", most->cores),
       .remedy = "bind ranks alike, or give each --threads of its own"});
}

}  // namespace

absl::StatusOr<WorldCheck> MeasureWorld(absl::Duration time, Communicator& world) {
  WorldCheck check;
  MOE_ASSIGN_OR_RETURN(check.ranks, MeasureRanks(time, world));
  if (world.size() == 1) return check;
  constexpr int64_t kSmall = 8, kLarge = 1 << 20;
  MOE_ASSIGN_OR_RETURN(const auto small, MeasurePairs(kSmall, kOfLatency * time, world));
  MOE_ASSIGN_OR_RETURN(const auto large, MeasurePairs(kLarge, kOfBandwidth * time, world));
  for (size_t i = 0; i < small.size(); ++i) {
    if (small[i].source == small[i].destination) continue;
    check.links.push_back({.source = small[i].source,
                           .destination = small[i].destination,
                           .latency_us = small[i].samples_us.p50,
                           .gbytes_per_s = measure::AlgorithmBandwidth(large[i].size_bytes,
                                                                       large[i].samples_us.p50)});
  }
  return check;
}

std::vector<Finding> DiagnoseWorld(const WorldCheck& check) {
  std::vector<Finding> findings;
  std::vector<Measured> loops, copies;
  for (size_t r = 0; r < check.ranks.size(); ++r) {
    const std::string who = absl::StrCat("rank ", r, " on ", check.ranks[r].host);
    loops.push_back({who, check.ranks[r].gflop_per_s});
    copies.push_back({who, check.ranks[r].gbytes_per_s});
  }
  JudgeCores(check, findings);
  Judge({.subject = "core speed",
         .unit = "GFLOP/s",
         .slow = kSlowRank,
         .higher = true,
         .where = "",
         .remedy = "look at what else runs on its core, at its clock and its temperature"},
        std::move(loops), findings);
  Judge({.subject = "memcpy",
         .unit = "GB/s",
         .slow = kSlowRank,
         .higher = true,
         .where = "",
         .remedy = "look at what else runs on its host, and at the NUMA node of its memory"},
        std::move(copies), findings);
  JudgeLinks(check, /*between_hosts=*/false, findings);
  JudgeLinks(check, /*between_hosts=*/true, findings);
  return findings;
}

}  // namespace moe::cli
