#include "moe/report/pair_maps.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "moe/report/format.h"
#include "moe/report/groups.h"
#include "moe/report/heat_map.h"
#include "moe/report/sweep_points.h"

namespace moe::report {
namespace {

constexpr size_t kMaxMaps = 4;
// Cells of three units are still seen.
constexpr int kMaxRanks = 128;

// Ranks from and to.
using Pair = std::pair<int, int>;

struct PairRows {
  Key key;
  double size = 0;
  bool cut = false;                           // there are ranks from kMaxRanks on
  std::map<Pair, std::vector<double>> rates;  // 1e9 bytes per second, of that size
};

bool IsPair(const BenchRow& r) {
  return r.source >= 0 && r.destination >= 0 && r.algbw >= 0 && !r.failed();
}

std::vector<PairRows> PairsOf(absl::Span<const Run> runs) {
  Groups<PairRows> all;
  for (const Run& run : runs) {
    for (const BenchRow& r : run.bench) {
      if (!IsPair(r)) continue;
      PairRows& pairs =
          all.Of({run.name, r.backend, r.transport, absl::StrCat(CountText(r.ranks), " ranks"),
                  absl::StrCat(CountText(r.hosts), " hosts"), r.dtype, r.settings});
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

// Of finite values, and finite: files may hold rates whose sum is not.
double Mean(const std::vector<double>& values) {
  const auto n = static_cast<double>(values.size());
  double mean = 0;
  for (const double value : values) mean += value / n;
  return mean;
}

// A pair that was not measured has no cell; nor has a rank with itself, whose copy is no transfer
// and would take the colours from the others.
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
      .x_label = "to rank",
      .y_label = "from rank",
      .value_label = "GB/s",
      .columns = {},
      .rows = {},
      .values = std::vector<double>(static_cast<size_t>(ranks) * ranks, kNone),
      .middle = 0};
  for (int i = 0; i < ranks; ++i) {
    map.rows.push_back({.label = absl::StrCat(i), .tooltip = absl::StrCat("from ", i)});
    map.columns.push_back({.label = absl::StrCat(i), .tooltip = absl::StrCat("to ", i)});
  }
  for (const auto& [pair, rates] : pairs.rates) {
    if (pair.first != pair.second) map.values[pair.first * ranks + pair.second] = Mean(rates);
  }
  return map;
}

}  // namespace

std::string PairMaps(absl::Span<const Run> runs) {
  std::vector<PairRows> all = PairsOf(runs);
  const std::vector<std::string> names = PointLabels(KeysOf(all));
  std::string html;
  for (size_t i = 0; i < std::min(all.size(), kMaxMaps); ++i) {
    HeatMap map = MapOf(all[i], i, all.size() > 1 ? names[i] : "");
    if (all.size() > kMaxMaps && i == 0) {
      absl::StrAppend(&map.text.note, " The first ", kMaxMaps, " of ", all.size(), " maps.");
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

}  // namespace moe::report
