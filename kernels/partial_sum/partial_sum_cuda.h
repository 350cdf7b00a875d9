// The CUDA path of partial_sum.h. Internal: plain C++ between partial_sum.cc (Abseil) and
// partial_sum_cuda.cu (nvcc, no Abseil).
#ifndef MOE_KERNELS_PARTIAL_SUM_PARTIAL_SUM_CUDA_H_
#define MOE_KERNELS_PARTIAL_SUM_PARTIAL_SUM_CUDA_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"

namespace moe::partial_sum {

// acc[i] = partial[i] + acc[i]. Both [n], in device memory, anywhere; 16-byte accesses if both
// begin at a multiple of 16 bytes. Enqueues on `stream` and returns; the error of the launch alone.
// Instantiated for float, uint64_t.
template <typename T>
cudaError_t Run(const T* partial, T* acc, int64_t n, cudaStream_t stream);

}  // namespace moe::partial_sum

#endif  // MOE_KERNELS_PARTIAL_SUM_PARTIAL_SUM_CUDA_H_
