// What the rows of a sweep are of, and the names of points that have settings.
#ifndef MOE_MOE_REPORT_SWEEP_POINTS_H_
#define MOE_MOE_REPORT_SWEEP_POINTS_H_

#include <string>
#include <vector>

#include "moe/report/groups.h"
#include "moe/report/rows.h"

namespace moe::report {

// All that a row says of its point, its settings last: rows with equal keys are of the same point.
Key PointKey(const SweepRow& row);

// The same, but for the capacity factor.
Key SeriesKey(const SweepRow& row);

// One name per key, whose last text are settings: what DistinctLabels makes of all texts but
// the settings. Keys that have one name so get the settings that differ between them as well:
// "E 8 · seed 1", "E 8 · seed default".
std::vector<std::string> PointLabels(const std::vector<Key>& keys);

}  // namespace moe::report

#endif  // MOE_MOE_REPORT_SWEEP_POINTS_H_
