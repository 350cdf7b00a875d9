#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/types/span.h>

#include "moe/cli/report/charts.h"
#include "moe/cli/report/format.h"
#include "moe/cli/report/page.h"

namespace moe::report {
namespace {

using Runs = std::vector<const Run*>;

// The number of colours.
size_t Drawn(const Runs& runs, ChartText& text) {
  const size_t drawn = std::min(runs.size(), kMaxSeries);
  text.LeaveOut(runs.size() - drawn, runs.size(), "runs", kInTable);
  return drawn;
}

// The line of each run, behind its name where there are several; of at most kMaxSeries.
std::vector<std::string> LinesOf(const Runs& runs) {
  std::vector<std::string> lines;
  for (const Run* run : runs) {
    if (run->line.empty() || lines.size() == kMaxSeries) continue;
    lines.push_back(runs.size() > 1 ? absl::StrCat(run->name, ": ", run->line) : run->line);
  }
  return lines;
}

XySeries Curve(const Run& run, int look, double TrainStep::*value, double factor) {
  XySeries series = {.name = run.name, .style = XyStyle::kLine, .look = look};
  for (const TrainStep& s : run.steps) {
    series.points.push_back({.x = s.step, .y = factor * s.*value});
  }
  return series;
}

// Validation passes are few: points, with the losses before the first and after the last step.
XySeries ValidationOf(const Run& run, int look) {
  XySeries series = {.name = run.name + ", validation", .look = look};
  const auto add = [&](double step, double loss) {
    if (!std::isfinite(loss)) return;
    if (!series.points.empty() && series.points.back().x == step) return;
    series.points.push_back({.x = step, .y = loss});
  };
  if (run.totals.has_value()) add(0, run.totals->validation_loss_before);
  for (const TrainStep& s : run.steps) add(s.step, s.validation_loss);
  if (run.totals.has_value()) add(run.totals->steps, run.totals->validation_loss);
  return series;
}

std::string LossChart(const Runs& runs) {
  XyChart chart = {
      .text = ChartText{.id = "train-loss", .title = "Loss", .note = "Lower is better."},
      .x = Axis{.label = "step", .kind = ScaleKind::kWhole},
      .y = Axis{.label = "loss (nats per token)"}};
  const size_t drawn = Drawn(runs, chart.text);
  for (size_t i = 0; i < drawn; ++i) {
    chart.series.push_back(Curve(*runs[i], static_cast<int>(i), &TrainStep::loss, 1));
    XySeries validation = ValidationOf(*runs[i], static_cast<int>(i));
    if (!validation.points.empty()) chart.series.push_back(std::move(validation));
  }
  chart.text.lines = LinesOf(runs);
  return Render(chart);
}

// A chart over steps for the runs of which any has a value above 0.
struct CurveOf {
  const char* id;
  const char* title;
  const char* y_label;
  const char* note;
  double TrainStep::*value;
  double factor = 1;
};
constexpr CurveOf kCurves[] = {
    {"train-lr", "Learning rate", "learning rate", "", &TrainStep::learning_rate},
    {"train-gnorm", "Gradient norm", "gradient norm", "Before clipping.",
     &TrainStep::gradient_norm},
    {"train-speed", "Speed", "tokens per second", "Of all ranks. Higher is better.",
     &TrainStep::tokens_per_s},
    {"train-drops", "Dropped slots", "dropped (%)", "Slots beyond the experts' capacity.",
     &TrainStep::drop_fraction, 100},
    {"train-balance", "MaxVio: load of the busiest expert", "MaxVio",
     "Load over even load - 1, of the worst layer: 0 is even, 1 is twice the even load.",
     &TrainStep::max_violation}};

std::string CurveChart(const Runs& runs, const CurveOf& c) {
  XyChart chart = {.text = ChartText{.id = c.id, .title = c.title, .note = c.note},
                   .x = Axis{.label = "step", .kind = ScaleKind::kWhole},
                   .y = Axis{.label = c.y_label, .from_zero = true}};
  bool any = false;
  const size_t drawn = Drawn(runs, chart.text);
  for (size_t i = 0; i < drawn; ++i) {
    chart.series.push_back(Curve(*runs[i], static_cast<int>(i), c.value, c.factor));
    for (const XyPoint& p : chart.series.back().points) any = any || p.y > 0;
  }
  chart.text.lines = LinesOf(runs);
  return any ? Render(chart) : "";  // a line at zero says nothing
}

std::string PhaseChart(const Runs& runs) {
  StackedBarChart chart = StepPhases("train-phases",
                                     "Means over steps and ranks. The all-reduce runs beside the "
                                     "backward pass: what it hides is not seen here.");
  for (const Run* run : runs) {
    const double step = SteadyMean(*run, &TrainStep::step_ms);
    if (!std::isfinite(step)) continue;
    chart.bars.push_back(PhaseBar(
        run->name, step,
        {SteadyMean(*run, &TrainStep::a2a_ms), SteadyMean(*run, &TrainStep::expert_ms),
         SteadyMean(*run, &TrainStep::attention_ms), SteadyMean(*run, &TrainStep::output_ms),
         SteadyMean(*run, &TrainStep::all_reduce_ms), SteadyMean(*run, &TrainStep::optimizer_ms)}));
  }
  chart.text.lines = LinesOf(runs);
  chart.text.LeaveOut(runs.size() - chart.bars.size(), runs.size(), "runs", "no such figure");
  return Render(chart);
}

// The columns of the table, and their values for a run.
std::vector<std::pair<const char*, TableCell>> ColumnsOf(const Run& run) {
  const TrainTotals totals = run.totals.value_or(TrainTotals());
  const TrainStep& first = run.steps.front();
  const TrainStep& last = run.steps.back();
  const double step_ms = SteadyMean(run, &TrainStep::step_ms);
  const measure::MeanSd speed = measure::MeanSdOf(SteadyValues(run, &TrainStep::tokens_per_s));
  using Cell = TableCell;
  return {
      {"run", Cell::Text(run.name)},
      {"steps", Cell::Count(last.step)},
      {"tokens", Cell::Count(totals.tokens)},
      {"time (s)", Cell::Number(totals.seconds)},
      {"loss, last step", Cell::Number(last.loss, 4)},
      {"validation loss, before", Cell::Number(totals.validation_loss_before, 4)},
      {"validation loss, after", Cell::Number(totals.validation_loss, 4)},
      {"tokens/s", Cell::Count(speed.mean)},
      {"± sd", Cell::Count(speed.sd)},
      {"step (ms)", Cell::Number(step_ms)},
      {"all-to-all (% of step)",
       Cell::Number(100 * SteadyMean(run, &TrainStep::a2a_ms) / step_ms, 2)},
      {"drops, first step (%)", Cell::Number(100 * first.drop_fraction)},
      {"drops, last step (%)", Cell::Number(100 * last.drop_fraction)},
      {"MaxVio", Cell::Number(last.max_violation)},
      {"dead experts", Cell::Count(last.dead_experts)},
      {"peak memory", Cell::Number(last.peak_bytes, BytesText(last.peak_bytes))},
      {"weights (xxh3)", Cell::Text(run.totals.has_value() ? totals.weights_hash : "did not end")}};
}

std::string RunTable(const Runs& runs) {
  Table table = {.title = "Training runs"};
  for (const Run* run : runs) {
    table.names.clear();
    table.rows.emplace_back();
    for (auto& [name, cell] : ColumnsOf(*run)) {
      table.names.emplace_back(name);
      table.rows.back().push_back(std::move(cell));
    }
  }
  return Render(table);
}

// Cuts `count` things into at most `limit` stretches of equal length, except for the last.
class Stretches {
 public:
  Stretches(size_t count, size_t limit)
      : count_(count), length_(std::max<size_t>(1, (count + limit - 1) / limit)) {}
  size_t size() const { return (count_ + length_ - 1) / length_; }
  size_t begin(size_t i) const { return i * length_; }
  size_t end(size_t i) const { return std::min(count_, (i + 1) * length_); }

