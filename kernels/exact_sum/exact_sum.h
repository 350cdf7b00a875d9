// Sums of float32 that do not depend on their order: fixed-point integers. Arrays and results are
// memory of the stream's device; every device gives the same bits, a NaN's payload aside.
#ifndef MOE_KERNELS_EXACT_SUM_EXACT_SUM_H_
#define MOE_KERNELS_EXACT_SUM_EXACT_SUM_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "kernels/base/dtype.h"
#include "kernels/base/stream.h"
#include "kernels/base/workspace.h"
#include "kernels/exact_sum/grid_tally.h"

namespace moe {

// The fixed-point grid of one training run. A value x becomes q = round_to_nearest_even(x / unit),
// an int64, and integer addition is associative: any order of terms, accumulation over rounds, and
// a ring over int64 all give the same bits. (Idea: Demmel and Nguyen, "Reproducible summation",
// IEEE TC 2015, with one bin, because gradients of a mean loss have a known range.)
struct ExactGrid {
  int unit_log2 = -50;    // unit = 2^unit_log2; -50 + n for a loss scale of 2^n
  int64_t max_terms = 1;  // M: no more than M terms are ever added to one element

  // |q| above this counts as non-finite, so that a sum of max_terms values cannot overflow.
  int64_t limit() const { return INT64_MAX / max_terms; }
};

// kInvalidArgument, in the name of `function`, unless max_terms >= 1 and the unit and its inverse
// are normal float64.
absl::Status CheckGrid(absl::string_view function, const ExactGrid& grid);

// sum[i] (+)= q(partial[i]); NaN, infinite and too large elements count as 0. Adds what the grid
// did to the elements to *tally. partial, sum [n]. Errors: kInvalidArgument if lengths differ.
absl::Status ExactAccumulate(const ExactGrid& grid, absl::Span<const float> partial,
                             absl::Span<int64_t> sum, Write write, GridTally* tally,
                             Stream& stream);

// out[i] = float(double(sum[i]) * unit * scale): one rounding to double, an exact product when
// scale is a power of two (else one more), one rounding to float. sum, out [n].
absl::Status ExactToFloat(const ExactGrid& grid, absl::Span<const int64_t> sum, double scale,
                          absl::Span<float> out, Stream& stream);

}  // namespace moe

#endif  // MOE_KERNELS_EXACT_SUM_EXACT_SUM_H_
