// The peak rates of one core, for comparison with measured products.
#ifndef MOE_KERNELS_GROUPED_GEMM_FMA_PEAK_H_
#define MOE_KERNELS_GROUPED_GEMM_FMA_PEAK_H_

#include <cstdint>

#include "kernels/grouped_gemm/gemm_options.h"

namespace moe::gemm {

// Runs `steps` rounds of independent fused multiply-adds in registers, on the widest vectors that
// the products use. Returns the number of floating-point operations (two for each multiply-add).
double RunFma(int64_t steps);

// The peak of products of bfloat16 in an order: with tiles or dot products where products use them
// (four operations for each lane), else with multiply-adds. Takes about as long as RunFma.
double RunBFloat16Peak(BFloat16Order order, int64_t steps);

// Reads `count` floats from front to back, to measure memory bandwidth. Returns the largest, or 0.
float ReadFloats(const float* data, int64_t count);

}  // namespace moe::gemm

#endif  // MOE_KERNELS_GROUPED_GEMM_FMA_PEAK_H_
