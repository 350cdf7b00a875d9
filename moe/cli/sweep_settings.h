// The settings of `moe sweep`: those of a point, lists for its axes, and its own.
#ifndef MOE_MOE_CLI_SWEEP_SETTINGS_H_
#define MOE_MOE_CLI_SWEEP_SETTINGS_H_

#include <vector>

#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "moe/cli/settings.h"
#include "moe/sweep/axis.h"

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
// measured with.
const std::vector<Setting>& PointSettings();

// Whether a row of PointSettings() is of a run's files and screen, which a sweep sets by itself.
bool IsOfOneRun(const Setting& setting);
// Whether a row of PointSettings() is read by the other measure alone.
bool IsOfOther(Measure measure, const Setting& setting);
// Whether results under `measure` depend on a row of PointSettings().
bool ChangesResults(Measure measure, const Setting& setting);

// The command's: PointSettings() with texts for the axes, --measure, repetitions, files, output.
std::vector<Setting> SweepSettings();

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_SWEEP_SETTINGS_H_
