// The values of one axis of a sweep: "4,8,16", "1-3", "4-64*2", "1-2+0.25", "none,1.25".
#ifndef MOE_MOE_SWEEP_AXIS_H_
#define MOE_MOE_SWEEP_AXIS_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

namespace moe::sweep {

enum class AxisKind : uint8_t {
  kInteger,  // whole numbers below 2^31
  kReal,     // finite numbers
  kText,     // anything without a comma; whether it is known is the caller's matter
};

// What an axis takes.
struct AxisForm {
  AxisKind kind = AxisKind::kInteger;
  std::vector<std::string> words = {};  // beside numbers
  double least = 1;                     // of numbers
  bool above = false;                   // numbers must be above `least`, not just at least
};

// More than a table that somebody reads.
inline constexpr int64_t kMostAxisValues = 1000;

// Comma list of values and ranges, in the order given. Ranges hold both ends if the last is hit:
//   first-last         whole numbers, one apart
//   first-last+step    numbers, `step` apart
//   first-last*factor  numbers, each `factor` times the one before
// Numbers come back in their shortest form ("1.50" is "1.5"), so that equal values are equal texts.
// kInvalidArgument "'<item>', expected ...": bad form, a number below the least, an empty or
// endless range, a value that stands twice, too many values.
absl::StatusOr<std::vector<std::string>> ParseAxis(absl::string_view text, const AxisForm& form);

}  // namespace moe::sweep

#endif  // MOE_MOE_SWEEP_AXIS_H_
