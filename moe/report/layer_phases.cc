#include "moe/report/layer_phases.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "moe/report/bar_chart.h"
#include "moe/report/format.h"
#include "moe/report/groups.h"
#include "moe/report/sweep_points.h"

namespace moe::report {
namespace {

constexpr size_t kMaxBars = 16;
constexpr char kWhole[] = "all";

struct Pass {
  Key key;
  std::map<std::string, double> time_us;  // by phase
};

std::vector<Pass> PassesOf(absl::Span<const Run> runs) {
  Groups<Pass> passes;
  for (const Run& run : runs) {
    for (const BenchRow& r : run.bench) {
      if (r.phase.empty() || r.failed() || !std::isfinite(r.time_us)) continue;
      Pass& pass = passes.Of({r.pass, run.name, r.shape, r.algorithm, r.backend,
                              absl::StrCat(CountText(r.ranks), " ranks"), r.dtype, r.routing,
                              r.threads_text(), r.seed_text(), r.settings});
      pass.time_us[r.phase] = r.time_us;
    }
  }
  return std::move(passes).Take();
}

}  // namespace

std::string LayerPhases(absl::Span<const Run> runs) {
  const std::vector<Pass> passes = PassesOf(runs);
  StackedBarChart chart = {
      .text = ChartText{.id = "bench-layer",
                        .title = "One layer: time by phase",
                        .note = "Medians over calls, of the slowest rank in each phase."},
      .x_label = "time (us)",
      .unit = "us",
      .parts = {"gate", "plan", "dispatch", "expert", "combine"}};
  const std::vector<std::string> names = PointLabels(KeysOf(passes));
  for (size_t i = 0; i < std::min(passes.size(), kMaxBars); ++i) {
    StackedBar bar = {.name = names[i]};
    double named = 0;
    for (const std::string& part : chart.parts) {
      const auto at = passes[i].time_us.find(part);
      bar.parts.push_back(at == passes[i].time_us.end() ? 0 : at->second);
      named += bar.parts.back();
    }
    const auto whole = passes[i].time_us.find(kWhole);
    bar.parts.push_back(whole == passes[i].time_us.end() ? 0
                                                         : std::max(0.0, whole->second - named));
    chart.bars.push_back(std::move(bar));
  }
  chart.parts.push_back("between phases");
  if (passes.size() > kMaxBars) {
    absl::StrAppend(&chart.text.note, " The first ", kMaxBars, " of ", passes.size(), " passes.");
  }
  return chart.bars.empty() ? "" : Render(chart);
}

}  // namespace moe::report
