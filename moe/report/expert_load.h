// Expert load over steps, as heat maps.
#ifndef MOE_MOE_REPORT_EXPERT_LOAD_H_
#define MOE_MOE_REPORT_EXPERT_LOAD_H_

#include <cstddef>
#include <string>
#include <vector>

#include "moe/report/heat_map.h"
#include "moe/report/rows.h"

namespace moe::report {

inline constexpr size_t kMaxLoadColumns = 60;
inline constexpr size_t kMaxLoadRows = 64;
inline constexpr size_t kMaxLoadLayers = 4;

// Load of the experts of one MoE layer over their mean, per step: 1 is even, 0 dead. More than
// kMaxLoadColumns steps are averaged in stretches, more than kMaxLoadRows experts in groups of
// neighbours.
HeatMap ExpertLoadMap(const Run& run, int layer);

// Layers to show: the kMaxLoadLayers whose load over all steps is furthest from even, in the order
// of the model.
std::vector<int> LayersToShow(const Run& run);

// The maps as figures; `index` of the run makes their ids unique. Empty without expert loads.
std::string ExpertLoadMaps(const Run& run, size_t index);

}  // namespace moe::report

#endif  // MOE_MOE_REPORT_EXPERT_LOAD_H_
