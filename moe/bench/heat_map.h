// A matrix of bandwidths as text and as SVG.
#ifndef MOE_MOE_BENCH_HEAT_MAP_H_
#define MOE_MOE_BENCH_HEAT_MAP_H_

#include <string>
#include <vector>

#include <absl/strings/string_view.h>

namespace moe::bench {

struct HeatMap {
  int ranks = 0;
  std::vector<double> gbytes_per_s;  // [R][R], source by source; NaN: not measured
  std::string title;
  double at(int source, int destination) const {
    return gbytes_per_s[source * ranks + destination];
  }
};

// A line per source, a column per destination; a block beside each number is the darker the nearer
// it is to the largest one off the diagonal (that of memcpy is another matter).
std::string HeatText(const HeatMap& map);

// A standalone document: the same, coloured, with a legend. ASCII; the title is escaped.
std::string HeatSvg(const HeatMap& map);

}  // namespace moe::bench

#endif  // MOE_MOE_BENCH_HEAT_MAP_H_
