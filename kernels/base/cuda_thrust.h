// Thrust, the CUDA toolkit's library, for .cu files; on the simulator a loop.
#ifndef MOE_KERNELS_BASE_CUDA_THRUST_H_
#define MOE_KERNELS_BASE_CUDA_THRUST_H_

#include <cstdint>

#include "kernels/base/cuda_kernel.h"

#if defined(__CUDACC__)
#include <thrust/system/cuda/execution_policy.h>
#include <thrust/system_error.h>
#include <thrust/tabulate.h>
#endif

namespace moe::cuda {

// values[i] = value(i) for i < count. Enqueued like a kernel; allocates nothing.
template <typename T, typename Value>
cudaError_t Tabulate(T* values, int64_t count, Value value, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
#if defined(__CUDACC__)
  (void)cudaGetLastError();  // Thrust throws the last error of this thread, too
  try {
    thrust::tabulate(thrust::cuda::par_nosync.on(stream), values, values + count, value);
  } catch (const thrust::system_error& error) {
    return static_cast<cudaError_t>(error.code().value());
  }
  return cudaSuccess;
#else
  return cusim::LaunchOne(
      [=] {
        for (int64_t i = 0; i < count; ++i) values[i] = value(i);
      },
      stream);
#endif
}

}  // namespace moe::cuda

#endif  // MOE_KERNELS_BASE_CUDA_THRUST_H_
