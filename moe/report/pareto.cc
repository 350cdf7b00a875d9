#include "moe/report/pareto.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace moe::report {

std::vector<int> ParetoFront(absl::Span<const std::pair<double, double>> points, Better x,
                             Better y) {
  // Costs, so that less is better in both.
  const auto cost = [&](int i) {
    const auto& [a, b] = points[i];
    return std::pair(x == Better::kLower ? a : -a, y == Better::kLower ? b : -b);
  };
  std::vector<int> order;
  for (int i = 0; i < static_cast<int>(points.size()); ++i) {
    if (!std::isnan(points[i].first) && !std::isnan(points[i].second)) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](int i, int j) { return cost(i) < cost(j); });
  std::vector<int> front;
  double best = std::numeric_limits<double>::infinity();
  for (const int i : order) {
    const bool same = !front.empty() && cost(i) == cost(front.back());
    if (cost(i).second >= best && !same) continue;
    best = cost(i).second;
    front.push_back(i);
  }
  if (x == Better::kHigher) std::reverse(front.begin(), front.end());
  return front;
}

}  // namespace moe::report
