// Grouped products of float32 on a GPU, with the bits of the CPU.
#ifndef MOE_KERNELS_GROUPED_GEMM_GROUPED_GEMM_FMA_CUDA_H_
#define MOE_KERNELS_GROUPED_GEMM_GROUPED_GEMM_FMA_CUDA_H_

#include "kernels/base/cuda_types.h"
#include "kernels/grouped_gemm/grouped_gemm_cuda.h"

namespace moe::gemm {

// Enqueue on `stream` and return; the error of the launch alone. One chain of fmaf an element, in
// ascending order of the reduced index: the bits of gemm::Reference.
cudaError_t RunFma(const CudaGroupedGemm<float>& gemm, cudaStream_t stream);
cudaError_t RunFma(const CudaGroupedWeightGradient<float>& gradient, cudaStream_t stream);

}  // namespace moe::gemm

#endif  // MOE_KERNELS_GROUPED_GEMM_GROUPED_GEMM_FMA_CUDA_H_
