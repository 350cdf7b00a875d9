#include "moe/report/kernel_shares.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "moe/report/bar_chart.h"
#include "moe/report/labels.h"

namespace moe::report {
namespace {

constexpr size_t kMaxBars = 16;

struct Kernel {
  std::vector<std::string> key;
  bool computes = false;  // against multiply-adds, not a copy
  double size = 0;
  std::vector<double> shares_pct;  // of that size
};

double ShareOf(const BenchRow& r) {
  return std::isfinite(r.peak_pct) ? r.peak_pct : r.memcpy_pct;
}

std::vector<Kernel> KernelsOf(absl::Span<const Run> runs) {
  std::vector<Kernel> kernels;
  for (const Run& run : runs) {
    for (const BenchRow& r : run.bench) {
      if (!r.of_kernel || r.failed() || !std::isfinite(ShareOf(r))) continue;
      std::vector<std::string> key = {r.op,    r.algorithm, r.pass,  run.name,
                                      r.shape, r.routing,   r.dtype, r.threads_text()};
      const auto same = [&](const Kernel& kernel) {
        return kernel.key == key;
      };
      auto at = std::find_if(kernels.begin(), kernels.end(), same);
      if (at == kernels.end()) {
        at = kernels.insert(
            at, {.key = std::move(key), .computes = std::isfinite(r.peak_pct), .shares_pct = {}});
      }
      if (r.size() < at->size) continue;
      if (r.size() > at->size) at->shares_pct.clear();
      at->size = r.size();
      at->shares_pct.push_back(ShareOf(r));
    }
  }
  return kernels;
}

}  // namespace

std::string KernelShares(absl::Span<const Run> runs) {
  const std::vector<Kernel> kernels = KernelsOf(runs);
  if (kernels.empty()) return "";
  StackedBarChart chart = {.text = {.id = "bench-kernels",
                                    .title = "Kernels: percent of the limit",
                                    .note = "Of each its largest size."},
                           .x_label = "percent of the limit",
                           .unit = "%",
                           .parts = {"of a copy's bandwidth", "of the rate of multiply-adds"},
                           .bars = {}};
  std::vector<std::vector<std::string>> keys;
  for (const Kernel& kernel : kernels) keys.push_back(kernel.key);
  const std::vector<std::string> names = DistinctLabels(keys);
  for (size_t i = 0; i < std::min(kernels.size(), kMaxBars); ++i) {
    double mean = 0;
    for (const double share : kernels[i].shares_pct) mean += share;
    mean /= static_cast<double>(kernels[i].shares_pct.size());
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
