#include "moe/cli/sweep_settings.h"

#include <algorithm>
#include <iterator>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "moe/bench/collectives.h"
#include "moe/bench/layer_bench.h"
#include "moe/cli/common_settings.h"
#include "moe/cli/train_settings.h"

namespace moe::cli {
namespace {

using sweep::AxisKind;
using Table = std::vector<Setting>;

// Of `moe train`, but of one run with its files; the sweep has its own.
constexpr const char* kOfOneRun[] = {
    "out",     "eval-interval", "verify-replicas", "log-interval", "quiet",
    "verbose", "color",         "config",          "print-config", "help"};
// How a point runs, without a say in what comes out.
constexpr const char* kNoResult[] = {"comm-timeout", "backend", "share-device"};
constexpr const char* kLayerOnly[] = {"tokens",       "routing",   "iters",
                                      "warmup-iters", "max-noise", "timeout"};
// What a layer alone has, and how it runs; all else of a point is of training.
constexpr const char* kShared[] = {"router",
                                   "ranks",
                                   "threads",
                                   "device",
                                   "expert-model-parallel-size",
                                   "dispatch",
                                   "node-size",
                                   "moe-overlap-degree",
                                   "hidden-size",
                                   "num-experts",
                                   "moe-ffn-hidden-size",
                                   "moe-shared-expert-intermediate-size",
                                   "moe-shared-expert-gate",
                                   "activation",
                                   "moe-projection-biases",
                                   "dtype",
                                   "seed"};

template <typename List>
bool Contains(const List& list, absl::string_view name) {
  return std::find(std::begin(list), std::end(list), name) != std::end(list);
}

bool IsAxis(absl::string_view name) {
  const auto axes = SweepAxes();
  return std::any_of(axes.begin(), axes.end(),
                     [&](const SweepAxis& axis) { return axis.name == name; });
}

template <typename T>
std::string Text(T value) {
  return absl::StrCat(value);
}

void AddLayerMeasure(Table& table) {
  const char* const kGroup = "Measuring a layer (--measure layer)";
  const bench::LayerSpec layer;
  const bench::MeasureOptions d;
  table.insert(
      table.end(),
      {{kGroup, "tokens", "", 0, Kind::kInteger, "T", Text(layer.tokens), "tokens of each rank"},
       {kGroup, "routing", "", 0, Kind::kText, "KIND", "",
        "gives tokens their experts in place of the gate: uniform, zipf:S, hot_expert:P, "
        "hot_rank:P, "
        "ragged, zero_rank (moe bench --help); default: the gate, on random tokens"},
       {kGroup, "iters", "", 'n', Kind::kInteger, "N", Text(d.iterations), "timed calls, at least"},
       {kGroup, "warmup-iters", "", 'w', Kind::kInteger, "N", Text(d.warmup), "calls before them"},
       {kGroup, "max-noise", "", 0, Kind::kReal, "PERCENT", Text(d.max_noise_pct),
        "calls go on, doubling, until their deviation is at most this share of their mean"},
       {kGroup,
        "timeout",
        "",
        'T',
        Kind::kReal,
        "SECONDS",
        "1",
        "... or until a repetition has taken this long; 0: exactly -n calls",
        {},
        false,
        kMostSeconds}});
}

void AddSweep(Table& table) {
  const char* const kGroup = "Sweep";
  table.insert(
      table.end(),
      {{kGroup,
        "measure",
        "",
        0,
        Kind::kWord,
        "WHAT",
        "layer",
        "layer: one layer, forward and backward, on random tokens; train: every point is trained "
        "for --steps on --data",
        {"layer", "train"}},
       {kGroup,
        "repetitions",
        "",
        'r',
        Kind::kInteger,
        "N|auto",
        "auto",
        "of every point, with seeds seed, seed + 1, ...; auto: 5 of a layer, 1 of training",
        {"auto"}},
       {kGroup, "out", "", 'J', Kind::kText, "FILE", "",
        "JSON lines, a row as soon as its point ends; a file that holds rows is refused"},
       {kGroup, "resume", "", 0, Kind::kText, "FILE", "",
        "such a file: its points are not measured again, the others are appended"},
       {kGroup, "retry", "", 0, Kind::kSwitch, "", "",
        "with --resume: measure points whose row is an error again"},
       {kGroup, "max-memory", "", 0, Kind::kReal, "MiB", "",
        "of all ranks of this machine; a point estimated above it becomes an error row, as one "
        "above the memory that is available"}});
}

void AddOutput(Table& table) {
  const char* const kGroup = "Output";
  AddFormSettings(kGroup, table);
  table.push_back(
      {kGroup, "quiet", "", 'q', Kind::kSwitch, "", "", "no progress, only errors and the table"});
  AddColorSetting(kGroup, table);
  AddConfigSetting(kGroup, "settings by name; axes as texts: \"num_experts\": \"4,8\"", table);
  AddHelpSettings(kGroup, table);
}

}  // namespace

absl::Span<const SweepAxis> SweepAxes() {
  static const SweepAxis axes[] = {
      {"router", "router", {.kind = AxisKind::kText}},
      {"ranks", "R", {}},
      {"expert-model-parallel-size", "ep", {}},
      {"dispatch", "dispatch", {.kind = AxisKind::kText}},
      {"moe-overlap-degree", "d", {}},
      {"hidden-size", "H", {}},
      {"moe-ffn-hidden-size", "F", {}},
      {"dtype", "dtype", {.kind = AxisKind::kText}},
      {"tokens", "T", {}},
      {"micro-batch-size", "mbs", {}},
      {"routing", "routing", {.kind = AxisKind::kText}},
      {"num-experts", "E", {}},
      {"moe-router-topk", "k", {}},
      {"moe-expert-capacity-factor",
       "cf",
       {.kind = AxisKind::kReal, .words = {"none"}, .least = 0, .above = true}}};
  return axes;
}

const Table& PointSettings() {
  static const Table table = [] {
    Table rows = TrainSettings();
    for (Setting& s : rows) {
      // A layer's default differs: all ranks share the experts.
      if (s.name == "expert-model-parallel-size") absl::StrAppend(&s.help, "; of a layer R");
    }
    AddLayerMeasure(rows);
    return rows;
  }();
  return table;
}

bool IsOfOneRun(const Setting& setting) {
  return setting.group == "Profiling" || Contains(kOfOneRun, setting.name);
}

bool ChangesResults(Measure measure, const Setting& setting) {
  if (IsOfOneRun(setting) || Contains(kNoResult, setting.name)) return false;
  if (measure == Measure::kTrain) return !Contains(kLayerOnly, setting.name);
  return setting.group == "Routing" || Contains(kLayerOnly, setting.name) ||
         Contains(kShared, setting.name);
}

bool IsOfOther(Measure measure, const Setting& setting) {
  return !ChangesResults(measure, setting) &&
         ChangesResults(measure == Measure::kLayer ? Measure::kTrain : Measure::kLayer, setting);
}

Table SweepSettings() {
  Table table;
  AddSweep(table);
  for (Setting s : PointSettings()) {
    if (IsOfOneRun(s)) continue;
    if (IsAxis(s.name)) {
      if (s.kind == Kind::kWord) absl::StrAppend(&s.help, " (", absl::StrJoin(s.words, " | "), ")");
      s.kind = Kind::kText;
      s.words.clear();
      absl::StrAppend(&s.value_name, ",...");
    }
    table.push_back(std::move(s));
  }
  AddOutput(table);
  return table;
}

}  // namespace moe::cli
