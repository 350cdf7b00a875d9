// The settings of `moe sweep`: those of a point, lists for its axes, and its own.
#ifndef MOE_MOE_CLI_SWEEP_SWEEP_SETTINGS_H_
#define MOE_MOE_CLI_SWEEP_SWEEP_SETTINGS_H_

#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "moe/cli/base/settings.h"
#include "moe/cli/bench/collectives.h"
#include "moe/cli/bench/layer_bench.h"
#include "moe/cli/sweep/axis.h"

namespace moe::cli {

// What `moe sweep` measures at its points.
enum class Measure : uint8_t { kLayer, kTrain };

// A flag that takes a list.
struct SweepAxis {
  const char* name;   // "num-experts"
  const char* label;  // in progress lines: "E"
  sweep::AxisForm form;
};

// Slowest first: the order of the cross product.
absl::Span<const SweepAxis> SweepAxes();

// The settings of one point, every value single: those of `moe train`, then what a layer is
// measured with. Rows of kOfOneRun a sweep sets by itself.
const Table& PointSettings();
void AddLayerMeasure(bench::LayerSpec& layer, bench::MeasureOptions& measure, Table& table);

// Whether a row of PointSettings() is read by the other measure alone.
bool IsOfOther(Measure measure, const Setting& setting);
// Whether results under `measure` depend on a row of PointSettings().
bool ChangesResults(Measure measure, const Setting& setting);

// The command's: PointSettings() with texts for the axes, --measure, repetitions, files, output.
Table SweepSettings();

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_SWEEP_SWEEP_SETTINGS_H_
