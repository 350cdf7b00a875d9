// Divisors of a number, for messages about one that does not divide it.
#ifndef MOE_KERNELS_BASE_DIVISORS_H_
#define MOE_KERNELS_BASE_DIVISORS_H_

#include <string>

#include <absl/strings/str_cat.h>

namespace moe {

struct NextDivisors {
  int below = 0, above = 0;  // 0: there is none
};

// The largest divisor of `whole` below `number` and the smallest above it. O(whole).
inline NextDivisors DivisorsNextTo(int number, int whole) {
  NextDivisors next;
  for (int divisor = 1; divisor <= whole && next.above == 0; ++divisor) {
    if (whole % divisor != 0) continue;
    if (divisor < number) next.below = divisor;
    if (divisor > number) next.above = divisor;
  }
  return next;
}

// All divisors of `whole`, "1, 2, 4". O(whole).
inline std::string DivisorsOf(int whole) {
  std::string divisors;
  for (int divisor = 1; divisor <= whole; ++divisor) {
    if (whole % divisor == 0) absl::StrAppend(&divisors, divisor == 1 ? "" : ", ", divisor);
  }
  return divisors;
}

}  // namespace moe

#endif  // MOE_KERNELS_BASE_DIVISORS_H_
