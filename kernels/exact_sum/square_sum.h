// A sum of squares that does not depend on the order in which its terms are added.
#ifndef MOE_KERNELS_EXACT_SUM_SQUARE_SUM_H_
#define MOE_KERNELS_EXACT_SUM_SQUARE_SUM_H_

#include <cstdint>

#include <math.h>

#include "kernels/base/tensor_view.h"

namespace moe {

// A fixed-point number of 192 bits in unit 2^-120: digit i counts 2^(32 i - 120). Digits are added
// as integers, without carries, so that ranks and threads may add theirs in any order; 2^31 terms
// fit. After the digits follows the number of terms that are NaN, infinite, negative or from 2^72
// on, which are not added.
constexpr int kSquareSumDigits = 6;
constexpr int kSquareSumUnitLog2 = -120;
constexpr int kSquareSumSize = kSquareSumDigits + 1;

// The sum in float64, within a unit of its last place; the same bits for the same sum.
double SquareSumValue(const int64_t (&sum)[kSquareSumSize]);

// The elements of a matrix whose squares form one term: rows x cols of them, rows `stride` apart;
// at most 4096, or one row.
struct SquaresUnit {
  int64_t begin;  // index of the first element
  int64_t rows, cols, stride;
  int64_t sum = 0;  // which of several sums the term is added to
};

// at[i] is added to digit first + i. first < 0: the sum cannot represent the term.
struct SquareSumTerm {
  int first;
  uint64_t at[3];
};

// Rounded to the unit, ties to even.
MOE_HOST_DEVICE inline SquareSumTerm SquareSumTermOf(double term) {
  if (!(term >= 0 && term < 0x1p72)) return {-1, {}};
  int exponent = 0;
  const double fraction = frexp(term, &exponent);  // term = fraction * 2^exponent
  int shift = exponent - 53 - kSquareSumUnitLog2;
  auto integer = static_cast<uint64_t>(fraction * 0x1p53);
  if (shift < 0) {
    integer = static_cast<uint64_t>(rint(term * 0x1p120));
    shift = 0;
  }
  const int offset = shift % 32;
  const uint64_t low = (integer & 0xffffffffu) << offset;
  const uint64_t high = ((integer >> 32) << offset) + (low >> 32);
  return {shift / 32, {low & 0xffffffffu, high & 0xffffffffu, high >> 32}};
}

}  // namespace moe

#endif  // MOE_KERNELS_EXACT_SUM_SQUARE_SUM_H_
