// Grouped products of 16-bit types on tensor cores (mma.sync, sm_80 and later).
#ifndef MOE_KERNELS_GROUPED_GEMM_GROUPED_GEMM_MMA_CUDA_H_
#define MOE_KERNELS_GROUPED_GEMM_GROUPED_GEMM_MMA_CUDA_H_

#include "kernels/base/cuda_types.h"
#include "kernels/grouped_gemm/grouped_gemm_cuda.h"

namespace moe::gemm {

// Enqueue on `stream` and return; the error of the launch alone. Float32 accumulation: an element
// takes its terms in ascending order of the reduced index, 16 at a time, products exact; the order
// and the rounding within 16 are the tensor core's, so that bits differ from the CPU's, within
// (depth + 1) * 2^-23 of the sum of magnitudes. As on the CPU an element's bits depend on its own
// row and column alone: neither on the number of rows, nor on other groups. T: BFloat16 or Float16;
// TOut: float or T.
//
// Rows that all begin at a multiple of 16 bytes are fetched by asynchronous copies of 16 bytes,
// others element by element, with the same bits.
template <typename T, typename TOut>
cudaError_t RunMma(const CudaGroupedGemm<T, TOut>& gemm, cudaStream_t stream);
template <typename T>
cudaError_t RunMma(const CudaGroupedWeightGradient<T>& gradient, cudaStream_t stream);

}  // namespace moe::gemm

#endif  // MOE_KERNELS_GROUPED_GEMM_GROUPED_GEMM_MMA_CUDA_H_
