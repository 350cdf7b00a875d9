// The CUDA path of rotary.cc. Internal: plain C++ between rotary.cc (Abseil) and rotary_cuda.cu
// (nvcc, no Abseil).
#ifndef MOE_KERNELS_ATTENTION_ROTARY_CUDA_H_
#define MOE_KERNELS_ATTENTION_ROTARY_CUDA_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"

namespace moe::attention {

// The arguments of ApplyRotary, in device memory.
template <typename T>
struct CudaRotary {
  MatrixView<T> x;  // [T, heads * D], D even; in place
  int heads;
  const int64_t* sequence_offsets;  // [B + 1], from 0 to T
  int64_t sequences;                // B
  const float* cosine;              // [N, D / 2], N >= the longest sequence: the CPU's table
  const float* sine;
  float direction;  // the value of a RotaryDirection: 1 or -1
};

// Enqueues on `stream` and returns; the error of the launch alone. The bits of rotary.cc: angles
// come from the table, which the host computes in float64. 16-byte accesses where rows begin at
// multiples of 16 bytes and vectors divide D / 2. Instantiated for float, BFloat16 and Float16.
template <typename T>
cudaError_t Run(const CudaRotary<T>& rotary, cudaStream_t stream);

}  // namespace moe::attention

#endif  // MOE_KERNELS_ATTENTION_ROTARY_CUDA_H_
