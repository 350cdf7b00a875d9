#include "moe/cli/report/compare.h"

#include <algorithm>
#include <utility>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_replace.h>

#include "moe/cli/report/charts.h"
#include "moe/cli/report/format.h"
#include "moe/cli/report/labels.h"

namespace moe::report {
namespace {

struct Metric {
  const char* key;
  const char* name;
  Better better = Better::kLower;
};

struct Measured {
  Metric metric;
  Sample sample;
};

using Labels = std::vector<std::string>;

// The key of a group, as texts, and its measurements; in the order of the file.
using MeasuredGroups = std::vector<std::pair<Key, std::vector<Measured>>>;

template <typename Row>
struct RowsOfKey {
  Key key;
  std::vector<const Row*> rows;
};

template <typename Row>
std::vector<RowsOfKey<Row>> Grouped(const std::vector<Row>& rows, Key (*key_of)(const Row& row)) {
  Groups<RowsOfKey<Row>> groups;
  for (const Row& row : rows) {
    if (!row.failed()) groups.Of(key_of(row)).rows.push_back(&row);
  }
  return std::move(groups).Take();
}

// Adds the mean over the repetitions of a group. Its error comes from the repetitions, or for a
// single one from `cv_pct`.
template <typename Row>
void Add(const std::vector<const Row*>& rows, const Metric& metric, double Row::*value,
         double Row::*cv_pct, std::vector<Measured>& into) {
  std::vector<double> values;
  const Row* last = nullptr;
  for (const Row* row : rows) {
    if (!std::isfinite(row->*value)) continue;
    values.push_back(row->*value);
    last = row;
  }
  if (values.empty()) return;
  const bool alone = values.size() == 1 && cv_pct != nullptr;
  into.push_back({metric, alone ? SampleOf(values[0], std::abs(values[0]) * last->*cv_pct / 100)
                                : SampleOf(values)});
}

// Exact: two sizes whose rounded texts agree are not repetitions of each other.
std::string ExactSizeText(const BenchRow& r) {
  if (!std::isfinite(r.size_bytes)) return "";
  double units = r.size_bytes;
  while (units >= 1024) units /= 1024;
  double shown = 0;
  const std::string digits = absl::StrReplaceAll(NumberText(units), {{",", ""}});
  const bool exact = absl::SimpleAtod(digits, &shown) && shown == units;
  return exact ? BytesText(r.size_bytes) : CountText(r.size_bytes) + " B";
}

Key BenchKey(const BenchRow& r) {
  return {r.op,
          r.algorithm,
          r.backend,
          r.transport,
          Plural(r.ranks, "rank"),
          Plural(r.hosts, "host"),
          r.routing,
          r.shape,
          r.pass,
          r.phase,
          r.pair(),
          r.threads_text(),
          r.seed_text(),
          r.dtype,
          ExactSizeText(r),
          r.settings};
}

template <typename Row>
std::vector<Repetitions<Row>> RepetitionsOf(const std::vector<Row>& a, const std::vector<Row>& b,
                                            Key (*key_of)(const Row& row),
                                            Labels (*labels_of)(const std::vector<Key>& keys)) {
  std::map<Key, std::vector<const Row*>> in_a;
  for (auto& [key, rows] : Grouped(a, key_of)) in_a[key] = rows;
  std::vector<Key> keys;
  std::vector<Repetitions<Row>> all;
  for (auto& [key, rows] : Grouped(b, key_of)) {
    keys.push_back(key);
    all.push_back({.what = "", .rows = rows, .base = in_a[key]});
  }
  const Labels labels = labels_of(keys);
  for (size_t i = 0; i < all.size(); ++i) all[i].what = labels[i];
  return all;
}

MeasuredGroups BenchGroups(const Run& run) {
  // One figure per group, the first that it contains: the others follow from it.
  constexpr std::pair<Metric, double BenchRow::*> kFigures[] = {
      {{"busbw", "busbw (GB/s)", Better::kHigher}, &BenchRow::busbw},
      {{"algbw", "algbw (GB/s)", Better::kHigher}, &BenchRow::algbw},
      {{"gflops", "GFLOP/s", Better::kHigher}, &BenchRow::gflops},
      {{"time", "time (us)"}, &BenchRow::time_us}};
  MeasuredGroups groups;
  for (const auto& [what, group] : Grouped(run.bench, BenchKey)) {
    std::vector<Measured> m;
    for (const auto& [metric, value] : kFigures) {
      if (m.empty()) Add(group, metric, value, &BenchRow::cv_pct, m);
      // The bus bandwidth of one rank is 0.
      if (value == &BenchRow::busbw && !m.empty() && m.back().sample.mean == 0) m.clear();
    }
    groups.emplace_back(what, std::move(m));
  }
  return groups;
}

MeasuredGroups SweepGroups(const Run& run) {
  MeasuredGroups groups;
  for (const auto& [what, group] : Grouped(run.sweep, PointKey)) {
    std::vector<Measured> m;
    const auto add = [&, &rows = group](const Metric& metric, double SweepRow::*value) {
      Add<SweepRow>(rows, metric, value, nullptr, m);
    };
    add({"tok_s", "tokens/s", Better::kHigher}, &SweepRow::tokens_per_s);
    // A single row is the mean of repetitions and contains their standard deviation.
    if (group.size() == 1 && !m.empty() && std::isfinite(group[0]->tokens_per_s_sd)) {
      m.back().sample = SampleOf(group[0]->tokens_per_s, group[0]->tokens_per_s_sd);
    }
    add({"step_ms", "step (ms)"}, &SweepRow::step_ms);
    add({"a2a_ms", "all-to-all (ms)"}, &SweepRow::a2a_ms);
    add({"drop_end", "dropped (%)"}, &SweepRow::drop_final_pct);
    add({"val_loss", "validation loss"}, &SweepRow::validation_loss);
    add({"peak_mib", "peak memory (MiB)"}, &SweepRow::peak_mib);
    groups.emplace_back(what, std::move(m));
  }
  return groups;
}

MeasuredGroups TrainGroups(const Run& run) {
  constexpr std::pair<Metric, double TrainStep::*> kSeries[] = {
      {{"tok_s", "tokens/s", Better::kHigher}, &TrainStep::tokens_per_s},
      {{"step_ms", "step (ms)"}, &TrainStep::step_ms},
      {{"a2a_ms", "all-to-all (ms)"}, &TrainStep::a2a_ms},
      {{"expert_ms", "experts (ms)"}, &TrainStep::expert_ms},
      {{"all_reduce_ms", "all-reduce (ms)"}, &TrainStep::all_reduce_ms},
      {{"drop", "dropped (share)"}, &TrainStep::drop_fraction}};
  std::vector<Measured> m;
  if (run.totals.has_value() && std::isfinite(run.totals->validation_loss)) {
    m.push_back({{"val_loss", "validation loss"}, {.mean = run.totals->validation_loss}});
  }
  for (const auto& [metric, value] : kSeries) {
    const std::vector<double> values = SteadyValues(run, value);
    if (!values.empty()) m.push_back({metric, SampleOfSeries(values)});
  }
  return {{{""}, std::move(m)}};
}

MeasuredGroups GroupsOf(const Run& run) {
  if (run.kind == RunKind::kPlan)
    return {};  // what is predicted is compared with what was measured
  if (run.kind == RunKind::kBench) return BenchGroups(run);
  return run.kind == RunKind::kSweep ? SweepGroups(run) : TrainGroups(run);
}

Verdict Judge(const Difference& d, Better better) {
  if (d.a == d.b) return Verdict::kEqual;
  if (!std::isfinite(d.noise_pct) || !std::isfinite(d.change_pct)) return Verdict::kUnknownNoise;
  if (std::abs(d.change_pct) <= d.noise_pct) return Verdict::kWithinNoise;
  return (d.change_pct > 0) == (better == Better::kHigher) ? Verdict::kBetter : Verdict::kWorse;
}

Difference DifferenceOf(const std::string& what, const Measured& a, const Measured& b) {
  Difference d = {.what = what,
                  .metric = a.metric.name,
                  .key = a.metric.key,
                  .a = a.sample.mean,
                  .b = b.sample.mean};
  if (d.a != 0) {
    d.change_pct = 100 * (d.b - d.a) / std::abs(d.a);
    d.noise_pct = 100 * NoiseOfDifference(a.sample, b.sample) / std::abs(d.a);
  } else if (d.b == 0) {
    d.change_pct = 0;
  }
  d.verdict = Judge(d, a.metric.better);
  return d;
}

bool IsBeyondNoise(Verdict verdict) {
  return verdict == Verdict::kBetter || verdict == Verdict::kWorse;
}

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

// Differences beyond their noise come first, and among those the larger changes.
std::vector<const Difference*> Ranked(const Comparison& comparison) {
  std::vector<const Difference*> ranked;
  for (const Difference& d : comparison.differences) {
    if (std::isfinite(d.change_pct)) ranked.push_back(&d);
  }
  std::stable_sort(ranked.begin(), ranked.end(), [&](const Difference* a, const Difference* b) {
    const bool beyond = IsBeyondNoise(a->verdict);
    if (beyond != IsBeyondNoise(b->verdict)) return beyond;
    return std::abs(a->change_pct) > std::abs(b->change_pct);
  });
  return ranked;
}

// Changes on one axis around zero, one below the other, with a series for each verdict.
std::string Intervals(const Comparison& comparison) {
  const std::vector<const Difference*> ranked = Ranked(comparison);
  XyChart chart = {
      .text = ChartText{.id = "compare-changes",
                        .title = absl::StrCat("Change from ", comparison.a, " to ", comparison.b),
                        .note = "Whiskers: 95 % interval of the change."},
      .x = Axis{.label = "change (%)", .from_zero = true},
      .y = Axis{}};
  for (int i = 0; i <= static_cast<int>(Verdict::kEqual); ++i) {
    const auto verdict = static_cast<Verdict>(i);
    chart.series.push_back({.name = NameOf(verdict), .look = i, .faint = !IsBeyondNoise(verdict)});
  }
  const size_t drawn = std::min(ranked.size(), kMaxBars);
  for (size_t i = 0; i < drawn; ++i) {
    const Difference& d = *ranked[i];
    chart.y.names.push_back(NameOf(d));
    chart.series[static_cast<size_t>(d.verdict)].points.push_back(
        {.x = d.change_pct,
         .y = static_cast<double>(i),
         .x_error = std::isfinite(d.noise_pct) ? d.noise_pct : 0});
  }
  std::erase_if(chart.series, [](const XySeries& s) { return s.points.empty(); });
  const size_t all = comparison.differences.size();
  chart.text.LeaveOut(ranked.size() - drawn, all, "figures", "smaller changes; the table has all");
  chart.text.LeaveOut(all - ranked.size(), all, "figures", "0 before: no percentage");
  return Render(chart);
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

std::vector<Repetitions<BenchRow>> BenchRepetitions(const Run& a, const Run& b) {
  return RepetitionsOf(a.bench, b.bench, BenchKey, PointLabels);
}

std::vector<Repetitions<SweepRow>> SweepRepetitions(const Run& a, const Run& b) {
  return RepetitionsOf(a.sweep, b.sweep, PointKey, PointLabels);
}

const char* NameOf(Verdict verdict) {
  constexpr const char* kNames[] = {"better", "worse", "within noise", "noise unknown", "equal"};
  return kNames[static_cast<int>(verdict)];
}

absl::StatusOr<Comparison> Compare(const Run& a, const Run& b) {
  if (a.kind != b.kind) {
    return absl::InvalidArgumentError(absl::StrCat("'", a.path, "' is of moe ", NameOf(a.kind),
                                                   " and '", b.path, "' of moe ", NameOf(b.kind),
                                                   ", expected two of one command"));
  }
  Comparison comparison = {.a = a.name, .b = b.name, .kind = a.kind};
  MeasuredGroups in_a = GroupsOf(a);
  const MeasuredGroups in_b = GroupsOf(b);
  std::map<Key, const std::vector<Measured>*> of_b;
  for (const auto& [what, measured] : in_b) of_b[what] = &measured;
  comparison.only_in_a = static_cast<int>(
      std::erase_if(in_a, [&](const auto& group) { return !of_b.contains(group.first); }));
  comparison.only_in_b = static_cast<int>(in_b.size() - in_a.size());
  std::vector<Key> common;
  for (const auto& [what, measured] : in_a) common.push_back(what);
  const Labels labels = a.kind == RunKind::kTrain ? DistinctLabels(common) : PointLabels(common);
  for (size_t i = 0; i < in_a.size(); ++i) {
    for (const Measured& ma : in_a[i].second) {
      for (const Measured& mb : *of_b[common[i]]) {
        if (absl::string_view(ma.metric.key) != mb.metric.key) continue;
        comparison.differences.push_back(DifferenceOf(labels[i], ma, mb));
      }
    }
  }
  if (comparison.differences.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("no row of '", a.path, "' has a counterpart in '", b.path, "'"));
  }
  comparison.same_weights = a.totals.has_value() && b.totals.has_value() &&
                            !a.totals->weights_hash.empty() &&
                            a.totals->weights_hash == b.totals->weights_hash;
  return comparison;
}

Section CompareSection(const Comparison& comparison) {
  Section section = {.id = "compare", .heading = "Comparison"};
  Table table = {
      .title = "All differences",
      .names = {"what", "figure", comparison.a, comparison.b, "change", "noise (95 %)", "verdict"}};
  for (const Difference& d : comparison.differences) {
    TableCell verdict = TableCell::Text(NameOf(d.verdict));
    if (IsBeyondNoise(d.verdict)) verdict.css_class = NameOf(d.verdict);
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
