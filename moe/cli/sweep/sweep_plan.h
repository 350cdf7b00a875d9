// The settings of `moe sweep`, of a point, with lists for its axes, and the points that follow from
// them.
#ifndef MOE_MOE_CLI_SWEEP_SWEEP_PLAN_H_
#define MOE_MOE_CLI_SWEEP_SWEEP_PLAN_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "moe/cli/base/launch.h"
#include "moe/cli/base/settings.h"
#include "moe/cli/base/train_options.h"
#include "moe/cli/measure/collectives.h"
#include "moe/cli/measure/layer_bench.h"
#include "moe/cli/measure/sweep_row.h"
#include "moe/cli/sweep/axis.h"
#include "moe/lm/training_loop.h"
#include "moe/plan/memory.h"
#include "moe/plan/model_cost.h"

namespace moe::cli {

// What `moe sweep` measures at its points.
enum class Measure : uint8_t { kLayer, kTrain };

// A flag that accepts a list.
struct SweepAxis {
  const char* name;   // "num-experts"
  const char* label;  // in progress lines: "E"
  sweep::AxisForm form;
};

// Tokens of a layer that is measured. `moe bench layer` calls them --tokens, too.
inline constexpr char kTokensPerRank[] = "tokens-per-rank";
// --tokens, which names files for training, is a synonym if a layer is measured and kTokensPerRank
// is not given.
absl::Status TakeTokensOfLayer(Settings& settings);

// `args` with the names of the flags that a bare --with stands between: "--with A:B".
// kInvalidArgument where there are none.
absl::StatusOr<std::vector<std::string>> NameCoupled(const std::vector<std::string>& args);

// The axes, slowest first: the order of the cross product.
absl::Span<const SweepAxis> SweepAxes();

// The settings of one point, with single values: those of `moe train`, then those for measuring a
// layer. A sweep itself sets rows with the role kOfOneRun.
const Table& PointSettings();
void AddLayerMeasure(measure::LayerSpec& layer, measure::MeasureOptions& measure, Table& table);

// Whether only the other measure reads a row of PointSettings().
bool IsOfOther(Measure measure, const Setting& setting);
// Whether results under `measure` depend on a row of PointSettings().
bool ChangesResults(Measure measure, const Setting& setting);

// The settings of the command: PointSettings() with texts for the axes, --measure, repetitions,
// files, output.
Table SweepSettings();

// A point, ready to run.
struct PlannedPoint {
  sweep::Point point;
  std::string label;     // "E=16 k=2 cf=1.25", and what else varies
  absl::Status refused;  // its values do not fit together; the fields below are not set then
  Launch launch;
  lm::TrainConfig train;            // Measure::kTrain
  measure::LayerSpec layer;         // Measure::kLayer
  measure::MeasureOptions measure;  // likewise
  plan::ModelSize layer_size;       // likewise
  plan::MemoryShape memory;
};

class SweepPlan {
 public:
  // Parses the axes and checks each of their values. kInvalidArgument "--flag: 'value', expected
  // ...", also for flags that --measure does not read, and for ranks other than a launcher's.
  static absl::StatusOr<SweepPlan> Make(const Settings& settings,
                                        absl::Span<const std::string> environment);

  Measure measure() const { return measure_; }
  size_t size() const { return values_.size(); }
  int repetitions() const { return repetitions_; }
  // All points run in the same world of processes, or each on its own threads.
  const Launch& launch() const { return launches_.begin()->second; }

  // The point at `index`, in the order of the cross product. Measure::kTrain reads `text`.
  PlannedPoint At(size_t index, const lm::Corpus& text) const;

 private:
  SweepPlan(Settings base, Measure measure) : base_(std::move(base)), measure_(measure) {}

  absl::Status ParseAxes(const Settings& settings);
  // Axes that --with couples, and points that then stand twice.
  absl::Status Couple(const Settings& settings);
  absl::Status FindLaunches(absl::Span<const std::string> environment);
  Settings SettingsOf(size_t index) const;
  std::string SettingsText(const Settings& point, int threads) const;
  std::string LabelOf(const Settings& point) const;

  Settings base_;  // a point's settings except for the axes
  Measure measure_;
  int repetitions_ = 1;
  std::vector<sweep::Axis> axes_;                 // the given axes
  std::vector<std::vector<std::string>> values_;  // [points][axes_]
  std::map<int, Launch> launches_;                // by number of ranks
};

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_SWEEP_SWEEP_PLAN_H_
