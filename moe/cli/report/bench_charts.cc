// Charts of moe bench rows beside bandwidth over size.
#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "moe/cli/report/charts.h"
#include "moe/cli/report/format.h"
#include "moe/cli/report/labels.h"
#include "moe/cli/report/page.h"

namespace moe::report {
namespace {

// The mean of finite values, itself finite: the sum of rates in a file may overflow.
double Mean(const std::vector<double>& values) {
  const auto n = static_cast<double>(values.size());
  double mean = 0;
  for (const double value : values) mean += value / n;
  return mean;
}

constexpr size_t kMaxMaps = 4;
// Cells of three pixels are still visible.
constexpr int kMaxRanks = 128;

// Source and destination ranks.
using Pair = std::pair<int, int>;

struct PairRows {
  Key key;
  double size = 0;
  bool cut = false;                           // ranks from kMaxRanks on are left out
  std::map<Pair, std::vector<double>> rates;  // 1e9 bytes per second, for that size
};

bool IsPair(const BenchRow& r) {
  return r.source >= 0 && r.destination >= 0 && r.algbw >= 0 && !r.failed();
}

std::vector<PairRows> PairsOf(absl::Span<const Run> runs) {
  Groups<PairRows> all;
  for (const Run& run : runs) {
    for (const BenchRow& r : run.bench) {
      if (!IsPair(r)) continue;
      PairRows& pairs = all.Of({run.name, r.backend, r.transport, Plural(r.ranks, "rank"),
                                Plural(r.hosts, "host"), r.dtype, r.settings});
      if (std::max(r.source, r.destination) >= kMaxRanks) {
        pairs.cut = true;
        continue;
      }
      if (r.size() < pairs.size) continue;
      if (r.size() > pairs.size) pairs.rates.clear();
      pairs.size = r.size();
      pairs.rates[{static_cast<int>(r.source), static_cast<int>(r.destination)}].push_back(r.algbw);
    }
  }
  return std::move(all).Take();
}

// A pair that was not measured has no cell. Neither has a rank with itself, whose copy is not a
// transfer and would dominate the colour scale.
HeatMap MapOf(const PairRows& pairs, size_t index, const std::string& name) {
  int ranks = 0;
  for (const auto& [pair, rates] : pairs.rates) {
    ranks = std::max({ranks, pair.first + 1, pair.second + 1});
  }
  HeatMap map = {
      .text = ChartText{.id = absl::StrCat("bench-pairs-", index),
                        .title = absl::StrCat("p2p: GB/s between ranks, ", BytesText(pairs.size)),
                        .note = absl::StrCat(name, name.empty() ? "" : ". ",
                                             "Rows send, columns receive; brighter is faster.")},
      .x = Axis{.label = "to rank"},
      .y = Axis{.label = "from rank"},
      .value_label = "GB/s",
      .values = std::vector<double>(static_cast<size_t>(ranks) * ranks, kNone),
      .middle = 0};
  for (int i = 0; i < ranks; ++i) {
    map.x.names.push_back(absl::StrCat(i));
    map.y.names.push_back(absl::StrCat(i));
  }
  for (const auto& [pair, rates] : pairs.rates) {
    if (pair.first != pair.second) map.values[pair.first * ranks + pair.second] = Mean(rates);
  }
  return map;
}

constexpr char kWhole[] = "all";

struct Pass {
  Key key;
  std::map<std::string, double> time_us;  // by phase
};

// Reports in `text` how many rows are left out.
std::vector<Pass> PassesOf(absl::Span<const Run> runs, ChartText& text) {
  Groups<Pass> passes;
  size_t rows = 0, without = 0;
  for (const Run& run : runs) {
    for (const BenchRow& r : run.bench) {
      if (r.phase.empty()) continue;
      ++rows;
      if (r.failed() || !std::isfinite(r.time_us)) {
        ++without;
        continue;
      }
      Pass& pass =
          passes.Of({r.pass, run.name, r.shape, r.algorithm, r.backend, Plural(r.ranks, "rank"),
                     r.dtype, r.routing, r.threads_text(), r.seed_text(), r.settings});
      pass.time_us[r.phase] = r.time_us;
    }
  }
  text.LeaveOut(without, rows, "rows", "failed");
  return std::move(passes).Take();
}

}  // namespace

std::string PairMaps(absl::Span<const Run> runs) {
  std::vector<PairRows> all = PairsOf(runs);
  const std::vector<std::string> names = PointLabels(KeysOf(all));
  std::string html;
  for (size_t i = 0; i < std::min(all.size(), kMaxMaps); ++i) {
    HeatMap map = MapOf(all[i], i, all.size() > 1 ? names[i] : "");
    if (all.size() > kMaxMaps) {
      map.text.LeaveOut(all.size() - kMaxMaps, all.size(), "maps", kInTable);
    }
    if (all[i].cut) {
      absl::StrAppend(&map.text.note, " Ranks from ", kMaxRanks,
                      " on are left out; the table has them.");
    }
    const bool any = std::any_of(map.values.begin(), map.values.end(),
                                 [](double value) { return std::isfinite(value); });
    if (any) html += Render(map);
  }
  return html;
}

std::string LayerPhases(absl::Span<const Run> runs) {
  StackedBarChart chart = {
      .text = ChartText{.id = "bench-layer",
                        .title = "One layer: time by phase",
                        .note = "Medians over calls, of the slowest rank in each phase."},
      .x_label = "time (us)",
      .unit = "us",
      .parts = {"gate", "plan", "dispatch", "expert", "combine"}};
  const std::vector<Pass> passes = PassesOf(runs, chart.text);
  const std::vector<std::string> names = PointLabels(KeysOf(passes));
  for (size_t i = 0; i < std::min(passes.size(), kMaxBars); ++i) {
    const auto time_of = [&](const std::string& phase) {
      const auto at = passes[i].time_us.find(phase);
      return at == passes[i].time_us.end() ? kNone : at->second;
    };
    std::vector<double> phases;
    for (const std::string& part : chart.parts) phases.push_back(time_of(part));
    chart.bars.push_back(PhaseBar(names[i], time_of(kWhole), std::move(phases)));
  }
  chart.parts.push_back("between phases");
  chart.text.LeaveOut(passes.size() - chart.bars.size(), passes.size(), "passes", kInTable);
  return Render(chart);
}

}  // namespace moe::report
