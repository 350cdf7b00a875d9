// The CUDA path of cast.h. Internal: plain C++ between cast.cc (Abseil) and cast_cuda.cu (nvcc, no
// Abseil).
#ifndef MOE_KERNELS_CAST_CAST_CUDA_H_
#define MOE_KERNELS_CAST_CAST_CUDA_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"

namespace moe::cast {

// out[i] = in[i], rounded to nearest even: the bits of Cast; a NaN of Float16 is a NaN of
// another payload. Both [n], in device
// memory, anywhere; 16-byte accesses if both begin at a multiple of 16 bytes. Enqueues on `stream`
// and returns; the error of the launch alone.
// Instantiated for float -> 16-bit types, those -> float, float -> float.
template <typename From, typename To>
cudaError_t Run(const From* in, To* out, int64_t n, cudaStream_t stream);

}  // namespace moe::cast

#endif  // MOE_KERNELS_CAST_CAST_CUDA_H_
