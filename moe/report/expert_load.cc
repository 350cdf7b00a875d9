#include "moe/report/expert_load.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include <absl/strings/str_cat.h>
#include <absl/types/span.h>

#include "moe/report/format.h"

namespace moe::report {
namespace {

// `count` things in at most `limit` stretches of equal length, but for the last.
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

double MeanOf(absl::Span<const double> values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

HeatMapLine LineOf(const char* what, double first, double last) {
  std::string range = CountText(first);
  if (last > first) range = absl::StrCat(range, " to ", CountText(last));
  return {.label = CountText(first), .tooltip = absl::StrCat(what, " ", range)};
}

// max over experts of |load over mean - 1|, over all steps.
double Unevenness(const Run& run, int layer) {
  const std::vector<double> load = LoadOf(run, layer, 0, run.steps.size());
  const double mean = MeanOf(load);
  double worst = 0;
  for (const double l : load) worst = std::max(worst, std::abs(l / mean - 1));
  return mean > 0 ? worst : 0;
}

}  // namespace

HeatMap ExpertLoadMap(const Run& run, int layer) {
  const Stretches steps(run.steps.size(), kMaxLoadColumns);
  const Stretches experts(run.num_experts, kMaxLoadRows);
  HeatMap map = {.x_label = "step", .y_label = "expert", .value_label = "load / even load"};
  for (size_t r = 0; r < experts.size(); ++r) {
    map.rows.push_back(LineOf("expert", static_cast<double>(experts.begin(r)),
                              static_cast<double>(experts.end(r) - 1)));
  }
  map.values.resize(experts.size() * steps.size(), 0);
  for (size_t c = 0; c < steps.size(); ++c) {
    map.columns.push_back(
        LineOf("step", run.steps[steps.begin(c)].step, run.steps[steps.end(c) - 1].step));
    const std::vector<double> load = LoadOf(run, layer, steps.begin(c), steps.end(c));
    const double even = MeanOf(load);
    for (size_t r = 0; r < experts.size() && even > 0; ++r) {
      const auto group =
          absl::MakeConstSpan(load).subspan(experts.begin(r), experts.end(r) - experts.begin(r));
      map.values[r * steps.size() + c] = MeanOf(group) / even;
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

std::string ExpertLoadMaps(const Run& run, size_t index) {
  std::string html;
  if (run.num_experts == 0) return html;
  for (const int layer : LayersToShow(run)) {
    HeatMap map = ExpertLoadMap(run, layer);
    map.text.id = absl::StrCat("train-load-", index, "-", layer);
    map.text.title = absl::StrCat("Expert load, MoE layer ", layer, ": ", run.name);
    map.text.note = "1 is even; 0 is an expert that gets nothing.";
    if (run.num_layers > static_cast<int>(kMaxLoadLayers)) {
      absl::StrAppend(&map.text.note, " The ", kMaxLoadLayers, " least even of ", run.num_layers,
                      " layers are shown.");
    }
    html += Render(map);
  }
  return html;
}

}  // namespace moe::report
