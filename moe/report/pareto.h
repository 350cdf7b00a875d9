// The Pareto front of points: those that no other point beats.
#ifndef MOE_MOE_REPORT_PARETO_H_
#define MOE_MOE_REPORT_PARETO_H_

#include <cstdint>
#include <utility>
#include <vector>

#include <absl/types/span.h>

namespace moe::report {

enum class Better : uint8_t { kLower, kHigher };

// Indices of the points (x, y) for which no other is at least as good in both and better in one,
// from the lowest x to the highest; equal points are all on it. Points with NaN
// are on no front. O(n log n).
std::vector<int> ParetoFront(absl::Span<const std::pair<double, double>> points, Better x,
                             Better y);

}  // namespace moe::report

#endif  // MOE_MOE_REPORT_PARETO_H_