 private:
  size_t count_, length_;
};

// Slots of each expert over the steps from `begin` to before `end`.
std::vector<double> LoadOf(const Run& run, int layer, size_t begin, size_t end) {
  std::vector<double> load(run.num_experts, 0);
  for (size_t s = begin; s < end; ++s) {
    for (int e = 0; e < run.num_experts; ++e) {
      load[e] += run.steps[s].expert_load[layer * run.num_experts + e];
    }
  }
  return load;
}

// "3", or "3–5".
std::string RangeText(double first, double last) {
  return last > first ? absl::StrCat(CountText(first), "–", CountText(last)) : CountText(first);
}

// max over experts of |load over mean - 1|, over all steps.
double Unevenness(const Run& run, int layer) {
  const std::vector<double> load = LoadOf(run, layer, 0, run.steps.size());
  const double mean = measure::MeanSdOf(load).mean;
  double worst = 0;
  for (const double l : load) worst = std::max(worst, std::abs(l / mean - 1));
  return mean > 0 ? worst : 0;
}

// The maps as figures; `index` of the run makes their ids unique. Empty without expert loads.
std::string ExpertLoadMaps(const Run& run, size_t index) {
  std::string html;
  if (run.num_experts == 0) return html;
  for (const int layer : LayersToShow(run)) {
    HeatMap map = ExpertLoadMap(run, layer);
    map.text.id = absl::StrCat("train-load-", index, "-", layer);
    map.text.title = absl::StrCat("Expert load, MoE layer ", layer, ": ", run.name);
    map.text.note = "1 is even; 0 is an expert that gets nothing.";
    map.text.lines = LinesOf({&run});
    if (run.num_layers > static_cast<int>(kMaxLoadLayers)) {
      absl::StrAppend(&map.text.note, " The ", kMaxLoadLayers, " least even of ", run.num_layers,
                      " layers are shown.");
    }
    html += Render(map);
  }
  return html;
}

}  // namespace

HeatMap ExpertLoadMap(const Run& run, int layer) {
  const Stretches steps(run.steps.size(), kMaxLoadColumns);
  const Stretches experts(run.num_experts, kMaxLoadRows);
  HeatMap map = {
      .x = Axis{.label = "step"}, .y = Axis{.label = "expert"}, .value_label = "load / even load"};
  for (size_t r = 0; r < experts.size(); ++r) {
    map.y.names.push_back(
        RangeText(static_cast<double>(experts.begin(r)), static_cast<double>(experts.end(r) - 1)));
  }
  map.values.resize(experts.size() * steps.size(), 0);
  for (size_t c = 0; c < steps.size(); ++c) {
    map.x.names.push_back(
        RangeText(run.steps[steps.begin(c)].step, run.steps[steps.end(c) - 1].step));
    const std::vector<double> load = LoadOf(run, layer, steps.begin(c), steps.end(c));
    const double even = measure::MeanSdOf(load).mean;
    for (size_t r = 0; r < experts.size() && even > 0; ++r) {
      const auto group =
          absl::MakeConstSpan(load).subspan(experts.begin(r), experts.end(r) - experts.begin(r));
      map.values[r * steps.size() + c] = measure::MeanSdOf(group).mean / even;
    }
  }
  return map;
}

std::vector<int> LayersToShow(const Run& run) {
  std::vector<int> layers(run.num_layers);
  std::iota(layers.begin(), layers.end(), 0);
  if (layers.size() <= kMaxLoadLayers) return layers;
  std::vector<double> unevenness;
  for (const int layer : layers) unevenness.push_back(Unevenness(run, layer));
  std::stable_sort(layers.begin(), layers.end(),
                   [&](int a, int b) { return unevenness[a] > unevenness[b]; });
  layers.resize(kMaxLoadLayers);
  std::sort(layers.begin(), layers.end());
  return layers;
}

Section TrainSection(absl::Span<const Run> all) {
  Section section = {.id = "train", .heading = "Training"};
  Runs runs;
  for (const Run& run : all) {
    if (run.kind == RunKind::kTrain) runs.push_back(&run);
  }
  if (runs.empty()) return section;
  section.body = "<div class=\"charts\">\n";
  section.body += LossChart(runs);
  for (const CurveOf& c : kCurves) section.body += CurveChart(runs, c);
  section.body += PhaseChart(runs);
  ChartText maps;
  const size_t drawn = Drawn(runs, maps);
  for (size_t i = 0; i < drawn; ++i) section.body += ExpertLoadMaps(*runs[i], i);
  section.body += "</div>\n";
  if (!maps.note.empty()) absl::StrAppend(&section.body, "<p>Maps. ", maps.note, "</p>\n");
  section.body += RunTable(runs);
  return section;
}

}  // namespace moe::report
