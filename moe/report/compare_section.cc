#include <algorithm>
#include <cmath>
#include <vector>

#include <absl/strings/str_cat.h>

#include "moe/report/bar_chart.h"
#include "moe/report/format.h"
#include "moe/report/sections.h"
#include "moe/report/table.h"

namespace moe::report {
namespace {

constexpr size_t kMaxIntervals = 16;

std::string SignedPercent(double value) {
  if (!std::isfinite(value)) return NumberText(value);
  return absl::StrCat(value > 0 ? "+" : "", NumberText(value), " %");
}

std::string NoiseText(double noise_pct) {
  return std::isfinite(noise_pct) ? absl::StrCat("± ", NumberText(noise_pct, 2), " %") : "unknown";
}

std::string NameOf(const Difference& d) {
  return d.what.empty() ? d.metric : absl::StrCat(d.what, ": ", d.metric);
}

// Those beyond their noise first, and of equals the larger change.
std::vector<const Difference*> Ranked(const Comparison& comparison) {
  std::vector<const Difference*> ranked;
  for (const Difference& d : comparison.differences) {
    if (std::isfinite(d.change_pct)) ranked.push_back(&d);
  }
  const auto beyond = [](const Difference* d) {
    return d->verdict == Verdict::kBetter || d->verdict == Verdict::kWorse;
  };
  std::stable_sort(ranked.begin(), ranked.end(), [&](const Difference* a, const Difference* b) {
    if (beyond(a) != beyond(b)) return beyond(a);
    return std::abs(a->change_pct) > std::abs(b->change_pct);
  });
  return ranked;
}

std::string Intervals(const Comparison& comparison) {
  const std::vector<const Difference*> ranked = Ranked(comparison);
  IntervalChart chart = {
      .text = ChartText{.id = "compare-changes",
                        .title = absl::StrCat("Change from ", comparison.a, " to ", comparison.b),
                        .note = "Bars: 95 % interval of the change. Square: worse. "
                                "Circle: better. Grey: within noise, or noise unknown."},
      .x_label = "change (%)"};
  for (size_t i = 0; i < std::min(ranked.size(), kMaxIntervals); ++i) {
    const Difference& d = *ranked[i];
    chart.intervals.push_back(
        {.name = NameOf(d),
         .value = d.change_pct,
         .half_width = d.noise_pct,
         .verdict = d.verdict,
         .tooltip = absl::StrCat(NameOf(d), ": ", SignedPercent(d.change_pct), ", noise ",
                                 NoiseText(d.noise_pct), ": ", NameOf(d.verdict))});
  }
  if (ranked.size() > kMaxIntervals) {
    absl::StrAppend(&chart.text.note, " The largest ", kMaxIntervals, " of ", ranked.size(), ".");
  }
  return chart.intervals.empty() ? "" : Render(chart);
}

std::string Summary(const Comparison& comparison) {
  int better = 0, worse = 0, unknown = 0;
  for (const Difference& d : comparison.differences) {
    better += d.verdict == Verdict::kBetter ? 1 : 0;
    worse += d.verdict == Verdict::kWorse ? 1 : 0;
    unknown += d.verdict == Verdict::kUnknownNoise ? 1 : 0;
  }
  std::string text =
      absl::StrCat(comparison.b, " against ", comparison.a, ": ", comparison.differences.size(),
                   " figures, ", better, " better, ", worse, " worse, ", unknown,
                   " of unknown noise, the others equal or "
                   "within noise.");
  if (comparison.same_weights)
    absl::StrAppend(&text, " Both ended with the same weights, bit for bit.");
  if (comparison.only_in_a + comparison.only_in_b > 0) {
    absl::StrAppend(&text, " Without a counterpart: ", comparison.only_in_a, " of ", comparison.a,
                    ", ", comparison.only_in_b, " of ", comparison.b, ".");
  }
  return absl::StrCat("<p>", Escape(text), "</p>\n");
}

}  // namespace

Section CompareSection(const Comparison& comparison) {
  Section section = {.id = "compare", .heading = "Comparison"};
  Table table = {
      .title = "All differences",
      .names = {"what", "figure", comparison.a, comparison.b, "change", "noise (95 %)", "verdict"}};
  for (const Difference& d : comparison.differences) {
    TableCell verdict = TableCell::Text(NameOf(d.verdict));
    verdict.css_class = ClassOf(d.verdict);
    table.rows.push_back({TableCell::Text(d.what), TableCell::Text(d.metric),
                          TableCell::Number(d.a, 4), TableCell::Number(d.b, 4),
                          TableCell::Number(d.change_pct, SignedPercent(d.change_pct)),
                          TableCell::Number(d.noise_pct, NoiseText(d.noise_pct)), verdict});
  }
  section.body = absl::StrCat(Summary(comparison), "<div class=\"charts\">\n",
                              Intervals(comparison), "</div>\n", Render(table));
  return section;
}

}  // namespace moe::report
