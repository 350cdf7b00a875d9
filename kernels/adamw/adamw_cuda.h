// The CUDA path of adamw.h. Internal: plain C++ between adamw.cc (Abseil) and adamw_cuda.cu (nvcc,
// no Abseil).
#ifndef MOE_KERNELS_ADAMW_ADAMW_CUDA_H_
#define MOE_KERNELS_ADAMW_ADAMW_CUDA_H_

#include <cstdint>

#include "kernels/adamw/adamw_cpu.h"
#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"

namespace moe::adamw {

// The arguments of AdamW: arrays [n] in device memory, none of them shared.
struct CudaAdamW {
  AdamWStep step;
  const float* gradient;
  float* weight;
  float* m;
  float* v;
  BFloat16* rounded_weight = nullptr;  // also the new weights, rounded to nearest even; or nullptr
  int64_t n;
};

// Enqueues on `stream` and returns; the error of the launch alone. The bits of AdamWRange: the same
// IEEE additions, products, divisions and square root in the same order, none of them fused or
// approximated. NaNs stay NaNs, of another payload.
cudaError_t Run(const CudaAdamW& adamw, cudaStream_t stream);

}  // namespace moe::adamw

#endif  // MOE_KERNELS_ADAMW_ADAMW_CUDA_H_
