// A grid of coloured cells: how a value spreads over rows and changes over columns.
#ifndef MOE_MOE_REPORT_HEAT_MAP_H_
#define MOE_MOE_REPORT_HEAT_MAP_H_

#include <string>
#include <vector>

#include "moe/report/figure.h"

namespace moe::report {

struct HeatMapLine {
  std::string label;    // of a tick
  std::string tooltip;  // "expert 3"
};

struct HeatMap {
  ChartText text;
  std::string x_label, y_label, value_label;
  std::vector<HeatMapLine> columns, rows;
  std::vector<double> values;  // [rows][columns], not below 0; NaN: no cell
  double middle = 1;           // has a tick on the colour scale; the scale starts at 0
};

// One mark per cell that has a value. Row 0 is at the top.
std::string Render(const HeatMap& map);

// The colour of `share`, 0 to 1, of cividis (Nunez, Anderton, Renslow 2018): its lightness grows
// evenly for all kinds of colour vision. 0xRRGGBB.
int HeatColour(double share);

}  // namespace moe::report

#endif  // MOE_MOE_REPORT_HEAT_MAP_H_
