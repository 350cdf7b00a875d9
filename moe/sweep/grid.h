// The cross product of axes.
#ifndef MOE_MOE_SWEEP_GRID_H_
#define MOE_MOE_SWEEP_GRID_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

namespace moe::sweep {

struct Axis {
  std::string name;                 // of the flag: "num-experts"
  std::vector<std::string> values;  // at least one
};

// A table longer than this is read by nobody.
inline constexpr int64_t kMostPoints = 10'000;

// All points [points][axes], the last axis fastest: (a0, b0), (a0, b1), (a1, b0) ...
// kInvalidArgument for more than kMostPoints, with the number of values of every axis.
absl::StatusOr<std::vector<std::vector<std::string>>> CrossProduct(absl::Span<const Axis> axes);

}  // namespace moe::sweep

#endif  // MOE_MOE_SWEEP_GRID_H_
