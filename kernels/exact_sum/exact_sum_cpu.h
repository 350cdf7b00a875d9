// Ranges of exact sums on the CPU.
#ifndef MOE_KERNELS_EXACT_SUM_EXACT_SUM_CPU_H_
#define MOE_KERNELS_EXACT_SUM_EXACT_SUM_CPU_H_

#include <cstdint>

#include "kernels/exact_sum/grid_tally.h"

namespace moe {

enum class SumWrite : uint8_t {
  kAdd,
  kOverwrite,
  kStreamed,  // as kOverwrite, for sums larger than the cache: bypasses it where the CPU can
};

// sum[i] (+)= round(partial[i] * inverse_unit), 0 for elements that are NaN or whose |q| is above
// `limit`. Returns their tally.
GridTally ExactAccumulateRange(const float* partial, double inverse_unit, int64_t limit,
                               SumWrite write, int64_t* sum, int64_t n);

// out[r * cols + c] = float(double(sum[r * stride + c]) * factor)
void ExactToFloatRows(const int64_t* sum, int64_t rows, int64_t cols, int64_t stride, double factor,
                      float* out);
inline void ExactToFloatRange(const int64_t* sum, double factor, float* out, int64_t n) {
  ExactToFloatRows(sum, 1, n, n, factor, out);
}

// One block of AddSquares.
double SumOfSquaresBlock(const float* x, int64_t n);

}  // namespace moe

#endif  // MOE_KERNELS_EXACT_SUM_EXACT_SUM_CPU_H_
