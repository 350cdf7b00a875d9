#include "moe/report/kernel_shares.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "moe/report/bar_chart.h"
#include "moe/report/groups.h"
#include "moe/report/sweep_points.h"

namespace moe::report {
namespace {

constexpr size_t kMaxBars = 16;

struct Kernel {
  Key key;
  bool computes = false;  // against multiply-adds, not a copy
  double size = 0;
  std::vector<double> shares_pct;  // of that size
};

double ShareOf(const BenchRow& r) {
  return std::isfinite(r.peak_pct) ? r.peak_pct : r.memcpy_pct;
}

std::vector<Kernel> KernelsOf(absl::Span<const Run> runs) {
  Groups<Kernel> kernels;
  for (const Run& run : runs) {
    for (const BenchRow& r : run.bench) {
      if (!r.of_kernel || r.failed() || !std::isfinite(ShareOf(r))) continue;
      Kernel& kernel = kernels.Of({r.op, r.algorithm, r.pass, run.name, r.shape, r.routing, r.dtype,
                                   r.threads_text(), r.seed_text(), r.settings});
      if (kernel.shares_pct.empty()) kernel.computes = std::isfinite(r.peak_pct);
      if (r.size() < kernel.size) continue;
      if (r.size() > kernel.size) kernel.shares_pct.clear();
      kernel.size = r.size();
      kernel.shares_pct.push_back(ShareOf(r));
    }
  }
  return std::move(kernels).Take();
}

}  // namespace

std::string KernelShares(absl::Span<const Run> runs) {
  const std::vector<Kernel> kernels = KernelsOf(runs);
  if (kernels.empty()) return "";
  StackedBarChart chart = {.text = ChartText{.id = "bench-kernels",
                                             .title = "Kernels: percent of the limit",
                                             .note = "Of each its largest size."},
                           .x_label = "percent of the limit",
                           .unit = "%",
                           .parts = {"of a copy's bandwidth", "of the rate of multiply-adds"},
                           .bars = {}};
  const std::vector<std::string> names = PointLabels(KeysOf(kernels));
  for (size_t i = 0; i < std::min(kernels.size(), kMaxBars); ++i) {
    const auto n = static_cast<double>(kernels[i].shares_pct.size());
    double mean = 0;
    for (const double share : kernels[i].shares_pct) mean += share / n;
    StackedBar bar = {.name = names[i], .parts = {mean, 0}};
    if (kernels[i].computes) std::swap(bar.parts[0], bar.parts[1]);
    chart.bars.push_back(std::move(bar));
  }
  if (kernels.size() > kMaxBars) {
    absl::StrAppend(&chart.text.note, " The first ", kMaxBars, " of ", kernels.size(), " kernels.");
  }
  return Render(chart);
}

}  // namespace moe::report
