#include "moe/report/layer_phases.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "moe/report/bar_chart.h"
#include "moe/report/format.h"
#include "moe/report/labels.h"

namespace moe::report {
namespace {

constexpr size_t kMaxBars = 16;
constexpr char kWhole[] = "all";

struct Pass {
  std::vector<std::string> key;
  std::map<std::string, double> time_us;  // by phase
};

std::vector<Pass> PassesOf(absl::Span<const Run> runs) {
  std::vector<Pass> passes;
  for (const Run& run : runs) {
    for (const BenchRow& r : run.bench) {
      if (r.phase.empty() || r.failed() || !std::isfinite(r.time_us)) continue;
      std::vector<std::string> key = {
          r.pass,      run.name,  r.shape,
          r.algorithm, r.backend, absl::StrCat(CountText(r.ranks), " ranks"),
          r.dtype,     r.routing, r.threads_text()};
      const auto same = [&](const Pass& pass) {
        return pass.key == key;
      };
      auto at = std::find_if(passes.begin(), passes.end(), same);
      if (at == passes.end()) at = passes.insert(at, {std::move(key), {}});
      at->time_us[r.phase] = r.time_us;
    }
  }
  return passes;
}

}  // namespace

std::string LayerPhases(absl::Span<const Run> runs) {
  const std::vector<Pass> passes = PassesOf(runs);
  StackedBarChart chart = {
      .text = {.id = "bench-layer",
               .title = "One layer: time by phase",
               .note = "Medians over calls, of the slowest rank in each phase."},
      .x_label = "time (us)",
      .unit = "us",
      .parts = {"gate", "plan", "dispatch", "expert", "combine"}};
  std::vector<std::vector<std::string>> keys;
  for (const Pass& pass : passes) keys.push_back(pass.key);
  const std::vector<std::string> names = DistinctLabels(keys);
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
