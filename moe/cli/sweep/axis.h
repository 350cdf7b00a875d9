// The axes of a sweep, "4,8,16", "1-3", "4-64*2", "1-2+0.25", "none,1.25", and their points.
#ifndef MOE_MOE_CLI_SWEEP_AXIS_H_
#define MOE_MOE_CLI_SWEEP_AXIS_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

namespace moe::sweep {

enum class AxisKind : uint8_t {
  kInteger,  // whole numbers below 2^31
  kReal,     // finite numbers
  kText,     // anything without a comma; the caller checks whether it is known
};

// The values that an axis accepts.
struct AxisForm {
  AxisKind kind = AxisKind::kInteger;
  std::vector<std::string> words = {};  // accepted beside numbers
  double least = 1;                     // least number
  bool above = false;                   // numbers must be above `least`, not just at least
  bool repeats = false;                 // a value may stand more than once
};

// The most values of a list: more than a table for people shows.
inline constexpr int64_t kMostAxisValues = 1000;

// Parses a comma list of values and ranges, in the given order. Ranges include both ends if the
// last is reached:
//   first-last         whole numbers, one apart
//   first-last+step    numbers, `step` apart
//   first-last*factor  numbers, each `factor` times the one before
// Numbers are returned in their shortest form ("1.50" is "1.5"), so that equal values are equal
// texts. kInvalidArgument "'<item>', expected ...": bad form, a number below the least, an empty or
// infinite range, a repeated value, too many values.
absl::StatusOr<std::vector<std::string>> ParseAxis(absl::string_view text, const AxisForm& form);

struct Axis {
  std::string name;                 // name of the flag: "num-experts"
  std::vector<std::string> values;  // at least one
  // The axis before this one whose values go with these, the first with the first and so on; it has
  // as many. -1: none.
  int with = -1;
};

// The most points of a sweep: more than a table for people shows.
inline constexpr int64_t kMostPoints = 10'000;

// All points [points][axes], the last axis fastest: (a0, b0), (a0, b1), (a1, b0) ...; where b goes
// with a: (a0, b0), (a1, b1) ...
// kInvalidArgument for more than kMostPoints, with the number of values of every axis.
absl::StatusOr<std::vector<std::vector<std::string>>> CrossProduct(absl::Span<const Axis> axes);

}  // namespace moe::sweep

#endif  // MOE_MOE_CLI_SWEEP_AXIS_H_
